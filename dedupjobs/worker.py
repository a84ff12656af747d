"""
``DedupWorker``: an RQ worker that minds its work horses.

    parent     gives a horse one delivery after the other, whose attempts' owner it has minted;
               beats for it from a thread of its own; kills it at time-out + TIMEOUT_GRACE; buries
               it when it dies, and gives the next delivery to a new one
    horse      runs the deliveries and beats too, in case its parent dies; leaves after HORSE_JOBS
               of them, above HORSE_MEMORY, or when a job has left something behind
    coordinator child of the parent; ends when the parent's end of a pipe closes

RQ jobs that are not ours run as under any RQ worker, each in a horse of its own.

Set ``RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}`` and run ``manage.py rqworker``.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from django.db import DatabaseError, InterfaceError, connections
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import InvalidJobOperation, NoSuchJobError, StopRequested
from rq.executions import Execution
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.logutils import blue, green
from rq.utils import now
from rq.worker import WorkerStatus

from dedupjobs import (
    asides,
    cache,
    clock,
    conf,
    controls,
    coordinator,
    counters,
    dispatch,
    execution,
    fields,
    hardening,
    horse,
    interrupts,
    invalidation,
    lifecycle,
    locks,
    prefork,
    registry,
    runner,
    vitals,
    wire,
)
from dedupjobs.books import Books, Entry, Pace, Taken, Till
from dedupjobs.coordinator import Coordinator
from dedupjobs.endings import Ending, Error, Failed, Interrupted, Stopped
from dedupjobs.foreign import Guarded, Serializer, guarded
from dedupjobs.horse import GLANCE, Exit, Horse, HorseHost, Order, Perform, Ride, Sheet
from dedupjobs.lifecycle import Claim
from dedupjobs.registry import Options
from dedupjobs.visible import line

IDLE_WAIT = 2  # seconds that an idle worker blocks in Redis before it looks at its coordinator
REPLY_WITHIN = 3  # seconds after which a Redis that does not answer is asked on a new connection
HEARTBEAT_EVERY = 10.0  # seconds between what RQ writes nine times a job; its own patience is 60
MOST_RAISED = 3_000  # bytes of a traceback; so short a message is never cut in a pipe
RQ_GRACE = 60.0  # seconds after which RQ's worker kills a horse that its alarm has not ended
BURIAL = 2.0  # seconds for which a dead horse's attempts are tried that others have locked
BURIAL_PAUSE = 0.05
BATCH_DIED = "its process died while it ran another job of the batch"


class DedupWorker(Worker):
    """See the module's docstring."""

    reads_json = True
    max_connection_wait_time = 5.0  # seconds between two tries to reach Redis; RQ's are up to 60

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Whatever the command line says: producers write JSON for exactly this class.
        kwargs["serializer"] = Serializer
        super().__init__(*args, **kwargs)
        wire.mend(self.connection)
        self.job_class = guarded(self.job_class)
        for queue in self.queues:  # RQ's housekeeping reads with what stands there
            queue.job_class, queue.serializer = self.job_class, Serializer
        self._books = Books(self)
        self._till = Till(self.connection)
        self._pace = Pace()
        self._counts = False  # messages: then they are taken one by one
        self._taken: Taken | None = None
        self._raised: str | None = None
        self._horse: Horse | None = None
        self._ride: Ride | None = None
        self._interrupt_at: float | None = None
        self._next_heartbeat = 0.0
        self._coordinator: tuple[int, int] | None = None  # pid, our end of its pipe
        self._is_warm = False  # in a horse that runs more than one delivery

    # ---- life of the worker

    def work(self, *args: Any, **kwargs: Any) -> bool:
        self._counts = kwargs.get("max_jobs") is not None
        return super().work(*args, **kwargs)

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        self._demand_one_slot()
        fields.worker = self.name
        super().bootstrap(*args, **kwargs)
        hardening.harden_connections()
        if cache.is_on():
            controls.share_bell()  # which the coordinator child rings
        if not dispatch.reads_json():
            self.log.error(
                "Worker %s reads JSON, but producers write pickles: set RQ = {'WORKER_CLASS': "
                "'dedupjobs.worker.DedupWorker'} for all processes, not only on this command line.",
                self.name,
            )
        self._name_unknown_jobs()
        if error := vitals.sign():
            self.log.error("Worker %s: who watches it will miss it: %s", self.name, error)
        invalidation.never_listen()
        prefork.get_ready()
        connections.close_all()
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
            self._write_books()
            self._let_horse_go()
            self._end_coordinator()
        super().teardown()

    @property
    def dequeue_timeout(self) -> int:
        return min(super().dequeue_timeout, IDLE_WAIT)

    @property
    def connection_timeout(self) -> int:
        return self.dequeue_timeout + REPLY_WITHIN

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        if pipeline is not None:
            super().heartbeat(timeout, pipeline)
            return
        if self._stop_requested and self._state == WorkerStatus.IDLE:
            # Somebody has swallowed it: redis-py does, with whatever its own bookkeeping or the
            # end of a pipeline meets. RQ's wait for a message would go on until one comes.
            raise StopRequested
        if not self.is_horse:
            vitals.sign()
        if timeout is not None or clock.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = clock.monotonic() + HEARTBEAT_EVERY
            with self._without_redis(), self.connection.pipeline() as together:
                super().heartbeat(timeout, together)
                together.execute()
        if not self.is_horse and self._coordinator is not None:
            self._mind_coordinator()

    # RQ quits if Redis is away at one of these; the loop's own wait for it is elsewhere.

    def set_state(self, state: str, pipeline: Any = None) -> None:
        if state == WorkerStatus.IDLE and pipeline is None:
            self._state = state  # told once there is nothing to do
            return
        with self._without_redis():
            super().set_state(state, pipeline)
            self._books.note_told(state)

    def check_for_suspension(self, burst: bool) -> None:
        if self._till.works and not self._till.is_closed:
            return  # it looks each time
        with self._without_redis():
            super().check_for_suspension(burst)

    def run_maintenance_tasks(self) -> None:
        with self._without_redis(), self._despite_rubbish():
            super().run_maintenance_tasks()

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, *args: Any, **kwargs: Any
    ) -> tuple[RqJob, Queue] | None:
        with self._without_redis(), self._despite_rubbish():
            taken = self._till.take(self._ordered_queues, self._pace)
            if taken is None and self._till.is_closed:
                self.check_for_suspension(burst=timeout is None)
                taken = self._till.take(self._ordered_queues, self._pace)
            if taken is not None:
                return self._receive(taken)
        self._write_books()
        while True:
            with self._despite_rubbish():
                found = super().dequeue_job_and_maintain_ttl(timeout, *args, **kwargs)
                is_burst = timeout is None
                if found is not None or not is_burst or not self._send_due():
                    return found

    def _send_due(self) -> int:
        """Send what is due in our queues: a burst may end before any coordinator has come to it."""
        try:
            names = {queue.name for queue in self.queues}.intersection(dispatch.queue_names())
            return coordinator.Coordinator().send_due(names)
        except (DatabaseError, InterfaceError) as error:
            self.log.error("Worker %s: can not see what is due: %s", self.name, error)
            return 0
        finally:
            connections.close_all()

    def _receive(self, taken: Taken) -> tuple[RqJob, Queue]:
        """Do what RQ does with a message that it has popped; ours are read while they run."""
        self._taken = taken
        self.reorder_queues(reference_queue=taken.queue)
        try:
            job = self._job_of(taken.rq_id)
            if not taken.is_ours:
                job.restore(taken.raw)
        except (ValueError, NoSuchJobError) as error:
            self.connection.lrem(taken.queue.intermediate_queue_key, 1, taken.rq_id)
            raise ValueError(f"{taken.rq_id!r} is no message: {error}") from None
        name = green(taken.queue.name)
        if self.log_job_description:
            description = line(taken.description)
            self.log.info("Worker %s: %s: %s (%s)", self.name, name, blue(description), job.id)
        else:
            self.log.info("Worker %s: %s: %s", self.name, name, job.id)
        return job, taken.queue

    def _job_of(self, rq_id: str) -> RqJob:
        """Return RQ's job of this id, with nothing in it; ValueError: it can have no such id."""
        return self.job_class(rq_id, connection=self.connection, serializer=self.serializer)

    def _write_books(self, begun: Entry | None = None) -> None:
        with self._without_redis():
            self._books.tell(self.get_state(), begun)

    @contextmanager
    def _despite_rubbish(self) -> Iterator[None]:
        """Go on if RQ can not read what stands in its lists: somebody else has put it there."""
        try:
            yield
        except ValueError as error:  # an id that is no text, for example
            self.log.error("Worker %s: rubbish in RQ's lists: %s", self.name, line(error))

    def maintain_heartbeats(self, job: RqJob, execution: Execution) -> None:
        with self._without_redis():
            super().maintain_heartbeats(job, execution)

    @contextmanager
    def _without_redis(self) -> Iterator[None]:
        """Go on if Redis does not do it: what the block tells it is bookkeeping."""
        try:
            yield
        except RedisError as error:  # full and read-only count as well
            self.log.warning("Worker %s: Redis is away: %s", self.name, error)

    def _name_unknown_jobs(self) -> None:
        try:
            if names := coordinator.unknown_names():
                self.log.error(
                    "Worker %s: rows wait for jobs that this worker does not know: %s. Deploy the "
                    "code that has them, add their apps to INSTALLED_APPS, or keep their old names "
                    "with name= or aliases=.",
                    self.name,
                    ", ".join(names),
                )
        except (DatabaseError, InterfaceError) as error:
            self.log.error("Worker %s: can not read the tables: %s", self.name, error)
        finally:
            connections.close_all()

    # ---- one delivery

    def execute_job(self, job: RqJob, queue: Queue) -> None:
        taken, self._taken = self._taken, None
        if taken is None:  # RQ itself has popped it, after a rest
            with self._without_redis():
                raw = cast(dict[bytes, bytes], self.connection.hgetall(job.key))
                taken = Taken.of(queue, job.id, raw)
        if taken is not None and taken.is_ours:
            self._run(job, taken)
            return
        self._write_books()
        if isinstance(job, Guarded) and job.rubbish:
            self._refuse(job, queue)
            return
        connections.close_all()  # one that two processes use breaks both
        super().execute_job(job, queue)

    def _run(self, job: RqJob, taken: Taken) -> None:
        """Let a horse run a delivery of ours; what RQ is to know is written meanwhile."""
        entry = self._books.entry(job, taken.queue, tuple(t.rq_id for t in taken.others))
        self._state = WorkerStatus.BUSY
        self.executions[entry.execution.id] = entry.execution
        order = Order(
            owner=clock.token(),
            rq_id=job.id,
            description=taken.description,
            execution_id=entry.execution.id,
            queue=taken.queue.name,
            timeout=taken.timeout,
            data=taken.call,
        )
        ride = self._ride = Ride(order.owner, self._mounted(order), clock.monotonic())
        with suppress(Exception):  # rubbish in it is RQ's affair; the delivery is on its way
            job.restore(taken.raw)
        job.origin, job.timeout = order.queue, order.timeout
        entry.execution._job = job
        self._write_books(entry)
        self._watch(ride, job, entry.execution)
        self._learn(taken, clock.monotonic() - ride.begun)
        self._dismount(ride, job, entry)
        self.set_state(WorkerStatus.IDLE)

    def _learn(self, taken: Taken, seconds: float) -> None:
        """Note how many such messages may be taken together next time."""
        description = taken.description
        name = dispatch.name_in(description)
        found = registry.find(name) if description == dispatch.described(name) else None
        settings = conf.get()
        most = settings.BATCH if found and found.options.batch and not self._counts else 1
        least = min(settings.THREADS, most)
        rows = 1 + len(taken.others)
        self._pace.note(description, rows, seconds, most=most, least=least)

    def _refuse(self, job: RqJob, queue: Queue) -> None:
        """Put a message that RQ could not even read where people find it."""
        reason = f"dedupjobs could not read this message: {line(cast(Guarded, job).rubbish)}"
        self.log.error("Worker %s: %s", self.name, reason)
        job.origin = queue.name
        with self._without_redis():
            self.connection.lrem(queue.intermediate_queue_key, 1, job.id)
            self.handle_job_failure(job, queue=queue, exc_string=reason)

    def _mounted(self, order: Order) -> Horse:
        """Return a living horse that has got the order."""
        while True:
            if self._horse is None or self._horse.is_dead:
                self._let_horse_go()
                connections.close_all()  # one that two processes use breaks both
                self._horse = horse.fork(self._become_horse)
            self._horse_pid = self._horse.pid
            with suppress(BrokenPipeError):
                self._horse.give(order)
                self.procline(f"Horse {self._horse.pid} runs {order.rq_id} since {_moment()}")
                return self._horse

    def _dismount(self, ride: Ride, job: RqJob, entry: Entry) -> None:
        """Take down what became of a delivery, and of its horse."""
        ride.rest()
        ride.left = ride.running
        self._horse_pid, self._ride = 0, None
        self.executions.pop(entry.execution.id, None)
        if ride.answer is None:
            self._let_horse_go()
            self._bury_rider(ride, job, entry)
            return
        if ride.left:
            self._bury(ride, [job.id, *entry.others])
        if leaves := ride.answer.leaves:
            self.log.info("Worker %s: horse %d leaves: %s", self.name, ride.horse.pid, leaves)
            self._let_horse_go()
        if (raised := ride.answer.raised) is None:
            self._books.end(entry)
            return
        self._write_books()
        job.ended_at = now()
        with self._without_redis():
            self.handle_job_failure(
                job, queue=entry.queue, exc_string=raised, execution=entry.execution
            )

    def _let_horse_go(self) -> None:
        if self._horse is not None:
            self._horse.dismiss()
            self._horse = None

    def _bury_rider(self, ride: Ride, job: RqJob, entry: Entry) -> None:
        """Bury what a dead horse has left open, and let RQ's books show its end."""
        if self._stopped_job_id == job.id:
            ride.killed = "stopped"
        self._bury(ride, [job.id, *entry.others])
        status = cast(int, ride.horse.status)  # it was reaped
        with self._without_redis():
            self._tell_rq(job, entry.queue, entry.execution, status)

    def _watch(self, ride: Ride, job: RqJob, execution: Execution) -> None:
        """Return once the horse has answered or died. Each look takes GLANCE s, and no SQL."""
        next_report = clock.monotonic() + self.job_monitoring_interval
        while True:
            ride.answer = ride.horse.wait(GLANCE)
            if ride.answer is not None or ride.horse.is_dead:
                break
            vitals.sign()
            ride.beat()
            self._cut_off(ride, job)
            if clock.monotonic() >= next_report:
                next_report = clock.monotonic() + self.job_monitoring_interval
                self.maintain_heartbeats(job, execution)

    # ---- a horse of its own, for RQ jobs that are not ours

    def fork_work_horse(self, job: RqJob, queue: Queue) -> None:
        owner, sheet = clock.token(), Sheet()
        runner.host = HorseHost(owner=owner, rq_id=job.id, sheet=sheet)
        super().fork_work_horse(job, queue)
        runner.host = runner.Host()
        self._ride = Ride(owner, Horse(self.horse_pid, sheet), clock.monotonic())

    def main_work_horse(self, job: RqJob, queue: Queue) -> None:
        self._close_family()
        super().main_work_horse(job, queue)

    def monitor_work_horse(self, job: RqJob, queue: Queue, execution: Execution) -> None:
        """Watch the horse until it is gone; then bury what it has left open."""
        ride = cast(Ride, self._ride)  # set by the fork
        job.started_at = now()
        self._watch(ride, job, execution)
        ride.rest()
        ride.left = ride.running
        ride.horse.close()
        self._horse_pid, self._ride = 0, None
        self.executions.pop(execution.id, None)
        if ride.horse.status != os.EX_OK or ride.left:
            self._bury_rider(ride, job, Entry(job, queue, execution))

    # ---- in a horse

    def _become_horse(self) -> Perform:
        self._close_family()
        clock.reseed()
        self.setup_work_horse_signals()
        self._is_horse = True
        self.log_result_lifespan = False
        os.environ["RQ_WORKER_ID"] = self.name
        self._is_warm = True
        return self._perform

    def _close_family(self) -> None:
        """Close what would keep the parent's other children waiting for us."""
        if self._coordinator is not None:
            os.close(self._coordinator[1])  # or the coordinator would outlive its parent in us
        if self._horse is not None:
            self._horse.close()

    def setup_work_horse_signals(self) -> None:
        super().setup_work_horse_signals()
        # Between two functions a SIGTERM is remembered, so that no settle is cut in half.
        signal.signal(signal.SIGTERM, interrupts.note_shutdown)

    def _perform(self, order: Order) -> str | None:
        """Run one order as RQ performs a job; the parent keeps the books."""
        job = self._job_of(order.rq_id)
        job.data, job.origin, job.timeout = order.data, order.queue, order.timeout
        queue = next(q for q in self.queues if q.name == order.queue)
        execution = Execution(order.execution_id, order.rq_id, self.connection, self.name)
        execution._job = job
        self.executions = {execution.id: execution}
        self._raised = None
        self.perform_job(job, queue, execution)
        self.procline("Horse without an order")
        return self._raised

    def prepare_job_execution(self, job: RqJob, *args: Any, **kwargs: Any) -> None:
        if not self._is_warm:
            # Whatever the number of queues, ``Till`` puts messages there.
            super().prepare_job_execution(job, remove_from_intermediate_queue=True)
            return
        self.procline(f"Processing {job.func_name} from {job.origin} since {_moment()}")

    def handle_execution_ended(self, job: RqJob, queue: Queue, heartbeat_ttl: int) -> None:
        if not self._is_warm:
            super().handle_execution_ended(job, queue, heartbeat_ttl)
            return
        job.ended_at = now()

    def handle_job_success(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_warm:
            super().handle_job_success(*args, **kwargs)

    def handle_exception(self, job: RqJob, *exc_info: Any) -> None:
        if self._is_warm:
            with suppress(NoSuchJobError), self._without_redis():
                job.refresh()  # handlers may look at all of it
        super().handle_exception(job, *exc_info)

    def handle_job_failure(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_warm:
            super().handle_job_failure(*args, **kwargs)
            return
        text: str = kwargs["exc_string"]
        self._raised = text.encode(errors="replace")[-MOST_RAISED:].decode(errors="ignore")

    # ---- when one must end

    def _cut_off(self, ride: Ride, job: RqJob) -> None:
        """End a horse that has lost its lease, ran out of time, or stands in a shutdown's way."""
        moment = clock.monotonic()
        if ride.heart is not None and ride.heart.lost.is_set():
            self.kill_horse(signal.SIGKILL)
        elif ride.deadline is not None and moment >= ride.deadline:
            ride.killed = ride.killed or "timeout"
            self.kill_horse(signal.SIGKILL)
        elif (
            not ride.running  # else its own time-out counts, which a person may have changed
            and job.timeout != -1
            and moment >= ride.begun + (job.timeout or Queue.DEFAULT_TIMEOUT) + RQ_GRACE
        ):
            self.kill_horse(signal.SIGKILL)  # it hangs outside of any attempt
        elif self._interrupt_at is not None and moment >= self._interrupt_at:
            if ride.term_sent is None:
                ride.term_sent = moment
                self._signal_horse(ride, signal.SIGTERM)
            elif moment >= ride.term_sent + conf.get().TIMEOUT_GRACE:
                ride.killed = ride.killed or "shutdown"
                self.kill_horse(signal.SIGKILL)

    def _signal_horse(self, ride: Ride, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(ride.horse.pid, signum)

    def _bury(self, ride: Ride, rq_ids: list[str]) -> None:
        """End the attempts that the dead horse has left open: we have reaped it, so it is dead."""
        try:
            controls.current()
            with counters.gathering():
                self._end_all(ride)
            # Rows that it had not claimed yet have no message now.
            lifecycle.mark_unsent([dispatch.id_as_sent(rq_id) for rq_id in rq_ids])
            coordinator.Coordinator().hand_over([q.name for q in self.queues])
        except (DatabaseError, InterfaceError) as error:
            self.log.error(
                "Worker %s: the dead horse's attempts are left to the coordinator: %s",
                self.name,
                error,
            )
        finally:
            connections.close_all()

    def _end_all(self, ride: Ride) -> None:
        """
        End what the horse has left open; a row that somebody has locked, a little later.

        After BURIAL seconds the coordinator has to, and that not before the lease's end.
        """
        until = clock.monotonic() + BURIAL
        while not self._end_open(ride) and clock.monotonic() < until:
            clock.sleep(BURIAL_PAUSE)

    def _end_open(self, ride: Ride) -> bool:
        """End what can be ended now; return whether that was all."""
        ended = [
            self._bury_one(claim, ride.killed, innocent=ride.acquits(claim))
            for claim in lifecycle.claimed_by(ride.owner)
        ]
        return all(ended)

    def _bury_one(self, claim: Claim, killed: str, *, innocent: bool) -> bool:
        """
        End an attempt of a dead horse; return whether we did.

        ``innocent``: another row of its batch was running.
        """
        job = registry.find(claim.name)
        ending = _ending_of(killed, job.options if job else Options())
        if innocent:
            ending = Interrupted(reason=BATCH_DIED) if claim.began else None
        if ending is not None:
            status = runner.settle(claim, ending, execution.note_of(ending, None), job)
            if status is None:
                return False
            runner.tell_end(claim, ending, status, None)
        elif lost := lifecycle.bury(claim.fence, "lost: its process died"):
            coordinator.tell_lost(lost, "death")
        else:
            return False
        asides.freed(claim)
        if job is None or job.options.takes_lock:
            locks.release(claim.job_pk, claim.owner, cargo=[counters.payment()])
        else:
            counters.pay()
        return True

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
        # RQ raises StopRequested now, which logging swallows where the signal meets a log call.
        self._stop_requested = True
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
            if self._horse is not None:
                self._horse.close()
            _coordinate(reading, self.log)
        os.close(reading)
        self._coordinator = (pid, writing)

    def _end_coordinator(self) -> None:
        if self._coordinator is None:
            return
        pid, pipe = self._coordinator
        self._coordinator = None
        os.close(pipe)
        gone = Exit(pid)
        deadline = clock.monotonic() + conf.get().TICK + 2.0
        while (alive := os.waitpid(pid, os.WNOHANG) == (0, 0)) and clock.monotonic() < deadline:
            gone.wait(conf.get().TICK + 2.0)
        gone.close()
        if alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _moment() -> str:
    """Return the time of day in UTC, for what ``ps`` shows."""
    return f"{clock.utcnow():%H:%M:%S}"


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

    if cache.is_on():
        clock.start(lambda: invalidation.follow_controls(lambda: False), name="dedupjobs-controls")
    try:
        Coordinator().run(parent_is_gone)
    except BaseException:
        log.exception("The coordinator has ended")
        os._exit(1)
    os._exit(0)
