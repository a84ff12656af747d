"""
System checks: what would hurt in production is named by `manage.py check`, with its cure.

``E`` keeps Django from starting, ``W`` warns. Those that read the database run with
``check --database default`` (``migrate`` runs them too); those that reach for Redis, with
``check --deploy``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.urls import get_resolver
from django.utils.module_loading import import_string
from rq.worker import BaseWorker

from dedupjobs import callables, census, conf, coordinator, dispatch, lifecycle, registry, slots
from dedupjobs.inbox import handlers, web
from dedupjobs.models import ProcessedJob
from dedupjobs.routes import Consumer, Target

SHARED_BACKENDS = "django_redis.cache.RedisCache"


def register_all() -> None:
    """Register the checks; called once the app is ready."""
    for check in (
        _settings,
        _misspelled,
        _installed_apps,
        _jobs_outside_apps,
        _jobs,
        _policies,
        _queues,
        _lock_cache,
        _status_cache,
        _invalidated_caches,
        _sentinels,
        _worker,
        _database_settings,
        _events,
    ):
        register(check, Tags.compatibility)
    register(_webhooks, Tags.urls)
    register(_unknown_names, Tags.database)
    register(_mysql_tables, Tags.database)
    register(_redis, "dedupjobs", deploy=True)
    register(_lock_servers, "dedupjobs", deploy=True)


def _settings(**_: Any) -> list[CheckMessage]:
    mistakes = [*conf.problems(), *registry.wrong_defaults()]
    return [
        *(Error(text, id="dedupjobs.E001") for text in mistakes),
        *(Warning(t, hint=cure, id="dedupjobs.W009") for t, cure in conf.contradictions()),
    ]


def _misspelled(**_: Any) -> list[CheckMessage]:
    names = [name for name in dir(settings) if name.isupper() and name != "DEDUPJOBS"]
    return [
        Warning(
            f"Setting {name} is read by nobody here: it is nearly DEDUPJOBS.",
            hint="Write DEDUPJOBS, or give the setting a name that is less like it.",
            id="dedupjobs.W011",
        )
        for name in difflib.get_close_matches("DEDUPJOBS", names, cutoff=0.85)
    ]


def _installed_apps(**_: Any) -> list[CheckMessage]:
    if apps.is_installed("django_rq"):
        return []
    text = "django_rq is not in INSTALLED_APPS, so manage.py has no command rqworker."
    return [Error(text, hint='Add "django_rq" to INSTALLED_APPS.', id="dedupjobs.E035")]


def _jobs_outside_apps(**_: Any) -> list[CheckMessage]:
    with suppress(Exception):  # Django's own checks tell
        get_resolver().url_patterns  # noqa: B018 - what views import is registered by then
    return [
        Warning(
            f"Job {job.name} is named by its module, which belongs to no installed app: a worker "
            "does not find it there and holds its rows, and it gets another name once the app is "
            "added.",
            hint="Add its app to INSTALLED_APPS. What was enqueued meanwhile runs if the job keeps "
            f"that name: aliases=({job.name!r},).",
            id="dedupjobs.W010",
        )
        for job in registry.outside_apps()
    ]


def _jobs(**_: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for job in registry.every():
        options = job.options
        if options.queue not in dispatch.queue_names():
            known = ", ".join(dispatch.queue_names()) or "none"
            found.append(
                Error(
                    f"Job {job.name} uses queue {options.queue!r}, which RQ_QUEUES lacks "
                    f"(there: {known}).",
                    hint="Add the queue to RQ_QUEUES or correct queue= of the job.",
                    id="dedupjobs.E002",
                )
            )
        if options.atomic and _vendor() == "sqlite" and _too_long_for_sqlite(options):
            found.append(
                Error(
                    f"Job {job.name} is atomic with timeout={options.timeout} on SQLite, whose one "
                    f"writer keeps its own heartbeat out; that needs timeout < lease / 3 = "
                    f"{options.lease / 3:g} s.",
                    hint="Shorten timeout, lengthen lease, or use PostgreSQL or MariaDB.",
                    id="dedupjobs.E003",
                )
            )
    return found + list(_names_that_mysql_confuses())


def _names_that_mysql_confuses() -> Iterator[CheckMessage]:
    if _vendor() != "mysql":
        return
    names = sorted((job.name for job in registry.every()), key=str.casefold)
    for one, another in pairwise(names):
        if one.casefold() == another.casefold():
            yield Error(
                f"Jobs {one} and {another} have names that MySQL and MariaDB take for one: each "
                "would be pruned and counted with the other.",
                hint="Give one of them another name, with the old one in aliases=.",
                id="dedupjobs.E020",
            )


def _events(**_: Any) -> list[CheckMessage]:
    if any(conf.problems()):
        return []
    cure = 'Name it in DEDUPJOBS["INBOX"]["CONSUMERS"], or correct consumer= of @inbox.handler.'
    found: list[CheckMessage] = [
        Error(text, hint=cure, id="dedupjobs.E030") for text in handlers.problems()
    ]
    for name, target in conf.outbox().targets.items():
        if target.call and (wrong := _why_not_called(target.call)):
            text = f"Target {name} calls {target.call!r}, which {wrong}"
            cure = 'Correct "call", the dotted path of a plain function that takes an event.'
            found.append(Error(text, hint=cure, id="dedupjobs.E031"))
    return [*found, *_stream_caches()]


def _stream_caches() -> Iterator[CheckMessage]:
    ends: list[tuple[str, Target | Consumer]] = [
        *((f"Target {name}", target) for name, target in conf.outbox().targets.items()),
        *((f"Consumer {name}", consumer) for name, consumer in conf.inbox().consumers.items()),
    ]
    for whose, one in ends:
        if one.stream and one.cache and (wrong := _why_no_stream(one.cache)):
            yield Error(
                f"{whose} has its stream on cache {one.cache!r}, {wrong}.",
                hint=f'Name a cache of CACHES whose backend is "{SHARED_BACKENDS}", or give "url" '
                "instead.",
                id="dedupjobs.E034",
            )


def _why_no_stream(alias: str) -> str:
    try:
        cache: Any = caches[alias]
    except InvalidCacheBackendError:
        return "which CACHES lacks"
    if hasattr(getattr(cache, "client", None), "get_client"):
        return ""
    return f"which is {type(cache).__module__}.{type(cache).__qualname__}, no Redis of django-redis"


def _webhooks(**_: Any) -> list[CheckMessage]:
    if any(conf.problems()):
        return []
    cure = 'Name it in DEDUPJOBS["INBOX"]["CONSUMERS"], or correct inbox.webhook_view().'
    return [Error(text, hint=cure, id="dedupjobs.E033") for text in web.problems()]


def _why_not_called(path: str) -> str:
    try:
        found = import_string(path)
    except ImportError as error:
        return f"can not be imported: {error}"
    return callables.why_idle(found)


def _policies(**_: Any) -> list[CheckMessage]:
    """Name options that contradict each other: nobody can want both."""
    return [
        Error(f"Job {job.name}: {text}", hint=cure, id=f"dedupjobs.{number}")
        for job in registry.every()
        for number, text, cure in _contradictions(job)
    ]


def _contradictions(job: registry.Job[..., Any]) -> Iterator[tuple[str, str, str]]:
    options, window = job.options, job.unique_for
    if options.debounce and options.on_conflict == "raise":
        yield (
            "E011",
            "debounce collects calls on an active key, on_conflict='raise' refuses them.",
            "Remove one of the two.",
        )
    if options.max_wait and options.max_wait < (options.debounce or math.inf):
        yield (
            "E012",
            f"max_wait={options.max_wait:g} s bounds a debounce of {options.debounce} s.",
            "Set debounce, and max_wait to at least as much.",
        )
    if job.key_maker is None and (options.newest_wins or options.on_conflict != "return"):
        yield (
            "E013",
            "key=None, so no call meets another, but it says what to do when one does.",
            "Give it a key, or remove on_conflict and debounce.",
        )
    seconds = math.inf if window in (None, registry.FOREVER) else window.total_seconds()
    if seconds < (options.timeout or math.inf):
        yield (
            "E014",
            f"unique_for={seconds:g} s is shorter than timeout={options.timeout} s: a call that "
            "comes late in a run would be answered otherwise than one just after it.",
            "Lengthen unique_for or shorten timeout.",
        )
    if options.scheduled:
        yield from _schedule_contradictions(job)


def _schedule_contradictions(job: registry.Job[..., Any]) -> Iterator[tuple[str, str, str]]:
    options = job.options
    if options.every and options.cron:
        yield "E015", "it has both every and cron.", "Keep one of them."
        return
    slot, another = (datetime(2000, 1, day, tzinfo=UTC) for day in (1, 2))
    try:
        identities = {job.identity_of({"slot": s}) for s in (slot, another)}
    except Exception as error:  # a key is made by the project's code
        yield (
            "E016",
            f"the coordinator calls it with slot= alone, which does not fit: {error}",
            "Give it one argument without a default, slot, which is an aware datetime in UTC.",
        )
        return
    if job.key_maker is None or len(identities) == 1:
        yield (
            "E017",
            "it runs by the clock, but its key lacks the slot, so only one slot would ever run.",
            'Put {slot} into key=, for example key="report:{slot}".',
        )
    following = slots.after(slot, every=options.every, cron=options.cron, zone=UTC)
    gap = max((b - a).total_seconds() for a, b in pairwise(islice(following, 100)))
    if job.unique_for is None or job.unique_for.total_seconds() < 2 * gap:
        yield (
            "E018",
            "its key is free again while its slot is still the newest one, so a restarted "
            "coordinator would run the slot twice.",
            f"Set unique_for to FOREVER or at least twice the time between slots ({gap:g} s).",
        )


def _too_long_for_sqlite(options: registry.Options) -> bool:
    return options.timeout is None or options.timeout >= options.lease / 3


def _queues(**_: Any) -> list[CheckMessage]:
    hint = 'Set RQ_QUEUES = {"default": {"URL": "redis://localhost:6379/0"}}.'
    given = getattr(settings, "RQ_QUEUES", {})
    if not isinstance(given, Mapping):
        return [Error(f"RQ_QUEUES is {given!r}, no dict.", hint=hint, id="dedupjobs.E004")]
    if not given:
        text = "RQ_QUEUES is missing or empty, so no job can be handed to a worker."
        return [Error(text, hint=hint, id="dedupjobs.E004")]
    found: list[CheckMessage] = []
    for name in given:
        if wrong := dispatch.why_unusable(name):
            text = f"RQ_QUEUES[{name!r}] gives no connection: {wrong}."
            cure = 'Give it a "URL", or "HOST" and "PORT", as django-rq describes.'
            found.append(Error(text, hint=cure, id="dedupjobs.E027"))
    return found


def _lock_cache(**_: Any) -> list[CheckMessage]:
    try:
        aliases = conf.get().lock_caches
    except ImproperlyConfigured:
        return []  # E001 tells
    wrong = [message for alias in aliases for message in _of_lock_cache(alias)]
    return wrong or [_message(problem) for problem in census.at_one_address()]


def _lock_servers(**_: Any) -> list[CheckMessage]:
    return [_message(problem) for problem in census.problems(census.take())]


def _message(problem: census.Problem) -> CheckMessage:
    kind = Error if problem.number.startswith("E") else Warning
    return kind(problem.words, hint=problem.cure, id=f"dedupjobs.{problem.number}")


def _of_lock_cache(alias: str) -> Iterator[CheckMessage]:
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        yield Error(
            f'DEDUPJOBS["LOCK_CACHE"] is {alias!r}, which CACHES lacks.',
            hint="Add a django-redis cache under this alias, or name another one.",
            id="dedupjobs.E005",
        )
        return
    if not hasattr(cache, "lock"):
        backend = f"{type(cache).__module__}.{type(cache).__qualname__}"
        yield Error(
            f"CACHES[{alias!r}] is {backend}, which has no locks that workers share.",
            hint=f'Use "{SHARED_BACKENDS}", or name an alias that does in DEDUPJOBS["LOCK_CACHE"].',
            id="dedupjobs.E006",
        )


def _status_cache(**_: Any) -> list[CheckMessage]:
    try:
        alias = conf.get().STATUS_CACHE
    except ImproperlyConfigured:
        return []  # E001 tells
    if alias is None:
        return []
    try:
        cache: Any = caches[alias]
    except InvalidCacheBackendError:
        return [
            Error(
                f'DEDUPJOBS["STATUS_CACHE"] is {alias!r}, which CACHES lacks.',
                hint="Add a django-redis cache under this alias, or set None for no status cache.",
                id="dedupjobs.E021",
            )
        ]
    if hasattr(getattr(cache, "client", None), "get_client"):
        return []
    backend = f"{type(cache).__module__}.{type(cache).__qualname__}"
    return [
        Error(
            f"CACHES[{alias!r}] is {backend}, which is no Redis that processes share.",
            hint=f'Use "{SHARED_BACKENDS}", name an alias that does in DEDUPJOBS["STATUS_CACHE"], '
            "or set None for no status cache.",
            id="dedupjobs.E022",
        )
    ]


def _invalidated_caches(**_: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for job in registry.every():
        for alias in sorted({entry.alias for entry in job.invalidates}):
            options = settings.CACHES.get(alias)
            if options is None:
                known = ", ".join(settings.CACHES)
                found.append(
                    Error(
                        f"Job {job.name} invalidates entries of cache {alias!r}, which CACHES "
                        f"lacks (there: {known}).",
                        hint="Add the cache, or correct invalidates= of the job.",
                        id="dedupjobs.E023",
                    )
                )
            elif _ignores_exceptions(options):
                found.append(
                    Warning(
                        f"Job {job.name} invalidates entries of cache {alias!r}, which hides its "
                        "errors (IGNORE_EXCEPTIONS): an entry that could not be deleted stays, and "
                        "nobody is told.",
                        hint="Give such entries a short TTL, or take IGNORE_EXCEPTIONS away.",
                        id="dedupjobs.W008",
                    )
                )
    return found


def _sentinels(**_: Any) -> list[CheckMessage]:
    queues = {f"RQ_QUEUES[{name!r}]": given for name, given in _mappings("RQ_QUEUES")}
    watched = {
        f"CACHES[{name!r}]": given.get("OPTIONS") or {} for name, given in _mappings("CACHES")
    }
    asking = {
        place: given for place, given in {**queues, **watched}.items() if "SENTINELS" in given
    }
    return [
        *(_asks_long(place) for place, given in asking.items() if not _asks_briefly(given)),
        *(_reads_a_replica(name) for name, given in _mappings("CACHES") if _is_of_replicas(given)),
    ]


def _mappings(setting: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what a setting says by name; whatever is no dict there is told by others."""
    given = getattr(settings, setting, {})
    pairs = given.items() if isinstance(given, Mapping) else ()
    return [(name, value) for name, value in pairs if isinstance(value, Mapping)]


