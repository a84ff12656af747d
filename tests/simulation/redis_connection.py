"""
A connection of redis-py whose server is the model of the world that is on stage.

The clients above it (locks, dispatch, stats, RQ itself) run unchanged. Each exchange is a point
where the world may switch, crash, or lose the request or the reply.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from redis import Connection, ConnectionPool
from redis.exceptions import ResponseError

from tests.simulation import stage

HOST = "simulated"


class _Wire:
    """Stands where the socket would be."""

    def gettimeout(self) -> None: ...

    def settimeout(self, seconds: float | None) -> None: ...

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


class SimulatedConnection(Connection):
    """Hands commands over as they are, without packing, and keeps the replies."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._replies: deque[Any] = deque()

    def _connect(self) -> Any:
        return _Wire()

    def on_connect_check_health(self, check_health: bool = True) -> None:
        self._replies.clear()

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return False

    def pack_command(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args]

    def pack_commands(self, commands: Any) -> list[tuple[Any, ...]]:
        return [tuple(command) for command in commands]

    def send_command(self, *args: Any, **kwargs: Any) -> None:
        self.send_packed_command([args])

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is None:
            self.connect()
        try:
            self._replies.extend(stage.exchange(int(self.db or 0), command))
        except BaseException:
            self.disconnect()
            raise

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        reply = self._replies.popleft()
        if isinstance(reply, ResponseError):
            raise reply
        if isinstance(reply, Exception):  # the reply was lost on its way
            self.disconnect()
            raise reply
        return reply


def pool(db: int) -> ConnectionPool:
    """Return a pool of connections to the model's database ``db``."""
    return ConnectionPool(
        connection_class=SimulatedConnection, host=HOST, port=6379, db=db, protocol=2
    )
