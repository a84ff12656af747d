"""Log lines: which event writes which, with which fields; and what never stands in one."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from django.conf import settings as django_settings

from dedupjobs import clock, coordinator, fields, lifecycle, locks, operations, runner, signals
from dedupjobs.models import ProcessedJob, Status
from dedupjobs.visible import line
from tests import live
from tests.app import jobs
from tests.rows import claimed, expire

pytestmark = pytest.mark.django_db(transaction=True)

DOCS = Path(__file__).parent.parent / "docs" / "observability.md"


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10):
        yield


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """Return all lines of ours so far, from DEBUG on."""
    caplog.set_level(logging.DEBUG, "dedupjobs")
    return lambda: [r for r in caplog.records if r.name.startswith("dedupjobs")]


def run(row: Any) -> Status | None:
    fresh = ProcessedJob.objects.get(pk=getattr(row, "job", row).pk)
    return runner.deliver(fresh.pk, fresh.generation, owner=clock.token())


def facts(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = record.dedupjobs  # type: ignore[attr-defined]
    return found


def transitions(records: list[logging.LogRecord]) -> list[str]:
    return [facts(r)["transition"] for r in records if "transition" in facts(r)]


# ---- each line, by its event


def test_run_is_told_from_the_call_to_the_end(heard: Any) -> None:
    run(jobs.record.enqueue(tag="a"))
    assert transitions(heard()) == ["enqueued", "received", "locked", "processing", "completed"]
    assert [facts(r)["lock"] for r in heard() if "lock" in facts(r)] == ["acquired", "released"]
    assert [r.levelname for r in heard() if r.levelno >= logging.INFO] == ["INFO"]


def test_line_of_an_attempt_says_who_what_and_where(heard: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    run(row)
    ended = next(r for r in heard() if transitions([r]) == ["completed"])
    said = facts(ended)
    attempt = row.attempt_set.get()
    assert said == {
        "job": "testapp.record",
        "row": row.pk,
        "key_hash": row.key_hash,
        "queue": "default",
        "attempt": 1,
        "fence": attempt.pk,
        "rq_id": attempt.rq_id,
        "worker": fields.worker,
        "host": attempt.host,
        "transition": "completed",
        "status": "SUCCEEDED",
        "run_time": said["run_time"],
    }
    assert 0 <= said["run_time"] < 60
    locked = next(r for r in heard() if transitions([r]) == ["locked"])
    assert facts(locked)["lock_key"] == live.lock_name(row.pk)
    assert locked.name == "dedupjobs.locks"


@pytest.mark.parametrize(
    ("specimen", "args", "told", "level"),
    [
        (jobs.fail, {}, ["retrying"], "WARNING"),
        (jobs.give_up, {}, ["failed", "dead"], "ERROR"),
        (jobs.wish, {"what": "snooze"}, ["retrying"], "INFO"),
        (jobs.wish, {"what": "cancel"}, ["cancelled"], "INFO"),
    ],
)
def test_ending_is_told_as_loudly_as_it_matters(
    heard: Any, specimen: Any, args: dict[str, Any], told: list[str], level: str
) -> None:
    run(specimen.enqueue(tag="a", **args))
    assert transitions(heard())[4:] == told
    assert max(r.levelno for r in heard()) == logging.getLevelName(level)


def test_duplicate_is_told_quietly_also_in_a_storm(heard: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    for _ in range(20):
        jobs.record.enqueue(tag="a")
    claim = claimed(row)
    locks.acquire(row.pk, claim.owner, ttl=60)
    run(row)
    told = [r for r in heard() if transitions([r]) == ["duplicate"]]
    assert len(told) == 21
    assert {facts(r)["cause"] for r in told} == {"producer", "race"}
    assert max(r.levelno for r in heard()) == logging.INFO
    assert [facts(r)["lock"] for r in heard() if "lock" in facts(r)] == ["busy"]


def test_lost_attempt_is_told_and_where_its_job_goes(heard: Any) -> None:
    claim = claimed(jobs.record.enqueue(tag="a").job)
    lost = lifecycle.reclaim(
        claim.fence, beat_at=expire(claim), ahead_of=None, reason="no heartbeat"
    )
    assert lost is not None
    coordinator.tell_lost(lost, "lease")
    told = heard()[-1]
    assert (facts(told)["transition"], told.levelname) == ("lost", "WARNING")
    assert facts(told)["fence"] == claim.fence


def test_attempt_whose_worker_died_is_told_as_held_where_its_job_says_so(heard: Any) -> None:
    claim = claimed(jobs.wait_carefully.enqueue(tag="a", release="").job)
    lost = lifecycle.bury(claim.fence, "its process died")
    assert lost is not None
    coordinator.tell_lost(lost, "death")
    assert transitions(heard())[-1] == "held"


def test_hold_by_a_person_is_told(heard: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    operations.hold(row, by="siti")
    assert transitions(heard())[-1] == "held"
    assert facts(heard()[-1])["by"] == "siti"


def test_lock_that_was_taken_over_or_is_gone_is_told(heard: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    locks.acquire(row.pk, "dead", ttl=60)
    run(row)
    other = jobs.record.enqueue(tag="b").job
    with live.cache_client() as client:

        def lose(point: str) -> None:
            if point == "user_code.before":
                client.delete(live.lock_name(other.pk))

        with _hooked(lose):
            run(other)
    told = [(facts(r)["lock"], r.levelname) for r in heard() if "lock" in facts(r)]
    assert told == [
        ("taken over", "DEBUG"),
        ("released", "DEBUG"),
        ("acquired", "DEBUG"),
        ("expired", "WARNING"),
    ]


@contextmanager
def _hooked(hook: Callable[[str], None]) -> Iterator[None]:
    from dedupjobs import probes

    probes.hook = hook
    try:
        yield
    finally:
        probes.hook = None


def test_beat_that_renews_the_lock_is_told(heard: Any) -> None:
    from dedupjobs.heartbeat import Heart

    claim = claimed(jobs.record.enqueue(tag="a").job)
    locks.acquire(claim.job_pk, claim.owner, ttl=60)
    facts_of_heart = {"fence": claim.fence, "owner": claim.owner, "name": claim.name}
    Heart(job_pk=claim.job_pk, lease=60, **facts_of_heart).tick()  # type: ignore[arg-type]
    assert facts(heard()[-1])["lock"] == "renewed"


def test_lock_out_of_reach_is_told(heard: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    with live.cache_client() as client:
        client.hset(live.lock_name(row.pk), "not", "a lock")
    run(row)
    assert [facts(r)["lock"] for r in heard() if "lock" in facts(r)] == ["unreachable"]


# ---- what never stands in a line


def test_no_line_has_arguments_results_keys_or_the_text_of_an_error(heard: Any) -> None:
    run(jobs.record.enqueue(tag="rahasia", text="rahasia"))
    jobs.record.enqueue(tag="rahasia", text="rahasia")
    run(jobs.fail_for_good.enqueue(tag="rahasia"))  # raises an error that quotes it
    jobs.record_warning.enqueue(tag="rahasia", text="rahasia one")
    jobs.record_warning.enqueue(tag="rahasia", text="rahasia two")
    run(jobs.fail_and_block.enqueue(tag="rahasia"))
    jobs.fail_and_block.enqueue(tag="rahasia")
    signals.tell(signals.coordinator_failed, "", error=ValueError("rahasia"))
    assert len(heard()) > 15
    for record in heard():
        assert "rahasia" not in record.getMessage()
        assert "rahasia" not in repr(facts(record))
        assert record.exc_info is None


def test_key_stands_in_lines_where_the_project_wants_it(heard: Any) -> None:
    with live.changed(DEDUPJOBS={**django_settings.DEDUPJOBS, "LOG_KEYS": True}):
        run(jobs.record.enqueue(tag="a"))
    assert {facts(r).get("key") for r in heard() if "attempt" in facts(r)} == {"record:a"}


@pytest.mark.parametrize("text", ["a\nERROR forged line", "a\r\n\x1b[2Jb", "\u202eb", "a\x00b"])
def test_text_from_outside_begins_no_line_of_its_own(heard: Any, text: str) -> None:
    row = jobs.record.enqueue(tag="a").job
    with live.changed(DEDUPJOBS={**django_settings.DEDUPJOBS, "LOG_KEYS": True}):
        ProcessedJob.objects.filter(pk=row.pk).update(
            name=text.replace("\x00", ""), key=text.replace("\x00", "")
        )
        run(row)
        operations.cancel(jobs.record.enqueue(tag="b").job, by=text.replace("\x00", ""))
        signals.tell(signals.hand_over_failed, text, queue=text, count=1, error=OSError(text))
    for record in heard():
        words = [record.getMessage(), *map(str, facts(record).values())]
        assert all(word.isprintable() for word in words), words


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("é—猫", "é—猫"),
        ("a\nb", "a\\nb"),
        ("x" * 300, "x" * 200 + "…"),
        ("", ""),
    ],
)
def test_line_shows_what_can_be_read_and_ends(given: str, shown: str) -> None:
    assert line(given) == shown


# ---- fields on the job's own lines


@contextmanager
def logging_to(stream: io.StringIO, **handler: Any) -> Iterator[None]:
    """Send the root logger's lines to the stream, by a handler that a dictConfig would make."""
    made = logging.StreamHandler(stream)
    for name in handler.pop("filters", []):
        made.addFilter(name)
    made.setFormatter(handler["formatter"])
    root = logging.getLogger()
    level = root.level
    root.addHandler(made)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(made)
        root.setLevel(level)


