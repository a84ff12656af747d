"""
Statements that Django compiles once per shape, since its compiler costs more than the database.

The SQL is Django's own. What differs from one execution to the next goes into *slots*: the
values of columns, and how far a moment lies ahead. What a statement is made of otherwise (which
columns, which expressions, which vendor) is its shape, and shapes are few.

    Rows(ProcessedJob, "default", {"pk": 7}).update(status="DEAD", finished_at=DbNow())

does what ``ProcessedJob.objects.filter(pk=7).update(...)`` does, and means the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.db import connections, models, transaction
from django.db.models.constants import OnConflict
from django.db.models.expressions import BaseExpression, Expression, RawSQL
from django.db.models.sql import InsertQuery, UpdateQuery

from dedupjobs.clock import DbNow
from dedupjobs.lifecycle import prepared

Values = Mapping[str, Any]
Slots = dict[str, Any]  # by name, what stands in an execution's slots

WHERE, TO = "where.", "to."  # a column may stand in both parts of an UPDATE
NOW = DbNow()
FIXED = (BaseExpression, models.F, bool, tuple)  # what belongs to a statement's shape


class Slot(Expression):
    """A place for a value that comes with each execution."""

    def __init__(self, name: str, column: Any) -> None:
        super().__init__(output_field=column)
        self.name = name

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return "%s", (self,)

    def bind(self, value: Any, connection: Any) -> Any:
        """Return ``value`` as the driver takes it."""
        return self.output_field.get_db_prep_value(value, connection, prepared=False)


class MomentSlot(Slot):
    """The same for ``DbNow(after)``: its value is that expression, whose seconds it takes."""

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return DbNow.shifted(connection.vendor), (self,)

    def bind(self, value: DbNow, connection: Any) -> Any:
        return value.shift(connection.vendor)


class UntypedSlot(Slot):
    """A slot that no column gives its type: the driver takes the value as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)

    def bind(self, value: Any, connection: Any) -> Any:
        """Return ``value``."""
        return value


class Elsewhere(Expression):
    """SQL that refers to another part of the same statement, where a value would stand."""

    def __init__(self, sql: str, *params: Any) -> None:
        super().__init__()
        self.sql, self.params = sql, params

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return self.sql, self.params


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL, its parameters (slots among them), and how to read a row of its answer."""

    sql: str
    params: tuple[Any, ...]
    columns: tuple[str, ...] = ()
    converters: tuple[tuple[int, tuple[Any, ...], Any], ...] = ()

    def change(self, alias: str, slots: Slots) -> int:
        """Execute it and return how many rows it has changed."""
        connection = connections[alias]
        with prepared.cursor(connection) as cursor:
            cursor.execute(self.sql, self._bound(slots, connection))
            return int(cursor.rowcount)

    def row(self, alias: str, slots: Slots) -> dict[str, Any] | None:
        """Return the first row of the answer by its columns' names, or None."""
        return next(iter(self.rows(alias, slots)), None)

    def rows(self, alias: str, slots: Slots) -> list[dict[str, Any]]:
        """Return the answer's rows by their columns' names."""
        connection = connections[alias]
        # Whatever cuts this off, the cursor is closed: on SQLite it would hold the write lock.
        with prepared.cursor(connection) as cursor:
            cursor.execute(self.sql, self._bound(slots, connection))
            found = [list(values) for values in cursor.fetchall()]
        for values in found:
            for place, convert, expression in self.converters:
                for one_of in convert:
                    values[place] = one_of(values[place], expression, connection)
        return [dict(zip(self.columns, values, strict=True)) for values in found]

    def _bound(self, slots: Slots, connection: Any) -> list[Any]:
        return [
            p.bind(slots[p.name], connection) if isinstance(p, Slot) else p for p in self.params
        ]


_compiled: dict[Any, Statement] = {}


def compiled(shape: tuple[Any, ...], alias: str, build: Callable[[Any], Statement]) -> Statement:
    """Return the statement of a shape on this alias, which ``build`` makes from a connection."""
    connection = connections[alias]
    key = (connection.vendor, alias, *shape)
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = build(connection)
    return found


