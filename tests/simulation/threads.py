"""Threads that are used again: starting one, and opening its connection, costs too much."""

from __future__ import annotations

import _thread
import threading
from typing import TYPE_CHECKING, Any

from django.db import connections

if TYPE_CHECKING:
    from tests.simulation.baton import Actor, Baton

main = _thread.allocate_lock()
"""Released to the main thread when a world is over, and once for each actor that ends then."""
main.acquire()

_idle: list[Thread] = []


class Thread:
    """Runs one actor at a time, whenever its baton is released."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.world: Baton | None = None
        self.actor: Actor | None = None
        self.wrapper: Any = None
        self.ended_well = True
        threading.Thread(target=self._loop, daemon=True).start()

    def give(self, world: Baton, actor: Actor) -> None:
        self.world, self.actor = world, actor

    def _loop(self) -> None:
        while True:
            self.baton.acquire()
            world, actor = self.world, self.actor
            assert world is not None
            assert actor is not None
            if actor.raising is None:
                self._play(world, actor)
            self._tidy()
            _idle.append(self)
            world.finish(actor)

    def _play(self, world: Baton, actor: Actor) -> None:
        from tests.simulation.baton import Died, Gone

        self.wrapper = connections["default"]
        self.ended_well = False
        try:
            actor.body()
            self.ended_well = True
        except Gone:
            pass
        except Died:
            self.wrapper._close()
            if actor.name == actor.process.name:
                world.died(actor.process)
        except BaseException as error:
            world.fail(f"{actor.name} raised {error!r}")
            world.errors.append(error)

    def _tidy(self) -> None:
        """Leave a connection that the next actor can use."""
        wrapper, self.wrapper = self.wrapper, None
        if wrapper is None:
            return
        wrapper._close()
        if not self.ended_well:
            del connections["default"]


def take() -> Thread:
    """Return a thread that has nothing to do."""
    return _idle.pop() if _idle else Thread()
