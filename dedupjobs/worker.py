"""
``DedupWorker``: an RQ worker that minds its work horses.

    parent     forks a horse per delivery, whose attempts' owner it has minted; beats for it from
               a thread of its own; kills it at time-out + TIMEOUT_GRACE; buries it when it dies
    horse      runs one delivery and beats too, in case its parent dies
    coordinator child of the parent; ends when the parent's end of a pipe closes

Set ``RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}`` and run ``manage.py rqworker``.
"""

from __future__ import annotations

import json
import logging
import os
import pickle  # only reached with FOREIGN_PICKLE=True
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from django.core.cache import caches
from django.db import DatabaseError, InterfaceError, connections
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Queue, Worker
from rq.exceptions import InvalidJobOperation
from rq.executions import Execution
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from dedupjobs import (
    clock,
    conf,
    coordinator,
    counters,
    dispatch,
    execution,
    fields,
    hardening,
    interrupts,
    invalidation,
    lifecycle,
    locks,
    registry,
    runner,
)
from dedupjobs.coordinator import Coordinator
from dedupjobs.endings import Ending, Error, Failed, Interrupted, Stopped
from dedupjobs.exceptions import ForeignPickle
from dedupjobs.heartbeat import Heart
from dedupjobs.lifecycle import Claim
from dedupjobs.registry import Options

IDLE_WAIT = 2  # seconds that an idle worker blocks in Redis before it looks at its coordinator
GLANCE = 1.0  # seconds between two looks of the parent at a running horse
PICKLE_MARK = b"\x80"  # how every pickle of protocol 2 and up begins


class Serializer:
    """JSON that names our own entry; anything else only where the project allows it."""

    dumps = staticmethod(JSONSerializer.dumps)

    @staticmethod
    def loads(data: bytes, *args: Any, **kwargs: Any) -> Any:
        trusts = conf.get().FOREIGN_PICKLE
        if data.startswith(PICKLE_MARK):
            if trusts:
                return pickle.loads(data)  # noqa: S301 - asked for by the setting
            raise _foreign("was queued as a pickle, which runs any code its writer likes")
        value = JSONSerializer.loads(data, *args, **kwargs)
        if _is_call(value) and value[0] != dispatch.ENTRY and not trusts:
            raise _foreign(f"names {value[0]!r}, and RQ would run any function so named")
        return value


def _is_call(value: Any) -> bool:
    """Return whether this is how RQ writes a job: function, instance, arguments, keywords."""
    return isinstance(value, list) and list(map(type, value[2:])) == [list, dict]


def _foreign(what: str) -> ForeignPickle:
    return ForeignPickle(
        f"This job is not one of dedupjobs: it {what}. If only trusted code writes to this Redis, "
        'set DEDUPJOBS["FOREIGN_PICKLE"] = True and requeue it; otherwise give it a queue and a '
        "stock worker of its own."
    )


@dataclass(slots=True)
class HorseHost(runner.Host):
    """In a horse: tells the parent over a pipe which attempt runs."""

    pipe: int = -1

    def claimed(self, claim: Claim, options: Options) -> None:
        self._tell(
            fence=claim.fence,
            job_pk=claim.job_pk,
            owner=claim.owner,
            name=claim.name,
            lease=options.lease,
            timeout=options.timeout,
        )

    def settled(self, claim: Claim) -> None:
        self._tell()

    def _tell(self, **facts: Any) -> None:
        with suppress(OSError):  # the parent is gone; the horse goes on
            os.write(self.pipe, json.dumps(facts).encode() + b"\n")


@dataclass(slots=True)
class Ride:
    """One horse as its parent sees it."""

    owner: str
    pid: int
    pipe: int
    begun: float
    heart: Heart | None = None
    running: dict[str, Any] = field(default_factory=dict)
    killed: str = ""  # why we killed it: "timeout", "shutdown" or "stopped"
    term_sent: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the horse must have ended its present attempt; never asks the database."""
        timeout = self.running.get("timeout")
        if timeout is None:
            return None
        return float(self.running["since"] + timeout + conf.get().TIMEOUT_GRACE)

    def hear(self) -> None:
        """Read what the horse has said; an empty fact sheet says that nothing runs now."""
        try:
            heard = os.read(self.pipe, 65536)
        except BlockingIOError:
            return
        for line in heard.splitlines():
            self.rest()
            facts = json.loads(line)
            self.running = {**facts, "since": clock.monotonic()} if facts else {}

    def beat(self) -> None:
        """Start beating for a horse that has run for a moment; short jobs need no beat."""
        facts = self.running
        due = facts and self.heart is None
        if due and clock.monotonic() - facts["since"] >= min(GLANCE, facts["lease"] / 6):
            self.heart = Heart(
                job_pk=facts["job_pk"],
                fence=facts["fence"],
                owner=facts["owner"],
                name=facts["name"],
                lease=facts["lease"],
                tells=False,
            )
            self.heart.start()

    def rest(self) -> None:
        """Stop beating; the heart's connection closes before the next fork."""
        if self.heart is not None:
            self.heart.stop()
            self.heart = None


