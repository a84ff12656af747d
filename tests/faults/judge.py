"""
The invariants of docs/design.md §7, asked after a quiet phase of rows, effects and Redis.

Each function yields a sentence per violation. What the ledger says and what the tables say were
written by different processes at different moments, so neither covers up for the other.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import redis
from django.conf import settings

from dedupjobs.models import (
    FINAL,
    AttemptOutcome,
    JobAttempt,
    JobStep,
    Kind,
    OutboxEvent,
    ProcessedJob,
    Status,
    StepState,
)
from dedupjobs.runner import FIRST_LEASE
from tests.faults.app.models import Applied, Effect

Lines = list[dict[str, Any]]

ONCE = ("atomic", "completing")  # effect and success commit together
OUTSIDE = ("plain", "slow", "free", "patient", "flaky", "forking", "grown", "newcomer")
STEPS = ("book", "charge", "tell")
ENDLESS = ("latest", "newest")  # the key is free after each success


def violations(lines: Lines) -> list[str]:
    """Return all that is wrong, in sentences."""
    rows = {row.pk: row for row in ProcessedJob.objects.all()}
    attempts: dict[int, list[JobAttempt]] = defaultdict(list)
    for attempt in JobAttempt.objects.order_by("job_id", "number"):
        attempts[attempt.job_id].append(attempt)
    effects = list(Effect.objects.order_by("pk"))
    return [
        *lost(lines, rows),
        *unfinished(rows),
        *doubled_inside(rows, effects),
        *doubled_outside(lines, rows, attempts),
        *renamed(lines, rows),
        *without_effect(lines, rows, effects),
        *stale_fenced(effects, attempts),
        *repeated_steps(lines, rows, attempts, effects),
        *forgotten_steps(lines, rows),
        *overlapping(attempts),
        *miscounted(rows, attempts),
        *outdated(lines),
        *untold(effects),
        *told_wrongly(),
        *leaks(),
    ]


def lost(lines: Lines, rows: dict[int, ProcessedJob]) -> Iterator[str]:
    """I2: a committed call has a row; one that was rolled back has none."""
    for line in lines:
        if line["what"] == "committed" and line["job"] not in rows:
            yield f"I2: {line['tag']} was committed and has no row"
    committed = {line["tag"] for line in lines if line["what"] in ("committed", "doubtful")}
    doubtful = _calls_without_answer(lines)
    keys = {row.key for row in rows.values()}
    for tag in {line["tag"] for line in lines if line["what"] == "rolled back"}:
        if tag in keys and tag not in committed | doubtful:
            yield f"I2: {tag} was rolled back and has a row"


def _calls_without_answer(lines: Lines) -> set[str]:
    """Return the tags whose caller died before it could write what came of the call."""
    open_calls = Counter(line["tag"] for line in lines if line["what"] == "calling")
    answers = ("committed", "rolled back", "doubtful", "refused")
    open_calls.subtract(Counter(line["tag"] for line in lines if line["what"] in answers))
    return {tag for tag, count in open_calls.items() if count > 0}


def unfinished(rows: dict[int, ProcessedJob]) -> Iterator[str]:
    """I5: every job has ended, and none of these jobs has a reason to end but by success."""
    for row in rows.values():
        if row.status not in FINAL:
            yield f"I5: {row.key} is {row.status} after the bound (sent {row.dispatched_at})"
        elif row.status != Status.SUCCEEDED:
            yield f"I5: {row.key} ended {row.status}: {row.error}"


def doubled_inside(rows: dict[int, ProcessedJob], effects: list[Effect]) -> Iterator[str]:
    """I1: an effect in the transaction of its completion is there once, and only with it."""
    counts = Counter((e.job_pk, e.generation) for e in effects if _kind(e.tag) in ONCE)
    for (pk, generation), count in counts.items():
        if count > 1:
            yield f"I1: {rows[pk].key} has had its effect {count} times"
        if pk not in rows or generation != rows[pk].generation:
            yield f"I1: an effect of {pk} generation {generation} belongs to no run"
    done = {pk for pk, _ in counts}
    for row in rows.values():
        if _kind(row.key) in ONCE and row.status == Status.SUCCEEDED and row.pk not in done:
            yield f"I1: {row.key} has succeeded and has no effect"


def doubled_outside(
    lines: Lines, rows: dict[int, ProcessedJob], attempts: dict[int, list[JobAttempt]]
) -> Iterator[str]:
    """I1: outside effects repeat only where the attempt before did not succeed."""
    by_attempt = Counter(line["fence"] for line in lines if line["what"] == "effect")
    for fence, count in by_attempt.items():
        if count > 1:
            yield f"I1: attempt {fence} ran {count} times"
    for pk, mine in attempts.items():
        for generation, group in groupby(mine, lambda a: a.generation):
            endings = [a.outcome for a in group]
            if AttemptOutcome.SUCCEEDED in endings[:-1]:
                yield f"I1: {rows[pk].key} generation {generation} went on after success: {endings}"


def renamed(lines: Lines, rows: dict[int, ProcessedJob]) -> Iterator[str]:
    """I12: one generation, one idempotency key."""
    keys = defaultdict(set)
    for line in lines:
        if line["what"] == "effect":
            keys[line["job"], line["generation"]].add(line["key"])
    for (pk, generation), found in keys.items():
        if len(found) > 1:
            yield f"I12: {rows[pk].key} generation {generation} had {len(found)} keys"


def without_effect(
    lines: Lines, rows: dict[int, ProcessedJob], effects: list[Effect]
) -> Iterator[str]:
    """I1: a success means that the work was done: at least once, also outside."""
    done = {line["job"] for line in lines if line["what"] == "effect"}
    done |= {effect.job_pk for effect in effects}
    for row in rows.values():
        if row.status == Status.SUCCEEDED and row.pk not in done:
            yield f"I1: {row.key} has succeeded and nothing was done"


def stale_fenced(effects: list[Effect], attempts: dict[int, list[JobAttempt]]) -> Iterator[str]:
    """I4: a fenced write never follows one of a later attempt."""
    newest: dict[int, int] = {}
    for effect in effects:
        if _kind(effect.tag) != "fenced":
            continue
        if effect.fence < newest.get(effect.job_pk, 0):
            yield f"I4: {effect.tag} was written by stale attempt {effect.fence}"
        newest[effect.job_pk] = max(effect.fence, newest.get(effect.job_pk, 0))


def repeated_steps(
    lines: Lines,
    rows: dict[int, ProcessedJob],
    attempts: dict[int, list[JobAttempt]],
    effects: list[Effect],
) -> Iterator[str]:
    """I1: a step's transaction commits once, and what can be looked up is done once."""
    booked = Counter(e.job_pk for e in effects if _kind(e.tag) == "stepping")
    charged = [line for line in lines if line["what"] == "charge"]
    ever = Counter(line["job"] for line in charged)
    in_time = Counter(line["job"] for line in charged if not _is_late(line, attempts))
    for pk, row in rows.items():
        if _kind(row.key) != "stepping" or row.status != Status.SUCCEEDED:
            continue
        if booked[pk] != 1:
            yield f"I1: {row.key} was booked {booked[pk]} times"
        if not ever[pk] or in_time[pk] > 1:
            yield f"I1: {row.key} was charged {ever[pk]} times, though it could be looked up"