# ---- changing a row


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table that fit ``where``, whose keys are lookups as in ``filter``."""

    model: type[models.Model]
    alias: str
    where: Values

    def update(self, **to: Any) -> int:
        """Return how many rows were changed."""
        statement, slots = self.statement(to, ())
        with transaction.mark_for_rollback_on_error(using=self.alias):
            return statement.change(self.alias, slots)

    def update_and_read(self, columns: tuple[str, ...], **to: Any) -> Any:
        """Return the row after its change, with these columns, or None if there was none."""
        if can_return_updated(self.alias):
            statement, slots = self.statement(to, columns)
            with transaction.mark_for_rollback_on_error(using=self.alias):
                values = statement.row(self.alias, slots)
            return None if values is None else instance(self.model, self.alias, values)
        if not self.update(**to):
            return None
        found = self.model._base_manager.using(self.alias)
        return found.only(*columns).get(pk=self.where["pk"])

    def statement(self, to: Values, columns: tuple[str, ...] = ()) -> tuple[Statement, Slots]:
        """Return the UPDATE and what stands in its slots, compiled if this shape is new."""
        slots: Slots = {}
        where = tuple(shape_of(WHERE, self.where, slots))
        changes = tuple(shape_of(TO, to, slots))
        shape = (self.model, "update", where, changes, columns)

        def build(connection: Any) -> Statement:
            found, to = (with_slots(self.model, *part) for part in ((WHERE, where), (TO, changes)))
            return updating(connection, self.model, found, to, columns)

        return compiled(shape, self.alias, build), slots


def updating(
    connection: Any, model: type[models.Model], where: Values, to: Values, columns: tuple[str, ...]
) -> Statement:
    """Compile an UPDATE; ``where`` and ``to`` may have slots, ``~`` before a lookup denies it."""
    found = model._base_manager.using(connection.alias)
    for lookup, value in where.items():
        if lookup.startswith("~"):
            found = found.exclude(**{lookup[1:]: value})
    query: Any = found.filter(**{k: v for k, v in where.items() if k[0] != "~"}).query
    query = query.chain(UpdateQuery)
    query.add_update_values(to)
    sql, params = query.get_compiler(connection=connection).as_sql()
    return _returning(connection, model, sql, params, columns)


# ---- making a row


def insert(
    model: type[models.Model],
    alias: str,
    /,
    *,
    returning: tuple[str, ...],
    ignore_conflicts: bool = False,
    **values: Any,
) -> Any:
    """
    Insert a row and return it, or None if a conflict was ignored.

    Of what the database computes, only the columns in ``returning`` are known of it.
    """
    statement, slots = insertion(
        model, alias, returning=returning, ignore_conflicts=ignore_conflicts, values=values
    )
    with transaction.mark_for_rollback_on_error(using=alias):
        computed = statement.row(alias, slots)
    return None if computed is None else inserted(model, alias, values, computed)


def inserted(model: type[models.Model], alias: str, values: Values, computed: Values) -> Any:
    """Return a new row, of which ``computed`` is what the database has answered."""
    given = {name: value for name, value in values.items() if not isinstance(value, DbNow)}
    return instance(model, alias, {**defaults(model), **given, **computed})


def insert_for_each(rows: models.QuerySet[Any], model: type[models.Model], **values: Any) -> int:
    """
    Insert one row of ``model`` for each of ``rows``, in their order, by one statement.

    ``values``: of every column but the key, either an expression on ``rows`` or what all share.
    """
    connection = connections[rows.db]
    columns, chosen = [], {}
    for name, value in values.items():
        column = _column(model, name)
        columns.append(connection.ops.quote_name(column.column))
        chosen[f"to_{name}"] = (
            value
            if hasattr(value, "resolve_expression")
            # No Value(): Django would convert what is selected as if it were read.
            else RawSQL(
                "%s", [column.get_db_prep_save(value, connection)], output_field=models.TextField()
            )
        )
    found = rows.annotate(**chosen).values_list(*chosen)
    sql, params = found.query.get_compiler(connection=connection).as_sql()
    table = connection.ops.quote_name(model._meta.db_table)
    with transaction.mark_for_rollback_on_error(using=rows.db), connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} ({', '.join(columns)}) {sql}", params)
        return int(cursor.rowcount)


def insertion(
    model: type[models.Model],
    alias: str,
    *,
    returning: tuple[str, ...],
    values: Values,
    ignore_conflicts: bool = False,
) -> tuple[Statement, Slots]:
    """Return the INSERT and what stands in its slots, compiled if this shape is new."""
    slots: Slots = {}
    columns = tuple(shape_of(TO, values, slots))
    shape = (model, "insert", columns, returning, ignore_conflicts)

    def build(connection: Any) -> Statement:
        given = with_slots(model, TO, columns)
        return inserting(connection, model, given, returning, ignore_conflicts=ignore_conflicts)

    return compiled(shape, alias, build), slots


def inserting(
    connection: Any,
    model: type[models.Model],
    values: Values,
    returning: tuple[str, ...],
    *,
    ignore_conflicts: bool = False,
) -> Statement:
    """Compile an INSERT of one row; ``values`` may have slots."""
    fields = [f for f in model._meta.local_concrete_fields if not f.primary_key]
    query = InsertQuery(model, on_conflict=OnConflict.IGNORE if ignore_conflicts else None)
    query.insert_values(fields, [model(**values)])
    ((sql, params),) = query.get_compiler(connection=connection).as_sql()
    return _returning(connection, model, sql, params, returning)


def parts_of_insert(statement: Statement, closing: str) -> tuple[str, str, str]:
    """Return what stands before an INSERT's values, these, and what follows ``closing``."""
    insert, found, rest = statement.sql.partition(" VALUES (")
    values, closed, rest = rest.rpartition(closing)
    if not found or not closed:
        raise AssertionError(f"Django writes INSERT otherwise than expected: {statement.sql}")
    return insert, values, rest