def _options(cache: Mapping[str, Any]) -> Mapping[str, Any]:
    return cache.get("OPTIONS") or {}


def _asks_briefly(given: Mapping[str, Any]) -> bool:
    kwargs = given.get("SENTINEL_KWARGS") or {}
    return {"socket_timeout", "retry"} <= set(kwargs)


def _asks_long(place: str) -> CheckMessage:
    return Warning(
        f"{place} has SENTINELS without a time-out and retries in SENTINEL_KWARGS: a sentinel "
        "that is away is asked 11 times, and up to 5 s each time, before the next one is.",
        hint='Add "SENTINEL_KWARGS": {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, '
        '"retry": None}.',
        id="dedupjobs.W014",
    )


def _is_of_replicas(given: Mapping[str, Any]) -> bool:
    location = given.get("LOCATION")
    first = location[0] if isinstance(location, (list, tuple)) and location else location
    client = str(_options(given).get("CLIENT_CLASS", ""))
    chosen = isinstance(location, str) and client.endswith("SentinelClient")  # it says so itself
    return isinstance(first, str) and "is_master=0" in first and not chosen


def _reads_a_replica(alias: str) -> CheckMessage:
    return Error(
        f"CACHES[{alias!r}] sends writes to a replica: is_master=0 stands in its first LOCATION.",
        hint="Let the first one be the primary (is_master=1, or no is_master), or use "
        '"django_redis.client.SentinelClient" with one LOCATION, which finds both.',
        id="dedupjobs.E032",
    )