def forgotten_steps(lines: Lines, rows: dict[int, ProcessedJob]) -> Iterator[str]:
    """I1: a success has all its steps, and no attempt has done what an earlier one recorded."""
    steps = {(s.job_id, s.name): s for s in JobStep.objects.filter(state=StepState.SUCCEEDED)}
    for pk, row in rows.items():
        if _kind(row.key) == "stepping" and row.status == Status.SUCCEEDED:
            missing = [name for name in STEPS if (pk, name) not in steps]
            if missing:
                yield f"I1: {row.key} has succeeded without the steps {missing}"
    for line in lines:
        name = "charge" if line["what"] == "charge" else "tell"
        if name == "tell" and (line["what"] != "effect" or _kind(line["tag"]) != "stepping"):
            continue
        recorded = steps.get((line["job"], name))
        if recorded is not None and line["attempt"] > recorded.attempt:
            yield f"I1: {line['tag']} did {name} again in attempt {line['attempt']}"


def _is_late(line: dict[str, Any], attempts: dict[int, list[JobAttempt]]) -> bool:
    """Whether a zombie had the effect, after it was given up: nobody could have looked it up."""
    ends = [a.ended_at for a in attempts[line["job"]] if a.number == line["attempt"]]
    return any(end is not None and line["at"] > end.timestamp() for end in ends)


def overlapping(attempts: dict[int, list[JobAttempt]]) -> Iterator[str]:
    """I3, I4, I6: one attempt at a time, fences grow, each has one ending."""
    for mine in attempts.values():
        for attempt in mine:
            if attempt.outcome is None or attempt.ended_at is None:
                yield f"I6: attempt {attempt.pk} of job {attempt.job_id} is open"
        for before, after in pairwise(mine):
            if before.pk >= after.pk:
                yield f"I4: attempt {after.pk} of job {after.job_id} follows {before.pk}"
            if before.ended_at is not None and before.ended_at > after.claimed_at:
                yield f"I3: attempts {before.pk} and {after.pk} were open at once"


