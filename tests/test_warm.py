"""The horse of a DedupWorker, which stays: what it keeps, what it forgets, when it goes."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import django_rq
import psutil
import pytest
import redis
from django.conf import settings
from django.db import DatabaseError, OperationalError, connection, transaction
from redis import Redis
from rq import Queue, Worker
from rq.job import Callback, JobStatus
from rq.job import Job as RqJob
from rq.serializers import DefaultSerializer, JSONSerializer
from rq.suspension import resume, suspend

from dedupjobs import clock, counters, dispatch, probes, runner, slate
from dedupjobs.heartbeat import Heart, Pacemaker
from dedupjobs.horse import Sheet
from dedupjobs.lifecycle import Pulse
from dedupjobs.models import AttemptOutcome, JobAttempt
from tests import live, sessions
from tests import settings as live_settings
from tests.app import jobs, warm
from tests.app.models import Ledger
from tests.live import PATIENCE, Spawn, with_server, with_sqlite
from tests.processes import Spawned
from tests.servers import Valkey
from tests.waiting import until

LOST, SUCCEEDED = AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED

pytestmark = [pytest.mark.large, pytest.mark.django_db(transaction=True)]


def start(spawn: Spawn, *queues: str, env: dict[str, str] | None = None, **changes: Any) -> Spawned:
    dispatch.set_epoch("default", ttl=3600)  # or what waits would be sent twice
    return live.start_worker(spawn, *queues, env=env, AUTODISCOVER=["jobs", "warm"], **changes)


def pid_of(outcome: Any) -> int:
    """Return the process in which the row's only attempt has succeeded."""
    live.wait_for(outcome)
    assert live.outcomes(outcome) == [SUCCEEDED]
    return int(live.attempt(outcome).pid)


def pids_of(tags: str) -> list[int]:
    """Enqueue a job for each character, and return where they ran, in this order."""
    return [pid_of(jobs.record.enqueue(tag=tag)) for tag in tags]


@pytest.fixture
def rq_queue() -> Iterator[Queue]:
    """RQ's own view of the default queue, with its default serializer, as foreign code has it."""
    with Redis.from_url(settings.RQ_QUEUES["default"]["URL"]) as client:
        yield django_rq.get_queue("default", connection=client, serializer=DefaultSerializer)


# ---- how long it stays


@with_sqlite
def test_deliveries_run_in_one_horse_until_their_worker_ends_and_it_with_it(spawn: Spawn) -> None:
    worker = start(spawn)
    [horse] = set(pids_of("abcd"))
    assert psutil.Process(horse).ppid() == worker.pid
    worker.signal(signal.SIGTERM)
    worker.wait(PATIENCE)
    assert worker.children() == []


@with_sqlite
@pytest.mark.parametrize(("count", "horses"), [(1, 4), (2, 2), (3, 2)])
def test_horse_goes_after_so_many_deliveries(spawn: Spawn, count: int, horses: int) -> None:
    start(spawn, HORSE_JOBS=count)
    pids = pids_of("abcd")
    assert len(set(pids)) == horses
    assert all(len(set(pids[n : n + count])) == 1 for n in range(0, 4, count))


@with_sqlite
@pytest.mark.parametrize(("most", "stays"), [(20_000_000, False), (0, True), (None, True)])
def test_horse_goes_once_it_has_grown_by_too_much(
    spawn: Spawn, most: int | None, stays: bool
) -> None:
    worker = start(spawn, HORSE_MEMORY=most)
    first = pid_of(warm.soil.enqueue(tag="grow", how="memory"))
    [second] = pids_of("a")
    assert (first == second) is stays
    assert ("has grown by" in worker.output) is not stays


@with_sqlite
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_idle_horse_that_is_ended_costs_no_attempt(spawn: Spawn, end: signal.Signals) -> None:
    start(spawn)
    [first] = pids_of("a")
    live.kill(first, end)
    until(lambda: not live.is_running(first), PATIENCE)
    assert pids_of("b") != [first]