def test_jobs_own_lines_have_its_fields_and_others_have_none() -> None:
    stream = io.StringIO()
    plain = logging.Formatter("%(dedupjobs_prefix)s%(message)s")
    with logging_to(stream, filters=[fields.CurrentJob()], formatter=plain):
        logging.getLogger("shop").warning("outside")
        row = jobs.log_a_line.enqueue(tag="a").job
        run(row)
    lines = stream.getvalue().splitlines()
    assert "outside" in lines
    assert f"[testapp.log_a_line row {row.pk} attempt 1] charging" in lines
    assert fields.current() == {}


def test_lines_of_two_jobs_at_once_have_each_their_own_fields() -> None:
    first, second = (claimed(jobs.record.enqueue(tag=tag).job) for tag in "ab")
    seen: dict[str, Any] = {}
    inside = threading.Barrier(2)

    def look(claim: Any) -> None:
        with fields.given(claim):
            inside.wait(20)
            seen[claim.key] = fields.current()["row"]

    threads = [threading.Thread(target=look, args=[claim]) for claim in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {first.key: first.job_pk, second.key: second.job_pk}


def test_nested_run_gives_the_outer_jobs_fields_back() -> None:
    claim, other = (claimed(jobs.record.enqueue(tag=tag).job) for tag in "ab")
    with fields.given(claim):
        with fields.given(other):
            pass
        assert fields.current()["row"] == claim.job_pk


# ---- recipes of the docs


def _recipe(title: str) -> str:
    """Return the Python block under a heading of the page."""
    section = DOCS.read_text().split(f"### {title}\n", 1)[1]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logging.config.dictConfig(django_settings.LOGGING)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging_restored")
@pytest.mark.parametrize("title", ["JSON", "structlog"])
def test_recipe_writes_one_json_object_a_line_with_the_fields(
    title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    space: dict[str, Any] = {}
    exec(_recipe(title), space)
    logging.config.dictConfig(space["LOGGING"])
    row = jobs.log_a_line.enqueue(tag="a\nb").job
    run(row)
    out, err = capsys.readouterr()
    found = [json.loads(text) for text in (out + err).splitlines()]
    own = next(one for one in found if "charging" in (one.get("message"), one.get("event")))
    assert own["dedupjobs"]["row"] == row.pk
    assert own["dedupjobs"]["attempt"] == 1
    ended = [one for one in found if one["dedupjobs"].get("transition") == "completed"]
    assert len(ended) == 1
    assert ended[0]["dedupjobs"]["key_hash"] == row.key_hash


def test_filter_can_be_made_before_django_has_loaded_its_models() -> None:
    code = (
        "import logging.config, django\n"
        "from django.conf import settings\n"
        "settings.configure(LOGGING={'version': 1, 'filters': {'job': {'()': "
        "'dedupjobs.fields.CurrentJob'}}, 'handlers': {'h': {'class': 'logging.StreamHandler', "
        "'filters': ['job']}}, 'root': {'handlers': ['h']}})\n"
        "django.setup()\n"
        "import logging; logging.warning('ready')\n"
    )
    import subprocess
    import sys

    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "ready\n")
