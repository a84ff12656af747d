"""
What of that which was seen is an alert: one pure function for each kind.

A rule answers with what it found, or with None where that can not be known just now (Redis is
away, say); alerts of its kind are left as they are then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dedupjobs import votes
from dedupjobs.models import Severity
from dedupjobs.thresholds import Thresholds

MOST_SUBJECTS = 20  # of one kind; the worst go first


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A trouble. ``subject``: the queue, job, server or channel it is about."""

    subject: str
    words: str
    cure: str
    severity: Severity = Severity.CRITICAL
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """
    A queue. ``oldest``: seconds that a row has been due; ``before``: rows due STALLED_FOR ago,
    None if nobody looked then; ``ended``: runs since; ``workers``: None: not known.
    """

    name: str
    due: int = 0
    oldest: float = 0.0
    before: int | None = None
    ended: int = 0
    workers: int | None = None
    last_sign: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """
    A Redis. ``took``: seconds of one command; ``ahead``: of our clock; ``lag``: seconds of its
    slowest replica; ``trouble``: why it can not be asked. ``has_locks``: it is asked for locks, and
    not for queues; ``complaint``: why it takes none.
    """

    name: str
    trouble: str = ""
    has_locks: bool = False
    complaint: str = ""
    took: float = 0.0
    ahead: float = 0.0
    lag: float = 0.0
    evicted: int = 0
    used: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What happened to a job WITHIN. ``p99``: seconds, None: it did not run often enough."""

    name: str
    failed: int = 0
    timed_out: int = 0
    lost: int = 0
    p99: float | None = None
    lease: float = 60.0
    duplicates: Mapping[str, int] = field(default_factory=dict)  # by cause

    @property
    def failures(self) -> int:
        return self.failed + self.timed_out + self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Untold:
    """Notices that wait for a channel. ``age``: seconds of the oldest that was tried."""

    channel: str
    waiting: int
    age: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """
    Who gets events. ``age``: seconds since the oldest undelivered one was published; ``waits``:
    whether later events of a key wait for a dead one.
    """

    name: str
    due: int = 0
    age: float = 0.0
    dead: int = 0
    waits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """
    All that was seen in one look. Counts by job are of rows as they stand, ``locks_lost`` WITHIN
    (None: the counters can not be read); ``clocks`` and ``lags`` are seconds.
    """

    stuck: Mapping[str, int] = field(default_factory=dict)
    silent: Mapping[str, int] = field(default_factory=dict)
    dead: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    queues: tuple[Queue, ...] = ()
    servers: tuple[Server, ...] = ()
    jobs: tuple[Job, ...] = ()
    locks_lost: Mapping[str, int] | None = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    lags: Mapping[str, float] = field(default_factory=dict)
    untold: tuple[Untold, ...] = ()
    targets: tuple[Target, ...] = ()
    inbox_held: Mapping[str, int] = field(default_factory=dict)


Rule = Callable[[Sight, Thresholds], Iterable[Found] | None]


def judge(sight: Sight, told: Thresholds) -> dict[str, list[Found] | None]:
    """Return what each rule found, the worst first; kinds that are off find nothing."""
    found: dict[str, list[Found] | None] = {}
    for kind, rule in RULES.items():
        mine = () if kind in told.OFF else rule(sight, told)
        ordered = None if mine is None else sorted(mine, key=lambda f: (-f.weight, f.subject))
        found[kind] = None if ordered is None else ordered[:MOST_SUBJECTS]
    return found


# ---- jobs


def stuck(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for name, number in sight.stuck.items():
        yield Found(
            subject=name,
            words=f"{_rows(number)} of {name} RUNNING, {told.STUCK_FOR:g} s past the lease.",
            cure="A coordinator takes such a row within seconds, so none is at work, or the "
            "database refuses it: `manage.py dedupjobs_doctor`. By hand: the admin's list of "
            "stuck jobs, action Reclaim.",
            weight=number,
        )


def retries(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for job in sight.jobs:
        if job.failures >= told.RETRIES:
            parts = {"failed": job.failed, "timed out": job.timed_out, "lost": job.lost}
            causes = ", ".join(f"{n} {words}" for words, n in parts.items() if n)
            yield Found(
                subject=job.name,
                words=f"{job.failures} runs of {job.name} did not succeed within "
                f"{_span(told.WITHIN)}: {causes}.",
                cure="Failed: see its newest errors; something it leans on is probably down. Lost: "
                "it ends its workers' processes. Pause the job while you look.",
                weight=job.failures,
            )


def dead(sight: Sight, told: Thresholds) -> Iterable[Found]:
    return _standing(sight.dead, told.DEAD, "DEAD", "Look at the error, then retry or purge them.")


def held(sight: Sight, told: Thresholds) -> Iterable[Found]:
    cure = "They wait for a person: see why, then unhold or cancel them."
    return _standing(sight.held, told.HELD, "HELD", cure)


def _standing(counts: Mapping[str, int], least: int, status: str, cure: str) -> Iterable[Found]:
    for name, number in counts.items():
        if number >= least:
            words = f"{_rows(number)} of {name} {status}."
            yield Found(
                subject=name, words=words, cure=cure, severity=Severity.WARNING, weight=number
            )


def near_lease(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for job in sight.jobs:
        if job.p99 is not None and job.p99 >= told.NEAR_LEASE * job.lease:
            yield Found(
                subject=job.name,
                words=f"1 of 100 runs of {job.name} takes about {job.p99:.1f} s or more; its "
                f"lease is {job.lease:g} s.",
                cure="Beats renew the lease, but a run that keeps them out for so long is taken "
                "for lost while it works. Lengthen the lease, or make the job shorter.",
                severity=Severity.WARNING,
                weight=job.p99 / job.lease,
            )


def locks_lost(sight: Sight, told: Thresholds) -> Iterable[Found] | None:
    if sight.locks_lost is None:
        return None
    return [
        Found(
            subject=name,
            words=f"{number} run(s) of {name} lost their lock before they ended, within "
            f"{_span(told.WITHIN)}.",
            cure="No job runs twice by this, the row decides. The lease is too short for a job "
            "that keeps its beats out, or Redis evicts or was wiped.",
            severity=Severity.WARNING,
            weight=number,
        )
        for name, number in sight.locks_lost.items()
        if number >= told.LOCKS_LOST
    ]


def silent(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for name, number in sight.silent.items():
        if number >= told.SILENT:
            yield Found(
                subject=name,
                words=f"{_rows(number)} of {name} at work without progress for its stall_after.",
                cure="It hangs, or calls attempt.progress() too rarely. See the job's page; cancel "
                "it, and its time-out ends it at the latest.",
                severity=Severity.WARNING,
                weight=number,
            )


def duplicates(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for job in sight.jobs:
        total = sum(job.duplicates.values())
        if total >= told.DUPLICATES:
            causes = ", ".join(f"{n} {cause}" for cause, n in job.duplicates.items() if n)
            yield Found(
                subject=job.name,
                words=f"{total} calls and messages of {job.name} were turned away within "
                f"{_span(told.WITHIN)}: {causes}.",
                cure="`manage.py dedupjobs_duplicates` shows who asks. None of them ran.",
                severity=Severity.WARNING,
                weight=total,
            )


# ---- queues


def stalled(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for queue in sight.queues:
        if queue.before is None or queue.ended or queue.oldest < told.STALLED_FOR:
            continue
        if 0 < queue.due >= queue.before:
            grown = queue.due - queue.before
            more = f", {grown} more than {_span(told.STALLED_FOR)} ago" if grown else ""
            yield Found(
                subject=queue.name,
                words=f"{queue.due} jobs are due in queue {queue.name}{more}, and none has ended "
                "since.",
                cure="Its workers hang, are paused, or are busy with something else: "
                "`manage.py dedupjobs_stats`, `manage.py rqstats`.",
                weight=queue.due,
            )


def no_worker(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for queue in sight.queues:
        if queue.workers is None or queue.oldest < told.NO_WORKER_FOR or not queue.due:
            continue
        silent = queue.last_sign is None or queue.last_sign > told.WORKER_SILENT
        if not queue.workers or silent:
            yield Found(
                subject=queue.name,
                words=f"{queue.due} jobs are due in queue {queue.name}, and no worker listens.",
                cure=f"manage.py rqworker {queue.name}",
                weight=queue.due,
            )


def no_coordinator(sight: Sight, told: Thresholds) -> Iterable[Found]:
    """Who looks is a coordinator; that there was none is found out by ``watch``."""
    return ()


# ---- servers


def redis_down(sight: Sight, told: Thresholds) -> Iterable[Found]:
    voters = [server for server in sight.servers if server.has_locks]
    for server in sight.servers:
        if server.has_locks and server.complaint:
            yield _takes_no_locks(server, voters)
        elif server.trouble:
            yield Found(
                subject=server.name,
                words=f"{_called(server)} does not answer: {server.trouble}",
                cure="Start it, or correct RQ_QUEUES. No job is lost: rows wait in the database "
                "and are handed over again.",
            )


def _takes_no_locks(server: Server, voters: Sequence[Server]) -> Found:
    taking, needed = sum(not one.complaint for one in voters), votes.majority(len(voters))
    words = f"{_called(server)} {server.complaint}; {taking} of {len(voters)} lock server(s) take "
    if taking >= needed:
        return Found(
            subject=server.name,
            words=f"{words}locks, which is enough: jobs run on.",
            cure="Start it again, or let it write (memory, disk, replicas). It need not stay away "
            "if it has lost its keys: the rows decide.",
            severity=Severity.WARNING,
        )
    return Found(
        subject=server.name,
        words=f"{words}locks, {needed} must: no lock can be had.",
        cure="Start it, let it write (memory, disk, replicas), or correct CACHES. Meanwhile jobs "
        "do what their on_redis_error says; the rows decide.",
    )


def redis_slow(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for server in sight.servers:
        if not server.trouble and server.took >= told.REDIS_SLOW:
            yield Found(
                subject=server.name,
                words=f"{_called(server)} takes {server.took * 1000:.0f} ms for one command.",
                cure="SLOWLOG GET and LATENCY DOCTOR say why. Pushes have PUSH_TIMEOUT and go by "
                "the coordinator beyond it; runs go on by the rows alone.",
                severity=Severity.WARNING,
                weight=server.took,
            )


def redis_evicting(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for server in sight.servers:
        if not server.trouble and server.evicted >= told.EVICTED:
            yield Found(
                subject=server.name,
                words=f"{_called(server)} has evicted {server.evicted:,} keys within "
                f"{_span(told.WITHIN)}.",
                cure="CONFIG SET maxmemory-policy noeviction where queues are, and raise "
                "maxmemory. Lost messages are sent again, but late.",
                weight=server.evicted,
            )


def redis_full(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for server in sight.servers:
        if server.limit and server.used >= told.REDIS_FULL * server.limit:
            yield Found(
                subject=server.name,
                words=f"{_called(server)} uses {server.used:,} of {server.limit:,} bytes.",
                cure="Raise maxmemory, or find what fills it: redis-cli --bigkeys.",
                severity=Severity.WARNING,
                weight=server.used / server.limit,
            )


def replica_lag(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for name, lag in sight.lags.items():
        if lag >= told.REPLICA_LAG:
            yield Found(
                subject=name,
                words=f"A replica ({name}) is {lag:.0f} s behind.",
                cure="Pages that read it are old; what decides reads the primary. Look for a long "
                "transaction or a slow disk there.",
                severity=Severity.WARNING,
                weight=lag,
            )


def clocks(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for name, ahead in sight.clocks.items():
        if abs(ahead) > told.CLOCKS:
            way = "ahead of" if ahead > 0 else "behind"
            yield Found(
                subject=name,
                words=f"The clock of {name} is {abs(ahead):.1f} s {way} this coordinator's.",
                cure="Let NTP set both. Leases go by the database's clock alone, so no job runs "
                "twice; but a Redis lock may show longer or shorter than it should.",
                severity=Severity.WARNING,
                weight=abs(ahead),
            )


# ---- telling


def untold(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for channel in sight.untold:
        if channel.age >= told.UNTOLD_FOR:
            yield Found(
                subject=channel.channel,
                words=f"{channel.waiting} notice(s) could not be delivered by {channel.channel} "
                f"for {channel.age:.0f} s: {channel.error or 'it hangs'}.",
                cure='Correct DEDUPJOBS["ALERTS"]["WEBHOOK"] or Django\'s e-mail settings, or see '
                "why the other side does not answer. They are tried again, more and more slowly.",
                severity=Severity.WARNING,
                weight=channel.age,
            )


# ---- events


def outbox_late(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for target in sight.targets:
        if target.due and target.age >= told.OUTBOX_LATE:
            yield Found(
                subject=target.name,
                words=f"{target.due} event(s) wait for target {target.name}, the oldest for "
                f"{target.age:.0f} s.",
                cure="`manage.py dedupjobs_outbox status`, and the admin's list of events sent: "
                "the target is away, refuses one whose key the others have, or no coordinator "
                "with this target in its settings is at work. Nothing is lost.",
                weight=target.age,
            )


def outbox_dead(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for target in sight.targets:
        if target.dead >= told.OUTBOX_DEAD:
            yield Found(
                subject=target.name,
                words=f"{target.dead} event(s) for target {target.name} DEAD.",
                cure=f"Later events of their keys {'wait for' if target.waits else 'pass'} them. "
                "See the last error in the list of events sent, then retry or drop them.",
                severity=Severity.WARNING,
                weight=target.dead,
            )


def inbox_held(sight: Sight, told: Thresholds) -> Iterable[Found]:
    for consumer, number in sight.inbox_held.items():
        if number >= told.INBOX_HELD:
            yield Found(
                subject=consumer,
                words=f"{number} message(s) of consumer {consumer} HELD.",
                cure="See the reason in the list of events received, then release or drop them.",
                severity=Severity.WARNING,
                weight=number,
            )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        stuck,
        stalled,
        retries,
        dead,
        held,
        near_lease,
        locks_lost,
        duplicates,
        no_coordinator,
        no_worker,
        redis_down,
        redis_slow,
        redis_evicting,
        redis_full,
        replica_lag,
        silent,
        clocks,
        untold,
        outbox_late,
        outbox_dead,
        inbox_held,
    )
}


def missing(age: float | None) -> Found:
    """Return the alert that nobody coordinates; ``age``: seconds since somebody did."""
    seen = "none has ever looked" if age is None else f"the last look was {age:.0f} s ago"
    return Found(
        subject="",
        words=f"No coordinator is at work: {seen}.",
        cure="No retry is sent, no dead worker's job is recovered, and nobody looks for trouble. "
        "Start a worker with RQ['WORKER_CLASS'] = 'dedupjobs.worker.DedupWorker', or "
        "`manage.py dedupjobs_coordinator`.",
    )


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


def _called(server: Server) -> str:
    return f"The Redis of {server.name}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"  # noqa: PLR2004