def miscounted(
    rows: dict[int, ProcessedJob], attempts: dict[int, list[JobAttempt]]
) -> Iterator[str]:
    """I6: numbers without gaps; what was lost is counted, and nothing else is."""
    for row in rows.values():
        mine = attempts[row.pk]
        if [a.number for a in mine] != list(range(1, row.attempts + 1)):
            yield f"I6: {row.key} has attempts {[a.number for a in mine]} of {row.attempts}"
        lost_ones = sum(a.outcome == AttemptOutcome.LOST for a in mine)
        if _kind(row.key) not in ENDLESS and row.lost_count != lost_ones:
            yield f"I6: {row.key} counts {row.lost_count} losses of {lost_ones}"


def outdated(lines: Lines) -> Iterator[str]:
    """I11: the newest payload that was accepted is the last one that ran."""
    endless = [line for line in lines if _kind(line.get("tag", "")) in ENDLESS]
    accepted: dict[str, int] = defaultdict(int)
    for line in endless:
        # A DUPLICATE says that the call was not taken: replace does not touch a running job.
        if line["what"] == "committed" and line["answer"] != Kind.DUPLICATE:
            accepted[line["tag"]] = max(accepted[line["tag"]], line["number"])
    ran: dict[str, tuple[int, int]] = {}
    effects = [line for line in endless if line["what"] == "effect"]
    for line in sorted(effects, key=lambda effect: effect["fence"]):
        _, before = ran.get(line["tag"], (0, 0))
        if line["number"] < before:
            yield f"I11: {line['tag']} ran {line['number']} after {before}"
        ran[line["tag"]] = line["fence"], line["number"]
    for tag, number in accepted.items():
        _, last = ran.get(tag, (0, 0))
        if last < number:
            yield f"I11: {tag} ran {last} last, and {number} was accepted"


def untold(effects: list[Effect]) -> Iterator[str]:
    """I13: an effect and its event are committed together."""
    made = Counter(effect.tag for effect in effects if _kind(effect.tag) in ONCE)
    events = OutboxEvent.objects.values_list("payload", flat=True)
    published = Counter(json.loads(payload)["tag"] for payload in events)
    for tag in made | published:
        if made[tag] != published[tag]:
            yield f"I13: {tag} has {made[tag]} effects and {published[tag]} events"


def told_wrongly() -> Iterator[str]:
    """I13: each event has had its effect once, those of a key in the order of their commits."""
    applied = list(Applied.objects.order_by("pk").values_list("event_id", flat=True))
    times = Counter(applied)
    events = list(OutboxEvent.objects.order_by("pk"))
    for event in events:
        if times[event.event_id] != 1:
            words = f"{times[event.event_id]} times"
            yield f"I13: {event.payload} was applied {words}; it is {event.status}"
    one_key = [event.event_id for event in events if event.key == "completing"]
    known = set(one_key)
    if [event_id for event_id in dict.fromkeys(applied) if event_id in known] != one_key:
        yield "I13: events of one key were applied in another order than they were committed in"


def leaks() -> Iterator[str]:
    """I8: each of our keys has an end, but for messages in RQ's hands, which RQ ends itself."""
    locks = [entry["LOCATION"] for alias, entry in settings.CACHES.items() if "lock" in alias]
    for url in (settings.CACHE_URL, settings.RQ_URL, *locks):
        with redis.Redis.from_url(url, decode_responses=True, encoding_errors="replace") as client:
            known = _in_rqs_hands(client)
            for key in client.scan_iter("*dedupjobs*", count=1000):
                if client.ttl(key) == -1 and key.removeprefix("rq:job:") not in known:
                    yield f"I8: {key} has no end"


def stuck(quiet: float) -> Iterator[str]:
    """
    I8: a lock that nobody could release goes by itself; ``quiet``: seconds since the last job.

    Not where a clock was moved, which keeps it.
    """
    with redis.Redis.from_url(settings.CACHE_URL, decode_responses=True) as client:
        for key in client.scan_iter("*dedupjobs:lock:*", count=1000):
            if (left := client.ttl(key)) > FIRST_LEASE - quiet:
                yield f"I8: {key} is held for another {left} s"


def _in_rqs_hands(client: redis.Redis) -> set[str]:
    known: set[str] = set()
    for queue in settings.RQ_QUEUES:
        known.update(client.lrange(f"rq:queue:{queue}", 0, -1))
        known.update(client.lrange(f"rq:queue:{queue}:intermediate", 0, -1))
        started = client.zrange(f"rq:wip:{queue}", 0, -1)
        known.update(execution.partition(":")[0] for execution in started)
    return known


def _kind(tag: str) -> str:
    return tag.partition(".")[0]
