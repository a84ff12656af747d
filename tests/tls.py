"""TLS in front of a server that speaks none, with an authority of its own."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

HOST = "127.0.0.1"


def certificate(home: Path, name: str = "server") -> tuple[Path, Path]:
    """Make a certificate for the loopback that signs itself; return it and its key."""
    made, key = home / f"{name}.pem", home / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST}"),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
    )
    return made, key


class Terminator:
    """Listen on ``port``, take TLS away, and forward to ``target_port``, until closed."""

    def __init__(self, target_port: int, made: Path, key: Path) -> None:
        self.target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(made, key)
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(raw)
            thread = threading.Thread(target=self._serve, args=(raw,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket) -> None:
        with (
            suppress(OSError),
            self._context.wrap_socket(raw, server_side=True) as client,
            socket.create_connection((HOST, self.target_port)) as server,
        ):
            self._open += [client, server]
            back = threading.Thread(target=_pump, args=(server, client))
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
