"""
What is wrong with an installation, from the inside: settings, tables, clocks, servers, processes.

Each finding says what it is and how it is mended. What can not be asked is a finding, too.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from django.db.migrations.executor import MigrationExecutor

from dedupjobs import (
    census,
    clock,
    conf,
    coordinator,
    counters,
    dispatch,
    lifecycle,
    load,
    registry,
    traffic,
)
from dedupjobs.alerts import book, sight
from dedupjobs.clock import DbNow
from dedupjobs.exceptions import UnknownQueue
from dedupjobs.models import WAITING, Severity
from dedupjobs.wire import UNREACHABLE

OK, WARNING, FAILURE = "ok", "warning", "error"

ODD_CLOCK = 2.0  # seconds between two clocks that deserve a word
LATE = 30.0  # seconds without a sign of life
FULL = 0.9  # of a limit
EVICTING = ("allkeys", "volatile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``level``: "ok", "warning" or "error". ``cure``: what to do; empty where all is well."""

    about: str
    level: str
    words: str
    cure: str = ""


Findings = Iterator[Finding]


def examine() -> list[Finding]:
    """Look at everything; never raises for a server that is away."""
    if wrong := list(conf.problems()):  # nothing else can be asked with such settings
        return [Finding(about="settings", level=FAILURE, words=w, cure=_SETTINGS) for w in wrong]
    found: list[Finding] = []
    for about, look in _LOOKS:
        mine = list(_asked(about, look))
        found += mine or [Finding(about=about, level=OK, words="no trouble found")]
    return found


_SETTINGS = "Correct DEDUPJOBS, CACHES or RQ_QUEUES in the settings."


def _asked(about: str, look: Callable[[], Findings]) -> Findings:
    try:
        yield from look()
    except (DatabaseError, InterfaceError) as error:
        words = f"the database does not answer: {type(error).__name__}: {error}"
        cure = "Start it, or correct DATABASES."
        yield Finding(about=about, level=FAILURE, words=words, cure=cure)
    except (*UNREACHABLE, UnknownQueue) as error:
        words = f"Redis does not answer: {type(error).__name__}: {error}"
        cure = "Start it, or correct CACHES and RQ_QUEUES."
        yield Finding(about=about, level=FAILURE, words=words, cure=cure)
    except ImproperlyConfigured as error:
        words = f"the settings do not allow to ask: {error}"
        yield Finding(about=about, level=FAILURE, words=words, cure=_SETTINGS)


# ---- what Django's checks know


def _checks() -> Findings:
    told = run_checks(include_deployment_checks=True, databases=[lifecycle.alias()])
    for message in told:
        if str(message.id).startswith("dedupjobs.") and not message.is_silenced():
            level = FAILURE if message.level >= ERROR else WARNING
            words = f"{message.id}: {message.msg}"
            yield Finding(about="checks", level=level, words=words, cure=str(message.hint or ""))


def _registry() -> Findings:
    names = registry.names()
    if names:
        yield Finding(about="registry", level=OK, words=f"{len(names)} job(s) are known")
        return
    modules = ", ".join(f"{name}.py" for name in conf.get().AUTODISCOVER)
    yield Finding(
        about="registry",
        level=WARNING,
        words="no job is known",
        cure=f"Decorate functions with @job in {modules} of an app in INSTALLED_APPS.",
    )


def _serializers() -> Findings:
    for name, queue in getattr(settings, "RQ_QUEUES", {}).items():
        if "SERIALIZER" in queue:
            yield Finding(
                about="serializers",
                level=WARNING,
                words=f"queue {name!r} names a SERIALIZER, which RQ's workers do not read",
                cure="Take it away: a DedupWorker reads JSON, a stock worker RQ's default.",
            )
    reads = "JSON" if dispatch.reads_json() else "pickle"
    yield Finding(about="serializers", level=OK, words=f"messages are {reads}")


