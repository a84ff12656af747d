"""
Several independent Redis servers, asked at the same time: the transport of locks by a majority.

    write    the commands to each server, then read the answers as they come; no thread per server
    enough   whoever asks says when the answers decide: nobody waits for a slow minority
    owed     replies that nobody has waited for; they are skipped when the connection is used again
    away     a server that has owed a reply for TIMEOUT, or can not be connected to: it is left out
             at once, and a thread tries to connect once per second until it is back

A question, with all that it has to connect to, takes ``timeout`` seconds at the most.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from dedupjobs import clock

AGAIN = 1.0  # seconds between two tries to connect to a server that is away

Answer = list[Any] | Exception | None
"""One server's replies, errors among them; or why it has none; None: it may still answer."""
Commands = Callable[[Any], None]
"""Adds commands to a pipeline of redis-py."""


class Line:
    """A connection to one server, and the replies on it that nobody has waited for."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.replies: list[Any] = []
        self._wanted = 0
        self._sent = 0.0
        self._owed: deque[list[float]] = deque()  # when it was asked, how many have not come

    @property
    def fileno(self) -> int:
        return int(self.connection._sock.fileno())

    @property
    def is_open(self) -> bool:
        return self.connection._sock is not None

    @property
    def is_done(self) -> bool:
        """Whether all replies to what was sent last are there."""
        return not self._owed and len(self.replies) == self._wanted

    @property
    def late(self) -> float:
        """For how many seconds it owes a reply."""
        return clock.monotonic() - self._owed[0][0] if self._owed else 0.0

    def send(self, packed: Sequence[bytes], wanted: int, *, within: float) -> None:
        """Write commands of which ``wanted`` replies are to come; raises RedisError."""
        self.replies, self._wanted, self._sent = [], wanted, clock.monotonic()
        self.connection._sock.settimeout(within)
        self.connection.send_packed_command(packed, check_health=False)

    def read(self, *, within: float) -> None:
        """Read one reply, and what else is there; raises RedisError."""
        while not self.is_done:
            self.connection._sock.settimeout(within)
            reply = self._reply()
            if self._owed:
                self._skip()
            else:
                self.replies.append(reply)
            if self.is_done or not self.connection.can_read():
                return

    def rest(self) -> None:
        """Wait no longer: what comes from now on is skipped."""
        if left := self._wanted - len(self.replies):
            self._owed.append([self._sent, left])
        self.replies, self._wanted = [], 0

    def is_fit(self) -> bool:
        """Skip what came meanwhile; False: the server has closed the connection."""
        try:
            while self.connection.can_read():
                self._reply()
                self._skip()
        except (RedisError, OSError, IndexError):  # IndexError: nobody has asked for that
            return False
        return True

    def _reply(self) -> Any:
        try:
            return self.connection.read_response()
        except RedisError as error:
            if not self.is_open:
                raise
            return error  # that of one command

    def _skip(self) -> None:
        self._owed[0][1] -= 1
        if not self._owed[0][1]:
            self._owed.popleft()


class Server:
    """One of the servers. ``trouble``: why it is left out at present; None: it is not."""

    def __init__(self, name: str, client_of: Callable[[str], Redis], *, timeout: float) -> None:
        self.name = name
        self.trouble: Exception | None = None
        self.made = 0  # connections, ever
        self._client_of = client_of
        self._client: Redis | None = None
        self._timeout = timeout
        self._idle: deque[Line] = deque()
        self._again = -math.inf
        self._connecting = False
        self._changed = threading.Condition()

    @property
    def client(self) -> Redis:
        """Its client; raises what a cache raises that is no Redis."""
        self._client = self._client or self._client_of(self.name)
        return self._client

    def line(self) -> Line | None:
        """Return a connection that nobody uses; None: there is none, or the server is away."""
        while self.trouble is None and self._idle:
            try:
                line = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if line.is_fit():
                if line.late <= self._timeout:
                    return line
                self.fail(RedisTimeout(f"{self.name} owes a reply for {line.late:.2g} s"))
            line.connection.disconnect()
        return None

    def line_by(self, deadline: float, *, made: int) -> Line | None:
        """
        As ``line``, but wait until then for one that is being made.

        ``made``: how many had been made when the question began. Where there are more by now, the
        server is well, and other threads were faster.
        """
        while (line := self.line()) is None and self.trouble is None:
            self.connect()
            if not self._wait(deadline):
                if self.made == made:
                    self.fail(RedisTimeout(f"{self.name} can not be connected to in time"))
                break
        return line

    @property
    def why_no_line(self) -> str:
        if self.trouble is None:
            return f"{self.name} has no connection for us in time"
        return f"{self.name} is away: {self.trouble}"

    def put_back(self, line: Line) -> None:
        """Take a connection that nobody uses now."""
        line.rest()
        self._idle.append(line)

    def fail(self, error: Exception) -> None:
        """Leave it out from now on, until it can be connected to."""
        self.trouble, self._again = error, clock.monotonic() + AGAIN

    def connect(self) -> None:
        """Let a thread connect, unless one does, or has just failed to."""
        with self._changed:
            if self._connecting or (self.trouble and clock.monotonic() < self._again):
                return
            self._connecting = True
        clock.start(self._connect, name=f"dedupjobs-locks-{self.name}")

    def _connect(self) -> None:
        try:
            line = self._connected()
        except Exception as error:  # whatever it is: this server has no vote
            self.fail(error)
        else:
            self._idle.append(line)
            self.made += 1
            self.trouble = None
        finally:
            with self._changed:
                self._connecting = False
                self._changed.notify_all()

    def _connected(self) -> Line:
        pool: Any = self.client.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        connection.send_command("PING")  # a stopped process still gets connections
        connection.read_response()
        return Line(connection)

    def _wait(self, deadline: float) -> bool:
        """Wait until nobody connects; False: somebody still does."""
        with self._changed:
            left = max(deadline - clock.monotonic(), 0)
            return self._changed.wait_for(lambda: not self._connecting, left)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().connection.disconnect()


class Quorum:
    """Servers that are asked together; the first one takes what is for one only."""

    def __init__(
        self, names: Sequence[str], client_of: Callable[[str], Redis], *, timeout: float
    ) -> None:
        self.names = names
        self.timeout = timeout
        self._client_of = client_of
        self._renew()

    def _renew(self) -> None:
        """Begin without connections: a forked child must not use its parent's."""
        self._pid = os.getpid()
        self.servers = [Server(name, self._client_of, timeout=self.timeout) for name in self.names]

    def ask(
        self,
        commands: Commands,
        *,
        enough: Callable[[list[Answer]], bool],
        extra: Commands | None = None,
    ) -> list[Answer]:
        """
        Send the same commands to all; return their answers, by server, once they are ``enough``.

        ``extra``: commands for the first server only, whose answer is then waited for, with these
        replies behind the others.
        """
        if self._pid != os.getpid():
            self._renew()
        question = _Question(self.servers, clock.monotonic(), self.timeout)
        if question.send(commands, extra):
            question.gather(lambda answers: answers[0] is not None and enough(answers))
        else:
            question.gather(enough)
        return question.leave()

    def close(self) -> None:
        """Close all connections that nobody uses."""
        if self._pid == os.getpid():
            for server in self.servers:
                server.close()