def _ignores_exceptions(options: dict[str, Any]) -> bool:
    general = getattr(settings, "DJANGO_REDIS_IGNORE_EXCEPTIONS", False)
    return bool(options.get("OPTIONS", {}).get("IGNORE_EXCEPTIONS", general))


def _worker(**_: Any) -> list[CheckMessage]:
    given = getattr(settings, "RQ", {})
    if not isinstance(given, Mapping):
        return [_no_worker(f"RQ is {given!r}, no dict.")]
    path = given.get("WORKER_CLASS", "rq.Worker")
    try:
        found = import_string(path) if isinstance(path, str) else path
    except ImportError as error:
        return [_no_worker(f'RQ["WORKER_CLASS"] = {path!r} can not be imported: {error}.')]
    if not (isinstance(found, type) and issubclass(found, BaseWorker)):
        return [_no_worker(f'RQ["WORKER_CLASS"] = {path!r} is no worker of RQ.')]
    reads_json = dispatch.reads_json()
    if reads_json:
        return []
    return [
        Warning(
            f'RQ["WORKER_CLASS"] is {path!r}, which brings no coordinator: without one, no retry '
            "is sent, no dead worker's job is recovered and no lost message is sent again.",
            hint='Set RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}, or run '
            "`manage.py dedupjobs_coordinator` beside your workers and silence this check.",
            id="dedupjobs.W001",
        ),
        Warning(
            f'RQ["WORKER_CLASS"] is {path!r}, which unpickles what it reads from Redis: whoever '
            "can write there can run code in your workers.",
            hint='"dedupjobs.worker.DedupWorker" reads JSON only.',
            id="dedupjobs.W002",
        ),
    ]