def _versions() -> Findings:
    try:
        wanted = metadata.requires("dedupjobs") or []
    except metadata.PackageNotFoundError:
        words = "dedupjobs is not installed as a package"
        yield Finding(about="versions", level=OK, words=words)
        return
    there = [f"Python {platform.python_version()}"]
    for text in wanted:
        if ";" in text:  # of an extra
            continue
        name, bounds = re.match(r"([\w.-]+)\s*(.*)", text).groups()  # type: ignore[union-attr]
        version = metadata.version(name)
        there.append(f"{name} {version}")
        if not fits(version, bounds):
            yield Finding(
                about="versions",
                level=WARNING,
                words=f"{name} {version} is not one of {bounds}, which are tested",
                cure=f"pip install '{name}{bounds}'",
            )
    yield Finding(about="versions", level=OK, words=", ".join(there))


def fits(version: str, bounds: str) -> bool:
    """Return whether a version lies within bounds such as ``">=5.2,<6.2"``."""
    mine = _numbers(version)
    lowest = [_numbers(b[2:]) for b in bounds.split(",") if b.startswith(">=")]
    beyond = [_numbers(b[1:]) for b in bounds.split(",") if re.match("<[0-9]", b)]
    return all(mine >= low for low in lowest) and all(mine < high for high in beyond)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", version)[:3])


# ---- the database


def _migrations() -> Findings:
    connection = connections[lifecycle.alias()]
    executor = MigrationExecutor(connection)
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "dedupjobs"]
    plan = executor.migration_plan(targets)
    if plan:
        names = ", ".join(migration.name for migration, _ in plan)
        yield Finding(
            about="migrations",
            level=FAILURE,
            words=f"pending: {names}",
            cure=f"manage.py migrate dedupjobs --database {connection.alias}",
        )
    else:
        yield Finding(about="migrations", level=OK, words="all are applied")


def _indexes() -> Findings:
    connection = connections[lifecycle.alias()]
    with connection.cursor() as cursor:
        there = set(connection.introspection.table_names(cursor))
        for model in apps.get_app_config("dedupjobs").get_models():
            table = model._meta.db_table
            if table not in there:
                continue  # its migration is pending
            found = connection.introspection.get_constraints(cursor, table)
            names = [thing.name for thing in (*model._meta.indexes, *model._meta.constraints)]
            for name in names:
                if name not in found:
                    yield Finding(
                        about="indexes",
                        level=FAILURE,
                        words=f"table {table} lacks {name}",
                        cure="Run its statement of `manage.py sqlmigrate dedupjobs 0001`.",
                    )


def _clocks() -> Findings:
    yield _compared("the database's", sight.database_ahead())
    for name, ahead in _redis_clocks():
        yield _compared(name, ahead)


def _redis_clocks() -> Iterator[tuple[str, float]]:
    """Yield how far each server's clock is ahead; one that is away is named among the servers."""
    for at, member in enumerate(census.take()):
        if not member.trouble:
            name = f"lock server {member.alias}'s" if at else "the locks' Redis's"
            yield name, sight.surely(member.ahead, member.took / 2)
    for queue in dispatch.one_queue_per_server():
        with suppress(*UNREACHABLE, UnknownQueue):
            begun = clock.monotonic()
            theirs = dispatch.server_time(queue)
            took = clock.monotonic() - begun
            ahead = theirs - clock.utcnow().timestamp() + took / 2
            yield f"the Redis of queue {queue}'s", sight.surely(ahead, took / 2)


def _compared(whose: str, ahead: float) -> Finding:
    if abs(ahead) < ODD_CLOCK:
        words = f"{whose} clock agrees with this machine's within {ODD_CLOCK:g} s"
        return Finding(about="clocks", level=OK, words=words)
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        about="clocks",
        level=WARNING,
        words=f"{whose} clock is {abs(ahead):.1f} s {way} this machine's",
        cure="Let NTP set both. Leases go by the database's clock alone, so no job runs twice; but "
        "times in logs differ, and a Redis lock may show longer or shorter than it should.",
    )