@with_sqlite
def test_job_that_ends_its_horse_costs_its_neighbours_nothing(spawn: Spawn) -> None:
    before = [jobs.record.enqueue(tag=f"before {n}") for n in range(2)]
    bad = jobs.leave.enqueue(tag="exit", how="os._exit")
    after = [jobs.record.enqueue(tag=f"after {n}") for n in range(2)]
    worker = start(spawn)
    assert len({pid_of(outcome) for outcome in before}) == 1
    assert not {pid_of(o) for o in before} & {pid_of(o) for o in after}
    live.wait_for_outcome(bad, LOST, 3)
    assert worker.is_alive()


@with_sqlite
def test_horse_without_a_parent_goes(spawn: Spawn) -> None:
    worker = start(spawn)
    [horse] = pids_of("a")
    live.kill(worker.pid)
    until(lambda: not live.is_running(horse), PATIENCE, what="nobody gives it orders any more")


@with_sqlite
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks where Linux lists open files")
def test_children_of_a_worker_keep_no_pipe_of_each_other_open(spawn: Spawn) -> None:
    worker = start(spawn)
    coordinator = live.coordinator_of(worker)
    [horse] = pids_of("a")
    assert not pipes_of(horse) & pipes_of(coordinator)
    live.kill(coordinator)
    until(lambda: live.idle_children(worker) not in ([], [coordinator]), PATIENCE)
    [new] = live.idle_children(worker)
    until(lambda: not pipes_of(horse) & pipes_of(new), PATIENCE, what="it is itself after its fork")


def pipes_of(pid: int) -> set[str]:
    """Return the pipes of which a process has an end."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(fd))
    return {target for target in found if target.startswith("pipe:")}


# ---- what it finds


CLEAN = ["environ", "folder", "removed folder", "umask", "handler", "mask", "stdout", "language"]


@with_sqlite
def test_what_jobs_change_of_their_process_is_put_back(spawn: Spawn) -> None:
    start(spawn)
    first = warm.look.enqueue(tag="first")
    pids = {pid_of(first)}
    for how in CLEAN:
        soiled = warm.soil.enqueue(tag=how, how=how)
        then = warm.look.enqueue(tag=f"after {how}")
        pids |= {pid_of(soiled), pid_of(then)}
        assert json.loads(live.row_of(then).result) == json.loads(live.row_of(first).result), how
    assert len(pids) == 1, "none of this needs a new horse"


@with_sqlite
@pytest.mark.parametrize(
    ("how", "stays"),
    [
        ("thread", False),
        ("daemon thread", True),
        ("many daemon threads", False),
        ("child", False),
    ],
)
def test_horse_in_which_a_job_has_left_something_alive_goes(
    spawn: Spawn, how: str, stays: bool
) -> None:
    worker = start(spawn)
    first = pid_of(warm.soil.enqueue(tag="soil", how=how))
    [second] = pids_of("a")
    assert (first == second) is stays
    assert ("still there" in worker.output) is not stays


@with_server
def test_horse_keeps_its_connection_and_gives_it_up_once_it_rests(spawn: Spawn) -> None:
    start(spawn)
    [horse] = pids_of("a")
    [kept] = database_ports(horse)
    pids_of("bc")
    assert database_ports(horse) == [kept]
    until(lambda: database_ports(horse) == [], PATIENCE, what="its session is closed")
    assert pids_of("d") == [horse]
    assert database_ports(horse) != [kept]


def database_ports(pid: int) -> list[int]:
    """Return our ends of a process's connections to the database."""
    port = int(connection.settings_dict["PORT"])
    found = psutil.Process(pid).net_connections()
    return [c.laddr.port for c in found if c.raddr and c.raddr.port == port]


# ---- connections between two jobs


def begin_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


OPENED: dict[str, Callable[[], Any]] = {
    "autocommit off": lambda: transaction.set_autocommit(False),
    "atomic": lambda: transaction.atomic().__enter__(),
    "by hand": begin_by_hand,
}