def _no_worker(text: str) -> CheckMessage:
    hint = 'Set RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}.'
    return Error(text, hint=hint, id="dedupjobs.E007")


def _vendor() -> str:
    return connections[lifecycle.alias()].vendor


def _database_settings(**_: Any) -> list[CheckMessage]:
    connection = connections[lifecycle.alias()]
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "sqlite":
        return list(_sqlite(connection.alias, options))
    if connection.vendor in ("postgresql", "mysql"):
        return list(_isolation(connection, options))
    return [
        Error(
            f"Database {connection.alias!r} is {connection.vendor}, which no test here covers.",
            hint="Use PostgreSQL, MariaDB, MySQL or SQLite for the jobs' tables (a router can "
            "send them there).",
            id="dedupjobs.E008",
        )
    ]


def _sqlite(alias: str, options: dict[str, Any]) -> Iterator[CheckMessage]:
    mode = options.get("transaction_mode")
    if str(mode).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield Error(
            f"DATABASES[{alias!r}] is SQLite with transaction_mode={mode!r}: a transaction that "
            "reads first can not become a writer, and fails with 'database is locked'.",
            hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": '
            '"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"}.',
            id="dedupjobs.E009",
        )
    if "journal_mode=wal" not in str(options.get("init_command", "")).lower().replace(" ", ""):
        yield Warning(
            f"DATABASES[{alias!r}] is SQLite without WAL: readers and the writer block each other.",
            hint='Add "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL" to '
            "OPTIONS.",
            id="dedupjobs.W003",
        )
    if float(options.get("timeout", 5)) < 10:  # noqa: PLR2004
        yield Warning(
            f"DATABASES[{alias!r}] is SQLite with timeout={options.get('timeout', 5)}: workers and "
            "web processes share one writer and will fail while they wait.",
            hint='Set "timeout": 20 in OPTIONS.',
            id="dedupjobs.W004",
        )