def _pools() -> Findings:
    connection = connections[lifecycle.alias()]
    if connection.settings_dict.get("OPTIONS", {}).get("pool"):
        yield Finding(
            about="pools",
            level=WARNING,
            words=f"DATABASES[{connection.alias!r}] has a connection pool, and RQ's workers fork",
            cure="Give workers settings without it; each horse has one connection of its own.",
        )
    used, limit = _connections(connection)
    if limit and used >= FULL * limit:
        yield Finding(
            about="pools",
            level=WARNING,
            words=f"{used} of the database's {limit} connections are in use",
            cure="Raise its limit, or lower CONN_MAX_AGE or the number of processes.",
        )


def _connections(connection: Any) -> tuple[int, int]:
    """Return how many connections the server has, and may have; (0, 0) where it does not tell."""
    sql = {
        "postgresql": "SELECT count(*), current_setting('max_connections')::int "
        "FROM pg_stat_activity WHERE backend_type = 'client backend'",
        "mysql": "SELECT count(*), @@max_connections FROM information_schema.processlist",
    }.get(connection.vendor)
    if sql is None:
        return 0, 0
    with connection.cursor() as cursor:
        cursor.execute(sql)
        used, limit = cursor.fetchone()
    return int(used), int(limit)


# ---- Redis


def _redis() -> Findings:
    yield from _lock_servers()
    for queue in dispatch.one_queue_per_server():
        name = f"the Redis of queue {queue}"
        try:
            facts = dispatch.server_facts(queue)
        except (*UNREACHABLE, UnknownQueue) as error:
            words = f"{name} does not answer: {type(error).__name__}: {error}"
            cure = "Start it, or correct RQ_QUEUES. Rows wait until it answers."
            yield Finding(about="redis", level=FAILURE, words=words, cure=cure)
        else:
            yield from _of_server(name, facts)


def _lock_servers() -> Findings:
    members = census.take()
    enough = census.can_lock(members)
    for at, member in enumerate(members):
        name = f"lock server {member.alias}" if at else "the Redis of locks and counters"
        if member.trouble or (member.refusal and not member.is_replica):
            yield Finding(
                about="redis",
                level=WARNING if enough else FAILURE,
                words=f"{name} {member.complaint}",
                cure=census.ENOUGH_CURE if enough else census.NO_LOCKS_CURE,
            )
        if not member.trouble:
            yield from _of_server(name, member.facts)


def _of_server(name: str, facts: Mapping[str, Any]) -> Findings:
    kind = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version", facts.get("redis_version", "of unknown version"))
    yield Finding(about="redis", level=OK, words=f"{name}: {kind} {version}")
    if facts.get("role") == "slave":
        yield Finding(
            about="redis",
            level=FAILURE,
            words=f"{name} is a replica of {facts.get('master_host')}, and takes no writes",
            cure="Name the primary, or its sentinels, which know where it is.",
        )
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    if policy.startswith(EVICTING) and name.startswith("the Redis of queue"):
        yield Finding(
            about="eviction",
            level=WARNING,
            words=f"{name} has maxmemory-policy {policy}: it may throw messages away",
            cure="CONFIG SET maxmemory-policy noeviction. Lost messages are sent again, but late.",
        )
    used, limit = int(facts.get("used_memory", 0)), int(facts.get("maxmemory", 0))
    if limit and used >= FULL * limit:
        yield Finding(
            about="memory",
            level=WARNING,
            words=f"{name} uses {used:,} of {limit:,} bytes",
            cure="Raise maxmemory, or find what fills it.",
        )
    yield from _persistence(name, facts)


def _persistence(name: str, facts: Mapping[str, Any]) -> Findings:
    troubles = [
        key
        for key in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
        if facts.get(key, "ok") != "ok"
    ]
    if troubles:
        yield Finding(
            about="persistence",
            level=FAILURE,
            words=f"{name} can not save ({', '.join(troubles)}) and may refuse to write",
            cure="Make room on its disk and look at its log.",
        )
    if not facts.get("aof_enabled"):
        yield Finding(
            about="persistence",
            level=OK,
            words=f"{name} keeps no append-only file: what a restart loses is sent again, and "
            "counters begin at 0",
        )


# ---- processes