class DedupWorker(Worker):
    """See the module's docstring."""

    reads_json = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Whatever the command line says: producers write JSON for exactly this class.
        kwargs["serializer"] = Serializer
        super().__init__(*args, **kwargs)
        self._ride: Ride | None = None
        self._interrupt_at: float | None = None
        self._coordinator: tuple[int, int] | None = None  # pid, our end of its pipe

    # ---- life of the worker

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        self._demand_one_slot()
        fields.worker = self.name
        super().bootstrap(*args, **kwargs)
        hardening.harden_connections()
        if not dispatch.reads_json():
            self.log.error(
                "Worker %s reads JSON, but producers write pickles: set RQ = {'WORKER_CLASS': "
                "'dedupjobs.worker.DedupWorker'} for all processes, not only on this command line.",
                self.name,
            )
        self._name_unknown_jobs()
        _warm_up()
        self._mind_coordinator()

    def _demand_one_slot(self) -> None:
        with suppress(RedisError):  # whatever else is wrong is told by what needs it
            if self.connection.info("cluster").get("cluster_enabled"):
                self.log.critical(
                    "Worker %s: the Redis of its queues is in cluster mode, and RQ's transactions "
                    "span slots. Name a server without it in RQ_QUEUES; locks may stay there.",
                    self.name,
                )
                raise SystemExit(1)

    def teardown(self) -> None:
        if not self.is_horse:
            self._end_coordinator()
        super().teardown()

    @property
    def dequeue_timeout(self) -> int:
        return min(super().dequeue_timeout, IDLE_WAIT)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        with self._without_redis():
            super().heartbeat(timeout, pipeline)
        if not self.is_horse and self._coordinator is not None:
            self._mind_coordinator()

    # RQ quits if Redis is away at one of these; the loop's own wait for it is elsewhere.

    def set_state(self, state: str, pipeline: Any = None) -> None:
        with self._without_redis():
            super().set_state(state, pipeline)

    def check_for_suspension(self, burst: bool) -> None:
        with self._without_redis():
            super().check_for_suspension(burst)

    def run_maintenance_tasks(self) -> None:
        with self._without_redis(), self._despite_rubbish():
            super().run_maintenance_tasks()

    def dequeue_job_and_maintain_ttl(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            with self._despite_rubbish():
                return super().dequeue_job_and_maintain_ttl(*args, **kwargs)

    @contextmanager
    def _despite_rubbish(self) -> Iterator[None]:
        """Go on if an id in RQ's lists is no text, which somebody else must have put there."""
        try:
            yield
        except UnicodeDecodeError as error:
            self.log.error("Worker %s: an id in RQ's lists is no text: %s", self.name, error)

    def maintain_heartbeats(self, job: RqJob, execution: Execution) -> None:
        with self._without_redis():
            super().maintain_heartbeats(job, execution)

    @contextmanager
    def _without_redis(self) -> Iterator[None]:
        """Go on if Redis does not answer: what the block tells it is bookkeeping."""
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError) as error:
            self.log.warning("Worker %s: Redis is away: %s", self.name, error)

    def _name_unknown_jobs(self) -> None:
        try:
            if names := coordinator.unknown_names():
                self.log.error(
                    "Worker %s: rows wait for jobs that this worker does not know: %s. Deploy the "
                    "code that has them, or add their old names with name=.",
                    self.name,
                    ", ".join(names),
                )
        except (DatabaseError, InterfaceError) as error:
            self.log.error("Worker %s: can not read the tables: %s", self.name, error)
        finally:
            connections.close_all()

    # ---- one delivery

    def execute_job(self, job: RqJob, queue: Queue) -> None:
        # Nothing of ours may cross the fork: a connection that two processes use breaks both.
        connections.close_all()
        super().execute_job(job, queue)

    def fork_work_horse(self, job: RqJob, queue: Queue) -> None:
        owner = clock.token()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        runner.host = HorseHost(owner=owner, rq_id=job.id, pipe=writing)
        super().fork_work_horse(job, queue)
        os.close(writing)
        runner.host = runner.Host()
        self._ride = Ride(owner=owner, pid=self.horse_pid, pipe=reading, begun=clock.monotonic())

    def setup_work_horse_signals(self) -> None:
        super().setup_work_horse_signals()
        # Between two functions a SIGTERM is remembered, so that no settle is cut in half.
        signal.signal(signal.SIGTERM, interrupts.note_shutdown)

    def main_work_horse(self, job: RqJob, queue: Queue) -> None:
        if self._coordinator is not None:
            os.close(self._coordinator[1])  # or the coordinator would outlive its parent in us
        super().main_work_horse(job, queue)

    def monitor_work_horse(self, job: RqJob, queue: Queue, execution: Execution) -> None:
        """Watch the horse until it is gone; then bury what it has left open."""
        ride = cast(Ride, self._ride)  # set by the fork
        job.started_at = now()
        status = self._watch(ride, job, execution)
        ride.hear()
        ride.rest()
        os.close(ride.pipe)
        self._horse_pid, self._ride = 0, None
        self.executions.pop(execution.id, None)
        if status == os.EX_OK and not ride.running:
            return
        if self._stopped_job_id == job.id:
            ride.killed = "stopped"
        self._bury(ride, job.id)
        if status != os.EX_OK:
            with self._without_redis():
                self._tell_rq(job, queue, execution, status)

    def _watch(self, ride: Ride, job: RqJob, execution: Execution) -> int:
        """Return the horse's wait status. Each look takes at most GLANCE seconds, and no SQL."""
        next_report = clock.monotonic() + self.job_monitoring_interval
        with _exit_of(ride.pid) as gone:
            while True:
                gone(GLANCE, ride.pipe)
                pid, status = os.waitpid(ride.pid, os.WNOHANG)
                if pid:
                    return status
                ride.hear()
                ride.beat()
                self._cut_off(ride)
                if clock.monotonic() >= next_report:
                    next_report = clock.monotonic() + self.job_monitoring_interval
                    self.maintain_heartbeats(job, execution)

    def _cut_off(self, ride: Ride) -> None:
        """End a horse that has lost its lease, ran out of time, or stands in a shutdown's way."""
        moment = clock.monotonic()
        if ride.heart is not None and ride.heart.lost.is_set():
            self.kill_horse(signal.SIGKILL)
        elif ride.deadline is not None and moment >= ride.deadline:
            ride.killed = ride.killed or "timeout"
            self.kill_horse(signal.SIGKILL)
        elif self._interrupt_at is not None and moment >= self._interrupt_at:
            if ride.term_sent is None:
                ride.term_sent = moment
                self._signal_horse(ride, signal.SIGTERM)
            elif moment >= ride.term_sent + conf.get().TIMEOUT_GRACE:
                ride.killed = ride.killed or "shutdown"
                self.kill_horse(signal.SIGKILL)

    def _signal_horse(self, ride: Ride, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(ride.pid, signum)

    def _bury(self, ride: Ride, rq_id: str) -> None:
        """End the attempts that the dead horse has left open: we have reaped it, so it is dead."""
        try:
            with counters.gathering():
                for claim in lifecycle.claimed_by(ride.owner):
                    self._bury_one(claim, ride.killed)
            lifecycle.mark_unsent([rq_id])  # rows that it had not claimed yet have no message now
            coordinator.Coordinator().hand_over([q.name for q in self.queues])
        except (DatabaseError, InterfaceError) as error:
            self.log.error(
                "Worker %s: the dead horse's attempts are left to the coordinator: %s",
                self.name,
                error,
            )
        finally:
            connections.close_all()

    def _bury_one(self, claim: Claim, killed: str) -> None:
        job = registry.find(claim.name)
        ending = _ending_of(killed, job.options if job else Options())
        if ending is not None:
            status = runner.settle(claim, ending, execution.note_of(ending, None), job)
            if status is not None:
                runner.tell_end(claim, ending, status, None)
        elif lost := lifecycle.bury(claim.fence, "lost: its process died"):
            coordinator.tell_lost(lost, "death")
        locks.release(claim.job_pk, claim.owner, cargo=counters.payment())

    def _tell_rq(self, job: RqJob, queue: Queue, execution: Execution, status: int) -> None:
        """Let RQ's own books show the dead horse; our row has been dealt with already."""
        try:
            if job.get_status() in (JobStatus.FINISHED, JobStatus.FAILED):
                return
        except InvalidJobOperation:
            return
        job.ended_at = now()
        signum = f" (signal {os.WTERMSIG(status)})" if os.WIFSIGNALED(status) else ""
        text = f"Work-horse terminated unexpectedly; waitpid returned {status}{signum}"
        self.handle_work_horse_killed(job, self.horse_pid, status, None)
        self.handle_job_failure(job, queue=queue, exc_string=text, execution=execution)

    # ---- shutdown

    def handle_warm_shutdown_request(self) -> None:
        super().handle_warm_shutdown_request()
        self._interrupt_at = clock.monotonic() + conf.get().SHUTDOWN_GRACE

    def request_force_stop(self, signum: int, frame: Any) -> None:
        """Second signal: interrupt the running job now instead of after SHUTDOWN_GRACE."""
        asked = self._shutdown_requested_date
        if asked is not None and (now() - asked).total_seconds() < 1:
            return  # a pool and a terminal both signal: one request, not two
        self.log.warning("Worker %s: cold shut down", self.name)
        if self._ride is None:
            raise SystemExit
        self._interrupt_at = clock.monotonic()

    # ---- the coordinator child

    def _mind_coordinator(self) -> None:
        """Start the coordinator child, or another one if it has died."""
        if self._coordinator is not None:
            pid, pipe = self._coordinator
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                return
            os.close(pipe)
            self._coordinator = None
            self.log.warning("Worker %s: its coordinator died; starting another", self.name)
        connections.close_all()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            _coordinate(reading, self.log)
        os.close(reading)
        self._coordinator = (pid, writing)

    def _end_coordinator(self) -> None:
        if self._coordinator is None:
            return
        pid, pipe = self._coordinator
        self._coordinator = None
        os.close(pipe)
        with _exit_of(pid) as gone:
            gone(conf.get().TICK + 2.0, None)
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ending_of(killed: str, options: Options) -> Ending | None:
    """Return how the attempt of a horse ends that was killed for this cause; None: it is lost."""
    if killed == "timeout":
        text = f"killed: still running {conf.get().TIMEOUT_GRACE:g} s after its time-out"
        final = issubclass(TimeoutError, options.give_up_on or ())
        error = Error(type="builtins.TimeoutError", message=text, traceback="")
        return Failed(error=error, final=final, timed_out=True)
    if killed == "shutdown":
        return Interrupted(reason="killed: did not end within TIMEOUT_GRACE of its interruption")
    if killed == "stopped":
        return Stopped(reason="stopped through RQ", requested=True)
    return None


def _warm_up() -> None:
    """Import here what each horse would import again after its fork: some ten milliseconds."""
    invalidation.never_listen()
    import django.db.models.sql.compiler  # noqa: F401, PLC0415
    import redis.lock  # noqa: F401, PLC0415

    with suppress(Exception):  # a wrong cache is a check's business, not the worker's end
        getattr(caches[conf.get().LOCK_CACHE], "client", None)
    connections.close_all()


def _coordinate(pipe: int, log: logging.Logger) -> None:
    """The coordinator child: tick until the parent's end of the pipe is closed. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its parent, not before
    signal.set_wakeup_fd(-1)
    os.setpgrp()
    dispatch.forget_clients()

    parent = os.getppid()

    def parent_is_gone(seconds: float) -> bool:
        return bool(select.select([pipe], [], [], seconds)[0]) or os.getppid() != parent

    try:
        Coordinator().run(parent_is_gone)
    except BaseException:
        log.exception("The coordinator has ended")
        os._exit(1)
    os._exit(0)


@contextmanager
def _exit_of(pid: int) -> Iterator[Any]:
    """
    Yield ``wait(seconds, pipe)``, which returns early once the process ends or the pipe speaks.

    By a pidfd where the system has them; elsewhere by waiting in small steps.
    """
    pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    poller = select.poll()
    if pidfd is not None:
        poller.register(pidfd, select.POLLIN)

    hung_up: set[int] = set()

    def wait(seconds: float, pipe: int | None) -> None:
        if pipe is not None and pipe not in hung_up:
            poller.register(pipe, select.POLLIN)
        for fd, event in poller.poll((seconds if pidfd is not None else 0.05) * 1000):
            if fd == pipe and event & select.POLLHUP:  # it would be ready for ever
                hung_up.add(fd)
                poller.unregister(fd)

    try:
        yield wait
    finally:
        if pidfd is not None:
            os.close(pidfd)