def _isolation(connection: Any, options: dict[str, Any]) -> Iterator[CheckMessage]:
    # Both default to READ COMMITTED in Django; an explicit None is MySQL's own default.
    level = options.get("isolation_level", "READ COMMITTED")
    name = getattr(level, "name", str(level)).upper().replace("_", " ")
    if level is None:
        name = "READ COMMITTED" if connection.vendor == "postgresql" else "REPEATABLE READ"
    if name not in ("READ COMMITTED", "2"):  # psycopg's number for it is 2
        yield Error(
            f"DATABASES[{connection.alias!r}] uses isolation level {name}: calls and atomic jobs "
            "would fail as soon as somebody else, or a heartbeat, has written what they read.",
            hint="Use READ COMMITTED for the alias that holds the jobs' tables.",
            id="dedupjobs.E010",
        )


def _unknown_names(databases: Any = None, **_: Any) -> list[CheckMessage]:
    alias = lifecycle.alias()
    if alias not in (databases or ()):
        return []
    try:
        there = set(connections[alias].introspection.table_names())
    except DatabaseError:
        return []  # Django's own checks tell
    if ProcessedJob._meta.db_table not in there:
        return []  # the first `migrate` runs this check; an enqueue would raise NotMigrated
    return [
        Warning(
            f"Rows wait for job {name!r}, which no installed app registers: no worker with this "
            "code can run them.",
            hint=f"Deploy the code that has it, add its app to INSTALLED_APPS, or keep its old "
            f"name with name= or aliases=.{_meant(name)}",
            id="dedupjobs.W005",
        )
        for name in coordinator.unknown_names()
    ]