class _Question:
    """One question to all servers: their lines, and their answers so far."""

    def __init__(self, servers: Sequence[Server], begun: float, timeout: float) -> None:
        self._servers = servers
        self._deadline = begun + timeout
        made = [server.made for server in servers]
        for server in servers:
            if server.trouble:
                server.connect()
        lines = [server.line() for server in servers]
        for server, line in zip(servers, lines, strict=True):
            if line is None and server.trouble is None:
                server.connect()  # all at the same time; then they are waited for
        half = begun + timeout / 2
        self._lines = [
            line or server.line_by(half, made=number)
            for server, line, number in zip(servers, lines, made, strict=True)
        ]
        self._answers: list[Answer] = [
            None if line else RedisConnectionError(server.why_no_line)
            for server, line in zip(servers, self._lines, strict=True)
        ]

    def send(self, commands: Commands, extra: Commands | None) -> bool:
        """Write to each server what it is to do; return whether the first one is to do more."""
        at = next((at for at, line in enumerate(self._lines) if line), None)
        if at is None:
            return False
        pipe: Any = self._servers[at].client.pipeline(transaction=False)
        packer: Any = cast(Line, self._lines[at]).connection
        commands(pipe)
        number = len(pipe)
        packed = packer.pack_commands([args for args, _ in pipe.command_stack])
        if extra is not None:
            extra(pipe)
        first = packed
        if len(pipe) > number:
            first = packer.pack_commands([args for args, _ in pipe.command_stack])
        self._write(0, first, len(pipe))
        for at in range(1, len(self._servers)):
            self._write(at, packed, number)
        return len(pipe) > number

    def _write(self, at: int, packed: Sequence[bytes], wanted: int) -> None:
        if line := self._lines[at]:
            try:
                line.send(packed, wanted, within=self._left())
            except RedisError as error:
                self._fail(at, error)

    def gather(self, enough: Callable[[list[Answer]], bool]) -> None:
        """Read answers as they come, until they are enough or the time is over."""
        poller, waits = select.poll(), {}
        for at, line in enumerate(self._lines):
            if line and self._answers[at] is None:
                waits[line.fileno] = at
                poller.register(line.fileno, select.POLLIN)
        while waits and not enough(self._answers):
            left = max(self._deadline - clock.monotonic(), 0)
            ready = poller.poll(left * 1000)
            for fileno, _ in ready:
                self._read(waits[fileno])
                if self._answers[waits[fileno]] is not None:
                    poller.unregister(fileno)
                    del waits[fileno]
            if not ready:  # these have had all the time there is
                for at in waits.values():
                    self._fail(at, RedisTimeout(f"{self._servers[at].name} has not answered"))
                return

    def _read(self, at: int) -> None:
        line = self._lines[at]
        if line is not None:
            try:
                line.read(within=self._left())
            except RedisError as error:
                self._fail(at, error)
            else:
                self._answers[at] = list(line.replies) if line.is_done else None

    def _fail(self, at: int, error: Exception) -> None:
        self._answers[at] = error
        self._servers[at].fail(error)

    def _left(self) -> float:
        # A time-out of 0 would mean: do not even wait for what is there.
        return max(self._deadline - clock.monotonic(), 0.001)

    def leave(self) -> list[Answer]:
        """Give the connections back, and return the answers."""
        for server, line, answer in zip(self._servers, self._lines, self._answers, strict=True):
            if line is not None and line.is_open and not isinstance(answer, Exception):
                server.put_back(line)
            elif line is not None:
                line.connection.disconnect()
        return self._answers