@pytest.mark.parametrize("how", OPENED)
def test_transaction_that_is_left_open_is_rolled_back(how: str) -> None:
    if how == "by hand" and connection.vendor == "mysql" and not tells_of_transactions():
        pytest.skip("mysqlclient tells nobody of a transaction")
    OPENED[how]()
    jobs.note("uncommitted")
    slate.rest_connections()
    assert not Ledger.objects.filter(tag="uncommitted").exists()
    transaction.set_autocommit(False)
    slate.rest_connections()
    assert connection.get_autocommit()
    assert not connection.in_atomic_block
    jobs.note("committed")
    slate.rest_connections()
    assert Ledger.objects.filter(tag="committed").exists()


def tells_of_transactions() -> bool:
    connection.ensure_connection()
    return hasattr(connection.connection, "server_status")


def test_connection_that_is_well_is_kept() -> None:
    jobs.note("before")
    raw = connection.connection
    with pytest.raises(DatabaseError), connection.cursor() as cursor:
        cursor.execute("SELECT nonsense FROM nowhere")
    slate.rest_connections()
    assert connection.connection is raw


@sessions.needs_server
def test_connection_that_broke_is_closed() -> None:
    jobs.note("before")
    sessions.terminate(sessions.own())
    with pytest.raises(DatabaseError):
        jobs.note("broken")
    slate.rest_connections()
    assert connection.connection is None
    jobs.note("after")


def test_connection_is_closed_at_the_age_that_settings_give_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 1)
    connection.close()
    connection.ensure_connection()
    slate.rest_connections()
    assert connection.connection is not None
    connection.close_at = clock.monotonic()
    slate.rest_connections()
    assert connection.connection is None


# ---- jobs that are not ours


@with_sqlite
def test_foreign_jobs_run_in_horses_of_their_own(spawn: Spawn, rq_queue: Queue) -> None:
    start(spawn, FOREIGN_PICKLE=True)
    [ours] = pids_of("a")
    foreign = [
        rq_queue.enqueue(warm.foreign, f"foreign {n}", on_success=Callback(warm.on_success))
        for n in range(2)
    ]
    for message in foreign:
        until(lambda m=message: live.notes(m.id) == ["called back"], PATIENCE)
        until(lambda m=message: m.get_status(refresh=True) == JobStatus.FINISHED, PATIENCE)
    theirs = {note for n in range(2) for note in live.notes(f"foreign {n}")}
    assert len(theirs) == 2
    assert f"foreign {ours}" not in theirs
    assert pids_of("b") == [ours]


@with_sqlite
def test_delivery_with_extras_of_rqs_runs_in_a_horse_of_its_own(
    spawn: Spawn, rq_queue: Queue
) -> None:
    outcome = jobs.record.enqueue(tag="extra")
    rq_queue.connection.delete(rq_queue.key)
    row = live.row_of(outcome)
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    message = json_queue.enqueue(
        dispatch.ENTRY,
        args=([[row.pk, row.generation]],),
        on_success=Callback("tests.app.warm.on_success"),
        result_ttl=60,
    )
    start(spawn, FOREIGN_PICKLE=True)
    [ours] = pids_of("a")
    assert pid_of(outcome) != ours
    until(lambda: live.notes(message.id) == ["called back"], PATIENCE)


@with_sqlite
def test_worker_that_may_run_no_scripts_takes_messages_as_rq_does(
    spawn: Spawn, redis_client: redis.Redis
) -> None:
    user = f"limited{os.getpid()}"
    rules = {"keys": ["*"], "channels": ["*"], "commands": ["+@all", "-@scripting"]}
    redis_client.acl_setuser(user, enabled=True, passwords=["+secret"], **rules)
    where = live_settings.REDIS.replace("redis://", f"redis://{user}:secret@")
    try:
        worker = start(spawn, "default", "high", env={"DEDUPJOBS_TEST_REDIS": where})
        [horse] = set(pids_of("ab"))
        assert pid_of(jobs.record_high.enqueue(tag="c")) == horse
        assert "Redis is away" not in worker.output
    finally:
        redis_client.acl_deluser(user)