def _meant(name: str) -> str:
    near = registry.near(name)
    return f" Known is {near}: is that it?" if near else ""


def _mysql_tables(databases: Any = None, **_: Any) -> list[CheckMessage]:
    alias = lifecycle.alias()
    if alias not in (databases or ()) or _vendor() != "mysql":
        return []
    try:
        return [message for table in _tables_of(alias) for message in _unfit(*table)]
    except DatabaseError:
        return []  # Django's own checks tell


def _tables_of(alias: str) -> list[tuple[str, str, str]]:
    """Return name, engine and collation of our tables on MySQL."""
    ours = [model._meta.db_table for model in apps.get_app_config("dedupjobs").get_models()]
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT table_name, engine, COALESCE(table_collation, '') "
            "FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name IN %s ORDER BY table_name",
            [tuple(ours)],
        )
        return list(cursor.fetchall())


def _unfit(table: str, engine: str, collation: str) -> Iterator[CheckMessage]:
    if engine != "InnoDB":
        yield Error(
            f"Table {table} is kept by {engine}, which has no transactions: a job could run twice.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB",
            id="dedupjobs.E019",
        )
    if not collation.startswith("utf8mb4"):
        yield Warning(
            f"Table {table} has the collation {collation}: a key, a tenant or an error message "
            "with a character that it lacks can not be stored.",
            hint=f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4",
            id="dedupjobs.W007",
        )


def _redis(**_: Any) -> list[CheckMessage]:
    answering = dispatch.reachable_queues() if dispatch.queue_names() else []
    return [
        Warning(
            f"The Redis of queue {name!r} does not answer within {conf.get().LOCK_TIMEOUT:g} s. "
            "Jobs can be enqueued (their rows wait), but none will run.",
            hint=f"Start it, or correct RQ_QUEUES[{name!r}].",
            id="dedupjobs.W006",
        )
        for name in dispatch.queue_names()
        if name not in answering
    ]
