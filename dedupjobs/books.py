"""
RQ's books of our own deliveries, kept in few round trips.

RQ writes what its own tools read (who works on what, since when, how it ended) in some twenty
round trips a job, most of them heartbeats one command long. The same facts are written here in one
transaction a delivery: the end of the last one and the beginning of this one, while it runs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import NoPermissionError, ResponseError
from rq import Queue, Worker
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.results import Result
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import as_text, now, utcformat

from dedupjobs import clock, dispatch

PLAIN = frozenset(
    b"status created_at data started_at ended_at last_heartbeat worker_name origin description "
    b"enqueued_at timeout result_ttl failure_ttl ttl".split()
)
"""Fields of a message that a delivery needs; callbacks, retries and the like are not ours."""

FITTING = 0.5  # seconds that messages which are taken together should take
LONGEST = 128 * 1024  # bytes of a delivery's call, of MOST_ROWS rows, and then some
JOB_PREFIX = RqJob.redis_job_namespace_prefix

# KEYS: queue, its intermediate list, the next queue, … ARGV[1]: how keys of RQ's jobs begin.
# ARGV[2]: what exists while all workers are suspended; then it answers 1 and takes nothing.
# Moves the first id that has a job to its intermediate list; answers {queue, id, the job's hash,
# others}, or nothing. RQ pops, then reads, and on several queues keeps no intermediate list.
# ARGV[3], ARGV[4]: a description, and how many messages with it may be taken together; others:
# {id, hash} of those that stand directly behind the first one.
TAKE = """
if redis.call('EXISTS', ARGV[2]) == 1 then return 1 end
for i = 1, #KEYS, 2 do
  while true do
    local id = redis.call('LMOVE', KEYS[i], KEYS[i + 1], 'LEFT', 'RIGHT')
    if not id then break end
    local job = redis.pcall('HGETALL', ARGV[1] .. id)
    if not job.err and #job > 0 then
      local others = {}
      local function described(key) return redis.pcall('HGET', key, 'description') end
      while #others + 1 < tonumber(ARGV[4]) and described(ARGV[1] .. id) == ARGV[3] do
        local next = redis.call('LINDEX', KEYS[i], 0)
        if not next or described(ARGV[1] .. next) ~= ARGV[3] then break end
        redis.call('LMOVE', KEYS[i], KEYS[i + 1], 'LEFT', 'RIGHT')
        others[#others + 1] = {next, redis.call('HGETALL', ARGV[1] .. next)}
      end
      return {KEYS[i], id, job, others}
    end
    redis.call('LREM', KEYS[i + 1], 1, id)
  end
end
return false
"""


# ARGV[1]: commands, as a JSON list of lists of words. Runs them all, as a transaction does; answers
# how many members each SMEMBERS has found. One text to pack and one answer to read cost the worker
# a quarter of what some twenty commands do.
WRITE = """
local found, failed = {}, nil
for _, words in ipairs(cjson.decode(ARGV[1])) do
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err then
    failed = reply.err
  elseif words[1] == 'SMEMBERS' then
    found[#found + 1] = #reply
  end
end
if failed then return redis.error_reply(failed) end
return found
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that was taken from a queue, with its hash as it stands in Redis."""

    queue: Queue
    rq_id: str
    raw: dict[bytes, bytes]
    data: bytes = b""
    is_ours: bool = False
    others: tuple[Taken, ...] = ()  # messages that are run together with this one

    @classmethod
    def of(cls, queue: Queue, rq_id: str, raw: dict[bytes, bytes]) -> Taken:
        """Look whether it is a delivery as ``dispatch`` writes it, with none of RQ's extras."""
        data = _data(raw)
        ours = _names_our_entry(data) and not any(raw[f] for f in raw.keys() - PLAIN)
        return cls(queue, rq_id, raw, data, ours and _number(raw, b"result_ttl") > 0)

    @property
    def timeout(self) -> int:
        """RQ's time-out in seconds, of all that are run together; -1 for none."""
        own = _number(self.raw, b"timeout") or Queue.DEFAULT_TIMEOUT
        parts = [own, *(other.timeout for other in self.others)]
        return -1 if -1 in parts else sum(parts)

    @property
    def description(self) -> str:
        """What it says of itself; anybody may have written that."""
        return self.raw.get(b"description", b"").decode(errors="replace")

    @property
    def is_single(self) -> bool:
        """Whether it is a delivery of ours that names one row."""
        return self.is_ours and isinstance(self.rows, list) and len(self.rows) == 1

    @property
    def rows(self) -> list[Any]:
        """What the message names, whatever that is."""
        return cast(list[Any], json.loads(self.data)[2][0])

    @property
    def call(self) -> bytes:
        """The call that runs this message, and those that were taken with it."""
        if not self.others:
            return self.data
        rows = [row for taken in (self, *self.others) for row in taken.rows]
        return json.dumps([dispatch.BATCH_ENTRY, None, [rows], {}]).encode()


def _number(raw: dict[bytes, bytes], name: bytes) -> int:
    text = raw.get(name, b"")
    return int(text) if text.removeprefix(b"-").isdigit() else 0


def _data(raw: dict[bytes, bytes]) -> bytes:
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(raw.get(b"data", b""), LONGEST)
    except zlib.error:
        return b""
    return b"" if reader.unconsumed_tail else data


def _names_our_entry(data: bytes) -> bool:
    try:
        call = json.loads(data)
    except (ValueError, RecursionError):
        return False
    # As RQ writes a call: function, instance, arguments, keywords.
    ours = isinstance(call, list) and call[1:2] == [None] and call[0] in dispatch.ENTRIES
    return ours and isinstance(call[2], list) and call[3:] == [{}]


@dataclass(slots=True)
class Pace:
    """
    How many messages are worth taking at once, by how long the last ones took.

    Short jobs come together, the more the shorter they are; long ones are left to other workers.
    """

    description: str = ""
    together: int = 1

    def note(self, description: str, rows: int, seconds: float, *, most: int, least: int) -> None:
        """
        Learn from a delivery of so many rows: the next may be twice as long, or has to be shorter.
        """
        fitting = int(FITTING / max(seconds / rows, FITTING / most))
        grown = 2 * rows if description == self.description else 1
        self.description, self.together = description, max(min(grown, fitting, most), least)


class Till:
    """Takes messages, a round trip each."""

    def __init__(self, connection: Redis) -> None:
        self._script: Any = connection.register_script(TAKE)
        self.works = True
        self.is_closed = False  # it has seen that workers are suspended

    def take(self, queues: Iterable[Queue], pace: Pace | None = None) -> Taken | None:
        """Return the first message, if there is one, and others like it; raises RedisError."""
        pace = pace or Pace()
        if not self.works:
            return None
        by_key = {queue.key: queue for queue in queues}
        keys = [key for q in by_key.values() for key in (q.key, q.intermediate_queue_key)]
        try:
            words = [JOB_PREFIX, WORKERS_SUSPENDED, pace.description, pace.together]
            found = self._script(keys=keys, args=words)
        except ResponseError as error:
            if not _is_unable(error):  # full, or read-only: it will be well again
                raise
            self.works = False
            return None
        self.is_closed = isinstance(found, int)
        if not isinstance(found, list):
            return None
        key, rq_id, flat, others = found
        queue = by_key[as_text(key)]
        first = Taken.of(queue, as_text(rq_id), _hash(flat))
        behind = [Taken.of(queue, as_text(other), _hash(its)) for other, its in others]
        if behind and not all(taken.is_single for taken in (first, *behind)):
            self._put_back(queue, behind)  # somebody else has described his own so
            behind = []
        return replace(first, others=tuple(behind))

    def _put_back(self, queue: Queue, taken: list[Taken]) -> None:
        pipeline = queue.connection.pipeline()
        for one in reversed(taken):
            pipeline.lrem(queue.intermediate_queue_key, 1, one.rq_id)
            pipeline.lpush(queue.key, one.rq_id)
        pipeline.execute()


def _hash(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _word(part: Any) -> str:
    """Return a part of a command as redis-py would send it, as text."""
    if isinstance(part, str):
        return part
    return part.decode() if isinstance(part, bytes) else str(part)


def _is_unable(error: ResponseError) -> bool:
    """Tell whether the server is too old, or lets us run no such scripts."""
    text = str(error).lower()
    return isinstance(error, NoPermissionError) or "unknown" in text or "undeclared" in text


@dataclass(frozen=True, slots=True)
class Entry:
    """A delivery of ours in RQ's books: who works on what, and for what queue."""

    job: RqJob
    queue: Queue
    execution: Execution
    others: tuple[str, ...] = ()  # ids of messages that it runs, too, and that RQ forgets


class Books:
    """What RQ is to be told of this worker, kept until the next round trip."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._script: Any = worker.connection.register_script(WRITE)
        self._ended: list[tuple[Entry, datetime]] = []
        self._told = ""  # the worker's state as Redis has it

    def entry(self, job: RqJob, queue: Queue, others: tuple[str, ...] = ()) -> Entry:
        """Return what to begin: the job under a new execution."""
        worker = self._worker
        execution = Execution(clock.token(), job.id, worker.connection, worker.name)
        return Entry(job, queue, execution, others)

    def end(self, entry: Entry) -> None:
        """Note that the delivery was dealt with; written with the next one, or once idle."""
        self._ended.append((entry, now()))

    def tell(self, state: str, begun: Entry | None = None) -> None:
        """Write what is not written yet, in one transaction; raises RedisError."""
        if not self._ended and begun is None and state == self._told:
            return
        asked: list[tuple[int, Entry]] = []
        with self._worker.connection.pipeline() as pipeline:
            for entry, ended_at in self._ended:
                asked.append((len(pipeline), entry))
                self._write_end(entry, ended_at, pipeline)
            if begun is not None:
                self._write_begin(begun, pipeline)
            if state != self._told:
                pipeline.hset(self._worker.key, "state", state)
            try:
                found = self._execute(pipeline, [index for index, _ in asked])
            except ResponseError:
                self._ended = []  # it would be refused again
                raise
        self._ended, self._told = [], state
        for (_, entry), dependents in zip(asked, found, strict=True):
            if dependents:
                entry.queue.enqueue_dependents(entry.job)

    def _execute(self, pipeline: Pipeline, asked: list[int]) -> list[Any]:
        """Run what RQ has put into the pipeline; return what the ones asked for have found."""
        if self._script is not None:
            commands = [[_word(part) for part in args] for args, _ in pipeline.command_stack]
            try:
                return cast(list[Any], self._script(args=[json.dumps(commands)]))
            except ResponseError as error:
                if not _is_unable(error):
                    raise
                self._script = None
        found = pipeline.execute()
        return [found[index] for index in asked]

    def note_told(self, state: str) -> None:
        """Note that RQ's own code has written the state."""
        self._told = state

    def _write_begin(self, entry: Entry, pipeline: Pipeline) -> None:
        worker, job, execution = self._worker, entry.job, entry.execution
        ttl = worker.get_heartbeat_ttl(job)
        execution.save(ttl=ttl, pipeline=pipeline)
        ExecutionRegistry(job.id, pipeline).add(execution=execution, ttl=ttl, pipeline=pipeline)
        entry.queue.started_job_registry.add_execution(execution, pipeline=pipeline, ttl=ttl)
        pipeline.sadd(execution.worker_executions_key, execution.composite_key)
        pipeline.expire(execution.worker_executions_key, ttl + 60)
        job.prepare_for_execution(worker.name, pipeline=pipeline)
        pipeline.persist(job.key)
        pipeline.lrem(entry.queue.intermediate_queue_key, 1, job.id)
        for other in entry.others:
            pipeline.lrem(entry.queue.intermediate_queue_key, 1, other)
            pipeline.delete(f"{JOB_PREFIX}{other}")

    def _write_end(self, entry: Entry, ended_at: datetime, pipeline: Pipeline) -> None:
        """Ask for dependents, then write that the job has succeeded."""
        worker, job, execution = self._worker, entry.job, entry.execution
        ttl = job.get_result_ttl(worker.default_result_ttl)
        pipeline.smembers(job.dependents_key)
        worker.increment_successful_job_count(pipeline=pipeline)
        worker.increment_total_working_time(ended_at - execution.created_at, pipeline)
        ended = {"status": JobStatus.FINISHED.value, "ended_at": utcformat(ended_at)}
        pipeline.hset(job.key, mapping=cast(Any, ended))
        Result.create(
            job,
            Result.Type.SUCCESSFUL,
            ttl,
            worker_name=worker.name,
            pipeline=pipeline,
            execution_id=execution.id,
            execution_started_at=execution.created_at,
            execution_ended_at=ended_at,
        )
        entry.queue.finished_job_registry.add(job, ttl, pipeline)
        pipeline.expire(job.key, ttl)
        pipeline.expire(job.dependents_key, ttl)
        execution.delete(job=job, pipeline=pipeline)