@with_sqlite
def test_foreign_job_that_depends_on_a_delivery_runs_after_it(
    spawn: Spawn, rq_queue: Queue, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    start(spawn, FOREIGN_PICKLE=True)
    outcome = jobs.wait.enqueue(tag="first", release=str(release))
    live.begun("first")
    rq_id = live.attempt(outcome).rq_id
    rq_queue.enqueue(warm.foreign, "dependent", depends_on=rq_id)
    assert live.queued() == []
    release.touch()
    until(lambda: live.notes("dependent"), PATIENCE)


# ---- RQ's books


def fetched(rq_queue: Queue, rq_id: str) -> RqJob:
    return RqJob.fetch(rq_id, connection=rq_queue.connection, serializer=JSONSerializer)


@with_sqlite
def test_rqs_books_show_who_works_on_what(spawn: Spawn, rq_queue: Queue, tmp_path: Path) -> None:
    start(spawn)
    outcome = jobs.wait.enqueue(tag="one", release=str(tmp_path / "release"))
    live.begun("one")
    rq_id = live.attempt(outcome).rq_id
    [worker] = Worker.all(connection=rq_queue.connection)
    until(lambda: worker.get_current_executions(refresh=True), PATIENCE)
    worker.refresh()
    assert worker.get_state() == "busy"
    assert worker.get_current_job_id() == rq_id
    assert rq_queue.started_job_registry.get_job_ids() == [rq_id]
    assert rq_queue.intermediate_queue.get_job_ids() == []
    message = fetched(rq_queue, rq_id)
    assert (message.get_status(), message.worker_name) == (JobStatus.STARTED, worker.name)


@with_sqlite
def test_rqs_books_show_how_it_ended(spawn: Spawn, rq_queue: Queue) -> None:
    start(spawn)
    pids_of("ab")
    ids = list(JobAttempt.objects.values_list("rq_id", flat=True))
    [worker] = Worker.all(connection=rq_queue.connection)

    def rests() -> bool:
        worker.refresh()
        return (worker.get_state(), worker.successful_job_count) == ("idle", 2)

    until(rests, PATIENCE)
    assert rq_queue.started_job_registry.count == 0
    assert worker.total_working_time > 0
    assert worker.current_execution_count == 0
    assert sorted(rq_queue.finished_job_registry.get_job_ids()) == sorted(ids)
    for rq_id in ids:
        message = fetched(rq_queue, rq_id)
        assert message.get_status() == JobStatus.FINISHED
        assert message.started_at <= message.ended_at
        assert message.latest_result().type.name == "SUCCESSFUL"
        assert 0 < rq_queue.connection.ttl(message.key) <= 60


@with_sqlite
def test_delivery_that_raises_reaches_rqs_exception_handlers_and_failed_registry(
    spawn: Spawn, rq_queue: Queue
) -> None:
    json_queue = Queue("default", connection=rq_queue.connection, serializer=JSONSerializer)
    forged = json_queue.enqueue("dedupjobs.runner.run", args=([["no", "row"]],))
    handlers = json.dumps(["tests.app.warm.on_exception"])
    start(spawn, env={"DEDUPJOBS_TEST_HANDLERS": handlers})
    until(lambda: forged.id in rq_queue.failed_job_registry, PATIENCE)
    assert live.notes("handler") == ["default ArgumentError"]
    assert "no list of at most" in fetched(rq_queue, forged.id).latest_result().exc_string
    [worker] = Worker.all(connection=rq_queue.connection)
    assert worker.failed_job_count == 1


@with_sqlite
def test_suspended_worker_takes_nothing_until_it_is_resumed(
    spawn: Spawn, rq_queue: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    start(spawn)
    jobs.wait.enqueue(tag="first", release=str(release))
    live.begun("first")
    suspend(redis_client)
    waiting = jobs.record.enqueue(tag="second")
    release.touch()
    [worker] = Worker.all(connection=rq_queue.connection)
    until(lambda: worker.refresh() or worker.get_state() == "suspended", PATIENCE)
    assert live.queued() == [live.row_of(waiting).dispatch_id]
    resume(redis_client)
    live.wait_for(waiting)


@with_sqlite
def test_message_without_a_hash_is_passed_over(spawn: Spawn, redis_client: redis.Redis) -> None:
    redis_client.rpush("rq:queue:default", "gone", "gone too")
    redis_client.rpush("rq:queue:high", "gone")
    start(spawn, "default", "high")
    pids_of("a")
    pid_of(jobs.record_high.enqueue(tag="b"))
    for queue in ("default", "high"):
        key = f"rq:queue:{queue}:intermediate"
        until(lambda k=key: redis_client.lrange(k, 0, -1) == [], PATIENCE)


TRIPS = 1.0  # per job of a batch, with the waiting before and after; plain RQ has 20


@with_sqlite
def test_delivery_costs_few_round_trips(spawn: Spawn) -> None:
    count = 60
    with (
        Valkey() as server,  # our own, since others' commands would be counted
        live.changed(**live.redis_at(server.url)),
        server.client(2 * live_settings.WORKER_NUMBER) as client,
    ):
        start(spawn, env={"DEDUPJOBS_TEST_REDIS": server.url}, TICK=20)
        pids_of("a")
        worker_is_idle(client)
        before = client.info()["total_reads_processed"]
        jobs.record.enqueue_many([{"tag": f"trip {n}"} for n in range(count)])
        until(lambda: JobAttempt.objects.filter(outcome=SUCCEEDED).count() > count, PATIENCE)
        worker_is_idle(client)
        asked = client.info()["total_reads_processed"] - before
    assert asked / count < TRIPS


def worker_is_idle(client: redis.Redis) -> None:
    until(lambda: client.zcard("rq:wip:default") == 0, PATIENCE, every=0.5)


# ---- the sheet


def test_sheet_shows_what_was_written_last() -> None:
    sheet = Sheet()
    assert sheet.read() == {}
    for number in range(5):
        sheet.write({"number": number, "name": "x" * number * 100})
        assert sheet.read() == {"number": number, "name": "x" * number * 100}
    sheet.write({})
    assert sheet.read() == {}


def test_sheet_whose_writer_has_died_in_the_middle_shows_the_one_before() -> None:
    sheet = Sheet()
    sheet.write({"number": 1})
    sheet._memory[sheet._start(2) : sheet._start(2) + 20] = b"\xff" * 20
    assert sheet.read() == {"number": 1}


def test_sheet_is_the_same_in_a_child() -> None:
    sheet = Sheet()
    pid = os.fork()
    if pid == 0:
        sheet.write({"from": "child"})
        os._exit(0)
    os.waitpid(pid, 0)
    assert sheet.read() == {"from": "child"}


# ---- the pacemaker


class Beating(Heart):
    """A heart whose beats are counted and go to no database."""

    def __init__(self, lease: float) -> None:
        super().__init__(job_pk=1, fence=1, owner="me", name="x", lease=lease)
        self.beats = 0
        self.threads: set[int] = set()
        self.hangs = threading.Event()
        self.hangs.set()

    def tick(self) -> Pulse:
        self.beats += 1
        self.threads.add(threading.get_ident())
        self.hangs.wait(10)
        return Pulse()


def test_pacemaker_beats_for_each_heart_in_turn_from_one_thread() -> None:
    pacemaker = Pacemaker()
    hearts = [Beating(0.06), Beating(60), Beating(0.06)]
    for heart in hearts:
        with pacemaker.beating(heart):
            if heart.lease < 1:
                until(lambda h=heart: h.beats >= 3)
        seen = heart.beats
        begun = clock.monotonic()
        until(lambda at=begun: clock.monotonic() - at > 0.05)
        assert heart.beats == seen, "it rests"
    assert hearts[1].beats == 0
    assert len(hearts[0].threads | hearts[2].threads) == 1


def test_pacemaker_lets_a_beat_end_before_its_heart_rests() -> None:
    pacemaker, heart = Pacemaker(), Beating(0.06)
    heart.hangs.clear()
    rested = threading.Event()

    def rest() -> None:
        with pacemaker.beating(heart):
            until(lambda: heart.beats)
        rested.set()

    runner = threading.Thread(target=rest)
    runner.start()
    until(lambda: heart.beats)
    assert not rested.wait(0.2)
    heart.hangs.set()
    assert rested.wait(5)
    runner.join()


def test_pacemaker_goes_on_beating_after_the_database_was_away() -> None:
    class Failing(Beating):
        def tick(self) -> Pulse:
            super().tick()
            if self.beats == 1:
                raise OperationalError("away")
            return Pulse()

    heart = Failing(0.06)
    with Pacemaker().beating(heart):
        until(lambda: heart.beats >= 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_pacemaker_beats_for_the_next_heart_although_one_had_an_error_of_ours() -> None:
    class Broken(Beating):
        def tick(self) -> Pulse:
            super().tick()
            raise RuntimeError("ours")

    pacemaker = Pacemaker()
    broken, heart = Broken(0.06), Beating(0.06)
    with pacemaker.beating(broken):
        until(lambda: broken.beats and pacemaker._beating is None)
    with pacemaker.beating(heart):
        until(lambda: heart.beats >= 2)


@with_sqlite
def test_delivery_whose_message_has_rubbish_in_it_runs(
    spawn: Spawn, redis_client: redis.Redis
) -> None:
    outcome = jobs.record.enqueue(tag="a")
    redis_client.hset(f"rq:job:{live.row_of(outcome).dispatch_id}", "created_at", "yesterday")
    worker = start(spawn)
    pid_of(outcome)
    pids_of("b")
    assert worker.is_alive()


# ---- RQ's SimpleWorker, whose process stays


def test_pacemaker_tells_once_that_no_heart_has_beaten_for_a_while() -> None:
    idle = threading.Event()
    pacemaker = Pacemaker(when_idle=idle.set)
    with pacemaker.beating(Beating(0.06)):
        assert not idle.is_set()
    assert idle.wait(5)
    idle.clear()
    with pacemaker.beating(Beating(0.06)):
        pass
    assert idle.wait(5)


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process have run no message yet, and leave nothing to pay in other tests."""
    monkeypatch.setattr(runner, "host", runner.Host())
    monkeypatch.setattr(runner, "_messages", 0)
    yield
    if isinstance(runner.host, runner.Resident):
        pacemaker = runner.host.pacemaker
        with pacemaker.beating(Beating(0.06)):
            pass
        until(lambda: pacemaker._wakes == math.inf, PATIENCE, what="it has paid")


@pytest.mark.usefixtures("transactional_db", "new_process")
def test_process_that_gets_a_second_message_starts_one_thread_for_all_its_beats() -> None:
    started = [_threads_started_by_running(tag) for tag in "abcd"]
    assert started == [["dedupjobs-heart-"], ["dedupjobs-pacemaker"], [], []]


@pytest.mark.usefixtures("transactional_db", "new_process")
def test_process_that_stays_pays_what_it_has_counted_once_it_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tag in "abc":
        _threads_started_by_running(tag)
    assert isinstance(runner.host, runner.Resident)
    counters.add("lock_acquire_success_total")
    with runner.host.beating(Beating(0.06)):
        pass
    until(lambda: not counters._owed.counts, what="paid")


def _threads_started_by_running(tag: str) -> list[str]:
    """Run a message with one job, and return the threads that it has besides those before it."""
    before, started = set(threading.enumerate()), set()

    def look(point: str) -> None:
        if point == "user_code.before":
            started.update(set(threading.enumerate()) - before)

    row = jobs.record.enqueue(tag=tag).job
    probes.hook = look
    try:
        runner.run([[row.pk, 1]])
    finally:
        probes.hook = None
    return sorted(thread.name.rstrip("0123456789") for thread in started)
