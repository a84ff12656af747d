"""
Django's compilers, which remember what does not change: a column's text and its converters.

A run is a hundred statements, and most of its time goes into writing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models.expressions import Col
from django.db.models.sql import compiler

_texts: dict[tuple[str | None, str], str] = {}
_converters: dict[int, tuple[Col, Any]] = {}


class _Remembering:
    def compile(self: Any, node: Any) -> Any:
        if type(node) is not Col:
            return super().compile(node)  # type: ignore[misc]
        key = (node.alias, node.target.column)
        if key not in _texts:
            _texts[key], _ = super().compile(node)  # type: ignore[misc]
        return _texts[key], []

    def get_converters(self: Any, expressions: Any) -> dict[int, Any]:
        found = {i: self._converter(expression) for i, expression in enumerate(expressions)}
        return {i: converter for i, converter in found.items() if converter}

    def _converter(self: Any, expression: Any) -> Any:
        known, converter = _converters.get(id(expression), (None, None))
        if known is not expression:
            converter = super().get_converters([expression]).get(0)  # type: ignore[misc]
            if type(expression) is Col:
                _converters[id(expression)] = (expression, converter)
        return converter

    def has_composite_fields(self: Any, expressions: Any) -> bool:
        return False

    def _order_by_pairs(self: Any) -> Iterator[Any]:
        # Django would make an object of each column to order by its number; names do as well.
        select, self.select = self.select, None
        yield from super()._order_by_pairs()  # type: ignore[misc]
        self.select = select


class SQLCompiler(_Remembering, compiler.SQLCompiler): ...


class SQLInsertCompiler(_Remembering, compiler.SQLInsertCompiler): ...


class SQLDeleteCompiler(_Remembering, compiler.SQLDeleteCompiler): ...


class SQLUpdateCompiler(_Remembering, compiler.SQLUpdateCompiler): ...


class SQLAggregateCompiler(_Remembering, compiler.SQLAggregateCompiler): ...