def _coordinator() -> Findings:
    try:
        age = counters.read(coordinator.ROLE).signs.get(coordinator.ROLE)
    except UNREACHABLE as error:
        yield _unasked(f"Redis does not answer: {type(error).__name__}: {error}")
        return
    if age is not None and age <= LATE:
        words = f"its last round was {age:.0f} s ago"
        yield Finding(about="coordinator", level=OK, words=words)
        return
    if complaint := census.take()[0].complaint:
        yield _unasked(f"the Redis of locks and counters {complaint}")
        return
    late = "has left no sign" if age is None else f"was last seen {age:.0f} s ago"
    yield Finding(
        about="coordinator",
        level=FAILURE,
        words=f"a coordinator {late}: no retry is sent and no dead worker's job is recovered",
        cure="Start a worker with RQ['WORKER_CLASS'] = 'dedupjobs.worker.DedupWorker', or "
        "`manage.py dedupjobs_coordinator`.",
    )


def _unasked(why: str) -> Finding:
    """That none is at work shows in the database, too, and is an alert."""
    looked = load.last()
    seen = f"one has looked {load.age(looked):.0f} s ago" if looked else "none has ever looked"
    return Finding(
        about="coordinator",
        level=WARNING,
        words=f"its sign of life can not be asked for: {why}. By the database, {seen}",
        cure="Mend that Redis. The alert no_coordinator tells if none is at work.",
    )


def _alerts() -> Findings:
    for alert in book.standing():
        level = FAILURE if alert.severity == Severity.CRITICAL else WARNING
        words = f"{alert.kind}: {alert.words}"
        yield Finding(about="alerts", level=level, words=words, cure=alert.cure)
    waiting = {channel: book.notices(channel).count() for channel in book.channels()}
    for channel, number in waiting.items():
        words = f"{channel} is told; {number} notice(s) wait"
        yield Finding(about="alerts", level=OK, words=words)
    if not waiting:
        yield Finding(
            about="alerts",
            level=OK,
            words="nobody is told but the log and the admin: neither ADMINS nor a webhook is set",
        )


def _workers() -> Findings:
    for queue in dispatch.queue_names():
        workers = dispatch.workers(queue)
        words = f"{workers.count} listen to queue {queue}"
        due = lifecycle.jobs().filter(
            queue=queue, status__in=WAITING, run_after__lte=DbNow(steady=True)
        )
        if workers.count or not due.exists():
            yield Finding(about="workers", level=OK, words=words)
            continue
        yield Finding(
            about="workers",
            level=FAILURE,
            words=f"nobody listens to queue {queue}, and jobs are due there",
            cure=f"manage.py rqworker {queue}",
        )


def _events() -> Findings:
    told, now = conf.alerts(), lifecycle.database_now()
    for seen in traffic.outgoing():
        age = seen.age(now)
        words = f"{seen.due} event(s) wait for target {seen.target}"
        words += f", the oldest for {age:.0f} s" if seen.oldest else ""
        words += f"; {seen.dead} DEAD" if seen.dead else ""
        bad = age >= told.OUTBOX_LATE or seen.dead >= told.OUTBOX_DEAD
        yield _of_events(words, "manage.py dedupjobs_outbox status" if bad else "")
    for taken in traffic.incoming():
        words = f"{taken.due} message(s) of consumer {taken.consumer} wait"
        words += f"; {taken.held} HELD" if taken.held else ""
        bad = taken.held >= told.INBOX_HELD
        yield _of_events(words, "See why in the admin's list of events received." if bad else "")


def _of_events(words: str, cure: str) -> Finding:
    return Finding(about="events", level=WARNING if cure else OK, words=words, cure=cure)


_LOOKS: tuple[tuple[str, Callable[[], Findings]], ...] = (
    ("checks", _checks),
    ("versions", _versions),
    ("registry", _registry),
    ("serializers", _serializers),
    ("migrations", _migrations),
    ("indexes", _indexes),
    ("pools", _pools),
    ("redis", _redis),
    ("clocks", _clocks),
    ("coordinator", _coordinator),
    ("workers", _workers),
    ("events", _events),
    ("alerts", _alerts),
)
