"""What each kind of fault does to the world, or to the actor that has reached its point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redis.exceptions import ConnectionError as RedisConnectionError

from dedupjobs.exceptions import ShutdownReached, TimeoutReached
from tests.simulation.baton import Actor, Died
from tests.simulation.faults import Fault

if TYPE_CHECKING:
    from tests.simulation.world import World

QUEUE = "rq:queue:default"


class ReplyLost(Exception):
    """Redis did what it was asked, and nobody heard."""


class CommitLost(Exception):
    """The transaction was not committed."""


class CommitReplyLost(Exception):
    """The transaction was committed, and nobody heard."""


def happen(world: World, fault: Fault, actor: Actor) -> None:
    """Let a fault happen; it may raise into the actor."""
    in_heart = actor.name != actor.process.name
    if in_heart or fault.kind in ("pause", "stall", "process clock jumps"):
        actor.process.troubled = True
    if fault.kind in ("pause", "stall") and world.writer is not None:
        world.troubled = True
    if fault.kind in RAISED:
        raise RAISED[fault.kind]()
    HAPPENINGS[fault.kind](world, actor, fault.amount)


RAISED: dict[str, Callable[[], BaseException]] = {
    "die": Died,
    "lose request": lambda: RedisConnectionError("simulated: the request was lost"),
    "lose reply": ReplyLost,
    "lose commit": CommitLost,
    "lose commit's reply": CommitReplyLost,
    "shut down": lambda: ShutdownReached("simulated: the worker got SIGTERM"),
    "time out": lambda: TimeoutReached("simulated: ran too long"),
}


def _pause(world: World, actor: Actor, amount: int) -> None:
    actor.process.paused_until = world.after(amount / 1000)
    world.switch(actor)


def _stall(world: World, actor: Actor, amount: int) -> None:
    actor.stalled_until = world.after(amount / 1000)
    world.switch(actor)


def _flush(world: World, actor: Actor, amount: int) -> None:
    world.redis.execute(0, ("FLUSHALL",))


def _database_clock(world: World, actor: Actor, amount: int) -> None:
    world.observer.jumped()  # the moment before counts as well
    world.db_skew += amount
    world.jumps += max(-amount, 0)
    world.observer.jumped()


def _process_clock(world: World, actor: Actor, amount: int) -> None:
    actor.process.skew += amount


def _double(world: World, actor: Actor, amount: int) -> None:
    if message := _any_message(world):
        world.redis.execute(0, ("RPUSH", QUEUE, message))


def _lose(world: World, actor: Actor, amount: int) -> None:
    if message := _any_message(world):
        world.redis.execute(0, ("LREM", QUEUE, 1, message))


def _reorder(world: World, actor: Actor, amount: int) -> None:
    world.chance.shuffle(world.redis.peek(0, QUEUE) or [])


def _any_message(world: World) -> bytes | None:
    queue: list[bytes] = world.redis.peek(0, QUEUE) or []
    return queue[int(world.chance.random() * len(queue))] if queue else None


HAPPENINGS: dict[str, Callable[[World, Actor, int], None]] = {
    "crash": lambda world, actor, amount: world.crash(actor),
    "pause": _pause,
    "stall": _stall,
    "flush": _flush,
    "database clock jumps": _database_clock,
    "process clock jumps": _process_clock,
    "double": _double,
    "reorder": _reorder,
    "lose message": _lose,
}