@lru_cache
def defaults(model: type[models.Model]) -> Values:
    """Return what a new row of a model has in columns that are not given."""
    return {f.attname: f.get_default() for f in model._meta.concrete_fields}


def can_return_inserted(alias: str) -> bool:
    """Whether INSERT answers with the row."""
    return bool(connections[alias].features.can_return_columns_from_insert)


def can_return_updated(alias: str) -> bool:
    """Whether UPDATE answers with the row."""
    return can_return_inserted(alias) and connections[alias].vendor != "mysql"


# ---- reading a row


@dataclass(frozen=True, slots=True)
class Select:
    """A queryset of ``model`` with slots, built once; ``name`` tells it from others."""

    model: type[models.Model]
    name: str
    build: Callable[[], models.QuerySet[Any]]

    def first(self, alias: str, **slots: Any) -> Any:
        """Return the first row as an instance of the model, or None."""
        values = self.compiled(alias).row(alias, slots)
        return None if values is None else instance(self.model, alias, values)

    def rows(self, alias: str, **slots: Any) -> list[dict[str, Any]]:
        """Return all rows by their columns' names."""
        return self.compiled(alias).rows(alias, slots)

    def compiled(self, alias: str) -> Statement:
        """Return its statement on this alias; asks the database nothing."""
        return compiled((self.model, self.name), alias, self.compile)

    def compile(self, connection: Any) -> Statement:
        """Compile it for a connection."""
        found = self.build().using(connection.alias)
        compiler = found.query.get_compiler(connection=connection)
        sql, params = compiler.as_sql()
        names = [f.attname for f in self.model._meta.concrete_fields]
        names += list(found.query.annotation_select)
        expressions = [expression for expression, _, _ in compiler.select]
        return Statement(sql, tuple(params), tuple(names), _converters(compiler, expressions))


def among(pks: Iterable[int]) -> RawSQL:
    """Return what ``pk__in=`` takes for many keys: as one text, since each parameter costs time."""
    return RawSQL(", ".join(str(int(pk)) for pk in pks), ())  # noqa: S611 - whole numbers alone


def instance(model: type[models.Model], alias: str, values: Values) -> Any:
    """Return a row as Django would have read it; columns that are not given are deferred."""
    names = [f.attname for f in model._meta.concrete_fields if f.attname in values]
    made = model.from_db(alias, names, [values[name] for name in names])
    for name in values.keys() - set(names):
        setattr(made, name, values[name])
    return made


# ---- shapes


def shape_of(part: str, values: Values, slots: Slots) -> Iterator[tuple[str, Any]]:
    """Yield what a part of a statement is made of, and put what differs into ``slots``."""
    for name, value in values.items():
        if isinstance(value, DbNow):
            if value.microseconds:
                slots[part + name] = value
                yield name, MomentSlot
            else:
                yield name, NOW
        elif isinstance(value, FIXED) or (value is None and part.endswith(WHERE)):
            yield name, value
        else:
            slots[part + name] = value
            yield name, Slot


def with_slots(model: type[models.Model], part: str, shape: Any) -> dict[str, Any]:
    made = {}
    for name, kind in shape:
        if kind is Slot or kind is MomentSlot:
            column = name.partition("__")[0]
            found = model._meta.pk if column == "pk" else _column(model, column)
            made[name] = kind(part + name, found)
        else:
            made[name] = kind
    return made


def _column(model: type[models.Model], name: str) -> Any:
    return next(f for f in model._meta.concrete_fields if name in (f.name, f.attname))


def _returning(
    connection: Any, model: type[models.Model], sql: str, params: Any, columns: tuple[str, ...]
) -> Statement:
    sql, params = _with_constants(sql, params)
    if not columns:
        return Statement(sql, params)
    found = model._base_manager.using(connection.alias).only(*columns)
    compiler = found.query.get_compiler(connection=connection)
    compiler.setup_query()
    texts, names, expressions = [], [], []
    for expression, (text, _), _alias in compiler.select:
        names.append(expression.target.attname)
        texts.append(f"{text} AS {connection.ops.quote_name(names[-1])}")
        expressions.append(expression)
    sql = f"{sql} RETURNING {', '.join(texts)}"
    return Statement(sql, params, tuple(names), _converters(compiler, expressions))


def _with_constants(sql: str, params: Iterable[Any]) -> tuple[str, tuple[Any, ...]]:
    """Write parameters that are always NULL, empty or a number into the SQL: each costs time."""
    texts, left = _PLACE.split(sql), []
    made = texts[0]
    for param, text in zip(params, texts[1:], strict=True):
        constant = _constant(param)
        if constant is None:
            left.append(param)
        made += (constant or "%s") + text
    return made, tuple(left)


_PLACE = re.compile(r"(?<!%)%s")


def _constant(param: Any) -> str | None:
    if param is None:
        return "NULL"
    if type(param) is int:
        return str(param)
    return "''" if param == "" else None


def _converters(compiler: Any, expressions: list[Any]) -> Any:
    found = compiler.get_converters(expressions)
    return tuple((place, tuple(convert), expr) for place, (convert, expr) in found.items())
