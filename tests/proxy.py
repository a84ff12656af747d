"""A TCP proxy that misbehaves on demand, between a client and a real server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Self

from tests.waiting import until

HOST = "127.0.0.1"
CHUNK = 65536


class Mode(Enum):
    """What happens to bytes: forwarded, or taken and never answered."""

    PASS = auto()
    BLACK_HOLE = auto()


class Proxy:
    """Listen on `port` and forward to `target_port`, both on the loopback, until closed.

    Switches act on connections that are open already, except `refuse`, which bars new ones.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.swallowed = threading.Event()
        self._mode = Mode.PASS
        self._delay = 0.0
        self._marker = b""
        self._loses = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._acceptor = threading.Thread()
        self.port = 0
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def pass_through(self) -> None:
        """Forward everything again, at once; a request that a black hole took stays lost."""
        self._mode = Mode.PASS
        self._delay = 0.0
        self._marker = b""
        if self._listener is None:
            until(self._listens_again, what=f"port {self.port} is free again")

    def refuse(self) -> None:
        """Refuse new connections."""
        self._stop_listening()

    def black_hole(self) -> None:
        """Accept connections and requests, and never answer."""
        self._mode = Mode.BLACK_HOLE

    def delay(self, seconds: float) -> None:
        """Hold each piece of a reply back for `seconds`."""
        self._delay = seconds

    def swallow_reply_to(self, marker: bytes) -> None:
        """Let the next request that contains `marker` reach the server, and lose its reply.

        The client sees its connection cut once the server has answered; `swallowed` is set then.
        The client must write the marker in one piece.
        """
        self.swallowed.clear()
        self._marker, self._loses = marker, False

    def lose_request(self, marker: bytes) -> None:
        """Let the next request that contains `marker` not reach the server, and cut its line."""
        self._marker, self._loses = marker, True

    def cut(self) -> None:
        """Cut all connections that are open now."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()

    def close(self) -> None:
        """Cut everything, and return when every thread has ended."""
        self._closed.set()
        self._stop_listening()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        listener = socket.create_server((HOST, self.port))
        self.port = listener.getsockname()[1]
        listener.settimeout(0.1)  # not every system wakes accept() when its socket is closed
        self._listener = listener
        self._acceptor = self._in_thread(self._accept, listener)

    def _listens_again(self) -> bool:
        with suppress(OSError):
            self._listen()
        return self._listener is not None

    def _stop_listening(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            self._acceptor.join()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            link = _Link(client)
            with self._lock:
                self._links.add(link)
            self._in_thread(self._serve, link)

    def _serve(self, link: _Link) -> None:
        """Carry requests; the replies have a thread of their own."""
        with suppress(OSError):
            link.server = server = socket.create_connection((HOST, self.target_port))
            replies = self._in_thread(self._carry_replies, link, server)
            self._carry_requests(link, server)
            replies.join()
        link.close()
        with self._lock:
            self._links.discard(link)

    def _carry_requests(self, link: _Link, server: socket.socket) -> None:
        with suppress(OSError):
            while data := link.client.recv(CHUNK):
                if self._mode is Mode.BLACK_HOLE:
                    continue
                if self._takes_marker(data):
                    if self._loses:
                        break
                    link.swallows = True
                server.sendall(data)
        link.cut()

    def _takes_marker(self, data: bytes) -> bool:
        with self._lock:
            found = bool(self._marker) and self._marker in data
            if found:
                self._marker = b""
            return found

    def _carry_replies(self, link: _Link, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK):
                if link.swallows:
                    self.swallowed.set()
                    break
                self._closed.wait(self._delay)
                if self._mode is Mode.PASS:
                    link.client.sendall(data)
        link.cut()

    def _in_thread(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


class _Link:
    """One client's connection and its counterpart to the server."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.swallows = False

    def cut(self) -> None:
        """End both directions; whoever waits in recv() wakes up."""
        for sock in self._sockets():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets():
            sock.close()

    def _sockets(self) -> list[socket.socket]:
        return [self.client] if self.server is None else [self.client, self.server]
