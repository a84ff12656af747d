"""Specimen jobs: small, and each shows one thing. They write what they did to the Ledger."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import connection

from dedupjobs import FOREVER, Cancel, Retry, Snooze, current_attempt, job
from tests.app.models import Ledger


def note(tag: str, text: str = "") -> None:
    Ledger.objects.create(tag=tag, note=text)


@job(key="record:{tag}", unique_for=FOREVER)
def record(*, tag: str, text: str = "") -> str:
    note(tag, text)
    return text


@job(key="again:{tag}", unique_for=None)
def record_again(*, tag: str, text: str = "") -> None:
    note(tag, text)


@job(key="window:{tag}", unique_for=timedelta(hours=1))
def record_hourly(*, tag: str) -> None:
    note(tag)


@job(key="brief:{tag}", unique_for=timedelta(seconds=2), timeout=2)
def record_briefly(*, tag: str) -> None:
    note(tag)


@job(key="text:{length}", unique_for=FOREVER)
def return_text(*, length: int) -> str:
    return "x" * length


@job(key=None)
def record_always(*, tag: str) -> None:
    note(tag)


@job(key="strict:{tag}", unique_for=FOREVER, on_conflict="raise")
def record_strict(*, tag: str) -> None:
    note(tag)


@job(key="lenient:{tag}", unique_for=FOREVER, on_mismatch="ignore")
def record_lenient(*, tag: str, text: str = "") -> None:
    note(tag, text)


@job(key="warning:{tag}", unique_for=FOREVER, on_mismatch="warn")
def record_warning(*, tag: str, text: str = "") -> None:
    note(tag, text)


@job(key="chosen:{tag}", unique_for=FOREVER, fingerprint=("tag",))
def record_by_fingerprint(*, tag: str, text: str = "") -> None:
    note(tag, text)


@job(key="tenant:{tag}", unique_for=FOREVER, scope="tenant")
def record_for_tenant(*, tenant: str, tag: str) -> None:
    note(tag, tenant)


@job(key="atomic:{tag}", unique_for=FOREVER, atomic=True, timeout=15)
def record_atomically(*, tag: str, fails: bool = False) -> None:
    note(tag)
    if fails:
        raise ValueError("after the effect")


@job(key="swallow:{tag}", unique_for=FOREVER, atomic=True, timeout=0.5, max_attempts=1)
def swallow_timeout_atomically(*, tag: str) -> None:
    note(tag)
    try:
        time.sleep(30)
    except BaseException:
        note(tag, "swallowed")


@job(key="fail:{tag}", unique_for=FOREVER, max_attempts=3, backoff=0.1)
def fail(*, tag: str, times: int = 1_000) -> None:
    """Fail the first ``times`` attempts."""
    note(tag, str(current_attempt().number))
    if current_attempt().number <= times:
        raise ValueError(f"attempt {current_attempt().number} of {tag}")


@job(key="failonce:{tag}", unique_for=FOREVER, max_attempts=1)
def fail_for_good(*, tag: str, text: str = "") -> None:
    raise ValueError(f"no luck with {tag}")


@job(key="block:{tag}", unique_for=FOREVER, max_attempts=1, on_dead="block")
def fail_and_block(*, tag: str) -> None:
    raise ValueError(f"no luck with {tag}")


@job(key="giveup:{tag}", unique_for=FOREVER, give_up_on=(KeyError,))
def give_up(*, tag: str) -> None:
    raise KeyError(tag)


@job(key="picky:{tag}", unique_for=FOREVER, retry_on=(OSError,))
def retry_on_os_errors(*, tag: str) -> None:
    raise ValueError(tag)


@job(key="wish:{tag}", unique_for=FOREVER)
def wish(*, tag: str, what: str) -> str:
    """Ask for ``what`` on the first attempt."""
    note(tag, what)
    if current_attempt().number == 1:
        raise {
            "retry": Retry("not yet", after=60),
            "snooze": Snooze(60, "not yet"),
            "cancel": Cancel("no need"),
        }[what]
    return what


@job(key="exit:{tag}", unique_for=FOREVER, max_attempts=1)
def leave(*, tag: str, how: str) -> None:
    """End other than by returning."""
    note(tag, how)
    if how == "os._exit":
        os._exit(3)
    raise {
        "sys.exit(0)": SystemExit(0),
        "sys.exit(1)": SystemExit(1),
        "GeneratorExit": GeneratorExit(),
        "BaseException": BaseException("base"),
    }[how]


@job(key="return:{tag}", unique_for=FOREVER)
def give_back(*, tag: str, what: str) -> Any:
    note(tag)
    return {
        "zero": 0,
        "none": None,
        "file": sys.stderr,
        "lambda": give_back.func,
        "generator": (n for n in ()),
        "huge": "x" * 100_000,
        "unprintable": _Unprintable(),
    }[what]


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@job(key="raise:{tag}", unique_for=FOREVER, max_attempts=1)
def raise_oddly(*, tag: str, what: str) -> None:
    if what == "nul":
        raise ValueError("a\x00b \ud800")
    if what == "str":
        raise _MuteError
    if what == "recursion":
        raise_oddly.func(tag=tag, what=what)
    if what == "group":
        raise ExceptionGroup("many", [ValueError("one"), KeyError("two")])
    if what == "huge":
        raise ValueError("x" * 5_000_000)


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


@job(key="async:{tag}", unique_for=FOREVER)
async def record_async(*, tag: str) -> str:
    return f"async {tag}"


@job(key="async fails:{tag}", unique_for=FOREVER, max_attempts=2, backoff=0.1)
async def fail_async(*, tag: str) -> None:
    raise ValueError(f"no luck with {tag}")


# ---- jobs that take time; ``release`` is a file whose appearance lets them go on


@job(key="wait:{tag}", unique_for=FOREVER, lease=2, timeout=60, backoff=0.1)
def wait(*, tag: str, release: str, checks: bool = False) -> str:
    note(tag, f"begin {current_attempt().number} {os.getpid()}")
    while not Path(release).exists():
        time.sleep(0.02)
        if checks:
            current_attempt().check()
    note(tag, f"end {current_attempt().number}")
    return "released"


@job(key="wait briefly:{tag}", unique_for=FOREVER, lease=2, timeout=5, max_attempts=1)
def wait_briefly(*, tag: str, release: str) -> None:
    wait.func(tag=tag, release=release)


@job(key="slow:{tag}", unique_for=FOREVER, lease=60, timeout=60, backoff=0.1)
def wait_with_long_lease(*, tag: str, release: str) -> None:
    wait.func(tag=tag, release=release)


@job(key="careful:{tag}", unique_for=FOREVER, lease=2, on_lost="hold")
def wait_carefully(*, tag: str, release: str) -> None:
    wait.func(tag=tag, release=release)


@job(key="pair:{tag}", unique_for=FOREVER, lease=2, timeout=60, concurrency=2)
def run_two_at_a_time(*, tag: str, release: str = "") -> None:
    note(tag, f"begin {current_attempt().number} {os.getpid()}")
    while release and not Path(release).exists():
        time.sleep(0.02)


@job(key="pair for a moment:{tag}", unique_for=FOREVER, lease=2, max_lost=50, concurrency=2)
def run_two_for_a_moment(*, tag: str) -> None:
    time.sleep(0.3)


@job(
    key="tenants:{tag}",
    unique_for=FOREVER,
    lease=2,
    timeout=60,
    concurrency=("tenant:{tenant}", 1),
)
def run_one_per_tenant(*, tag: str, tenant: int, release: str = "") -> None:
    run_two_at_a_time.func(tag=tag, release=release)


@job(key="grouped:{tag}", unique_for=FOREVER, concurrency="tenant:{tenant}")
def run_in_group(*, tag: str, tenant: int) -> None:
    note(tag)


# MySQL's SLEEP() would notice that its client is gone; other queries do not.
LONG_QUERY = {
    "postgresql": "SELECT PG_SLEEP(60)",
    "mysql": "SELECT BENCHMARK(100000000000, SHA1('a'))",
}


@job(key="hang:{tag}", unique_for=FOREVER, timeout=0.5, max_attempts=1)
def hang(*, tag: str, how: str) -> None:
    """Run into the time-out: in Python, in code that swallows, in SQL, or out of its reach."""
    note(tag, how)
    if how == "sleep":
        time.sleep(60)
    elif how == "swallow Exception":
        while True:
            try:
                time.sleep(0.05)
            except Exception:
                continue
    elif how == "sql":
        with connection.cursor() as cursor:
            cursor.execute(LONG_QUERY[connection.vendor])
    elif how == "signals masked":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
        time.sleep(60)


@job(key="gil:{tag}", unique_for=FOREVER, lease=1.5, timeout=60, max_attempts=1)
def hold_gil(*, tag: str, seconds: float) -> None:
    """Keep every other Python thread of this process out."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
    finally:
        sys.setswitchinterval(interval)
    note(tag, str(current_attempt().number))


@job(key="fork:{tag}", unique_for=FOREVER, lease=2)
def fork(*, tag: str, how: str) -> None:
    """Have children that end in their own ways, before this function does."""
    if how == "subprocess":
        subprocess.run([sys.executable, "-c", ""], check=True)
    else:
        pid = os.fork()
        if pid == 0:
            if how == "sys.exit":
                sys.exit(0)
            if how == "raise":
                raise ValueError("in the child")
            return
        os.waitpid(pid, 0)
    note(tag, "parent")


# ---- for process tests


@job(key="high:{tag}", unique_for=FOREVER, queue="high")
def record_high(*, tag: str) -> None:
    note(tag, "high")


@job(key="low:{tag}", unique_for=FOREVER, queue="low")
def record_low(*, tag: str) -> None:
    note(tag, "low")


@job(key="deaf:{tag}", unique_for=FOREVER, timeout=0.5, max_attempts=1)
def swallow_everything(*, tag: str) -> None:
    """Go on whatever is raised into this function."""
    note(tag, "begin")
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


@job(key="flaky:{tag}", unique_for=FOREVER, max_attempts=3, backoff=2)
def fail_once(*, tag: str) -> None:
    """Fail at first, and wait two seconds for the retry."""
    note(tag, str(current_attempt().number))
    if current_attempt().number == 1:
        raise ValueError(f"the first attempt of {tag}")


@job(key="watch:{tag}", unique_for=FOREVER, lease=2, timeout=60, max_attempts=1)
def report_progress(*, tag: str, release: str) -> None:
    """Say that 3 of 7 parts are done, over and over, until released."""
    note(tag, f"begin {current_attempt().number} {os.getpid()}")
    while not Path(release).exists():
        current_attempt().progress(3, 7, "halfway")
        time.sleep(0.02)


@job(key="stubborn:{tag}", unique_for=FOREVER, timeout=60)
def swallow_shutdown(*, tag: str) -> None:
    """Go on whatever is raised into this function, within its time-out."""
    swallow_everything.func(tag=tag)


# ---- policies


@job(key="rerun:{tag}", unique_for=FOREVER, on_conflict="rerun", backoff=0.1, max_attempts=2)
def rerun(*, tag: str, text: str = "", release: str = "", fails: int = 0) -> str:
    note(tag, text)
    while release and not Path(release).exists():
        time.sleep(0.02)
    if current_attempt().number <= fails:
        raise ValueError(text)
    return text


@job(key="replace:{tag}", unique_for=None, on_conflict="replace")
def replace(*, tag: str, text: str = "") -> str:
    note(tag, text)
    return text


@job(key="debounce:{tag}", unique_for=None, debounce=0.4, max_wait=1.2)
def debounced(*, tag: str, text: str = "") -> str:
    note(tag, text)
    return text


def note_generation(*, tag: str, text: str = "") -> str:
    """Note what ran, and in which generation."""
    note(tag, f"{text}{current_attempt().job.generation}")
    return text


CONFLICTS: dict[str, dict[str, Any]] = {
    "return": {},
    "raise": {"on_conflict": "raise"},
    "replace": {"on_conflict": "replace"},
    "rerun": {"on_conflict": "rerun"},
    "debounce": {"debounce": 60, "max_wait": 600},
}
WINDOWS = {"forever": FOREVER, "window": timedelta(hours=1), "active": None}

MATRIX = {
    (conflict, on_dead, window): job(
        name=f"testapp.matrix_{conflict}_{on_dead}_{window}",
        key="matrix:{tag}",
        unique_for=unique_for,
        on_dead=on_dead,
        max_attempts=2,
        **options,
    )(note_generation)
    for conflict, options in CONFLICTS.items()
    for on_dead in ("reopen", "block")
    for window, unique_for in WINDOWS.items()
}
"""A job for each policy; they have nothing but their function in common."""

RACING = {
    conflict: job(
        name=f"testapp.racing_{conflict}",
        key="{tag}",
        namespace="racing",
        unique_for=None,
        on_mismatch="ignore",
        **(options if conflict != "raise" else {"on_conflict": "raise"}),
    )(note_generation)
    for conflict, options in CONFLICTS.items()
}
"""Jobs whose policies differ, and whose keys are the same."""


@job(key="last:{tag}", unique_for=None, on_conflict="rerun", backoff=0.1)
def keep_last(*, tag: str, text: str = "") -> str:
    note(tag, text)
    return text


@job(key="fragile:{tag}", unique_for=None, on_conflict="rerun", max_lost=1)
def keep_last_fragile(*, tag: str, text: str = "") -> None:
    """Die of the first loss."""
    note(tag, text)


@job(key="stays:{tag}", unique_for=None, on_conflict="rerun", max_lost=1, on_dead="block")
def keep_last_blocking(*, tag: str, text: str = "") -> None:
    """Die of the first loss, and stay dead until a person retries."""
    note(tag, text)


@job(key="person:{tag}", unique_for=None, on_conflict="rerun", on_lost="hold")
def keep_last_careful(*, tag: str, text: str = "") -> None:
    """Wait for a person after a loss."""
    note(tag, text)


@job(key="counts:{tag}", unique_for=None, on_conflict="rerun")
def count_news(*, tag: str) -> None:
    """Note how much there is in the ledger under "<tag>-news" now."""
    note(tag, str(Ledger.objects.filter(tag=f"{tag}-news").count()))


@job(key="patient:{tag}", unique_for=None, debounce=30, max_wait=60)
def debounced_slowly(*, tag: str, text: str = "") -> None:
    note(tag, text)


@job(key="falsy:{tag}", unique_for=FOREVER)
def give_falsy(*, tag: str, what: int) -> Any:
    return FALSY[what]


FALSY: tuple[Any, ...] = (0, 0.0, "", [], {}, None, False)


@job(key="outlast:{tag}", unique_for=FOREVER, timeout=2, max_attempts=1)
def outlast_timeout(*, tag: str) -> str:
    """Run longer than the time-out."""
    note(tag, "begin")
    time.sleep(3)
    note(tag, "end")
    return "outlasted"


@job(key="shut:{tag}", unique_for=None, debounce=1)
def debounced_for_ever(*, tag: str, text: str = "") -> None:
    """Each call puts it off; nothing bounds that."""
    note(tag, text)


@job(key="outer:{tag}", unique_for=FOREVER)
def run_another(*, tag: str) -> Any:
    """Run another job within this one."""
    inner = record.run_now(tag=tag, text="inner").result()
    note(tag, f"outer {current_attempt().number}")
    return inner


@job(key="ctrl-c:{tag}", unique_for=FOREVER)
def interrupt_once(*, tag: str) -> None:
    note(tag, str(current_attempt().number))
    if current_attempt().number == 1:
        raise KeyboardInterrupt


@job(key="refused:{tag}", unique_for=FOREVER, max_attempts=1)
def break_query(*, tag: str) -> None:
    """Send what no database takes, without a savepoint."""
    note(tag)
    with connection.cursor() as cursor:
        cursor.execute("SELECT nonsense FROM nowhere")


@job(key="log:{tag}", unique_for=FOREVER)
def log_a_line(*, tag: str) -> None:
    """Write a log line of the job's own."""
    logging.getLogger("shop").warning("charging")


# ---- for batches: what ``acts`` has for a tag is done by the job, in the process of the test

acts: dict[str, Callable[[], Any]] = {}


def act(tag: str) -> str:
    note(tag, str(current_attempt().number))
    acts.get(tag, str)()
    return tag


@job(key="turn:{tag}", unique_for=FOREVER, lease=3, timeout=20, backoff=0.1, on_conflict="rerun")
def act_in_turn(*, tag: str, text: str = "") -> str:
    return act(tag)


@job(
    key="group:{tag}", unique_for=FOREVER, lease=3, timeout=20, backoff=0.1, on_conflict="rerun",
    batch="group",
)  # fmt: skip
def act_in_group(*, tag: str, text: str = "") -> str:
    return act(tag)


@job(
    key="together:{tag}", unique_for=FOREVER, lease=15, timeout=4, backoff=0.1, on_conflict="rerun",
    atomic=True,
)  # fmt: skip
def act_atomically(*, tag: str, text: str = "") -> str:
    return act(tag)


@job(key="nothing:{tag}", unique_for=FOREVER)
def do_nothing(*, tag: str) -> None: ...


@job(key="no group:{tag}", unique_for=FOREVER, batch="group")
def do_nothing_in_group(*, tag: str) -> None: ...


@job(key="alone:{tag}", unique_for=FOREVER, batch=False)
def record_alone(*, tag: str) -> None:
    note(tag)


@job(key="nap:{tag}", unique_for=FOREVER, lease=60, timeout=60, batch="group")
def wait_in_group(*, tag: str, release: str) -> None:
    wait.func(tag=tag, release=release)


@job(key="careful nap:{tag}", unique_for=FOREVER, lease=60, timeout=15, atomic=True)
def wait_atomically(*, tag: str, release: str) -> None:
    Path(f"{release}.begun").touch()  # nobody sees what it writes to the database
    wait.func(tag=tag, release=release)


# ---- without a lock, and not without


@job(key="free:{tag}", unique_for=FOREVER, concurrency_control="optimistic")
def record_freely(*, tag: str) -> None:
    note(tag)


@job(
    key="free wait:{tag}", unique_for=FOREVER, lease=1, timeout=30,
    concurrency_control="optimistic",
)  # fmt: skip
def wait_freely(*, tag: str, release: str) -> None:
    wait.func(tag=tag, release=release)


@job(key="free group:{tag}", unique_for=FOREVER, batch="group", concurrency_control="optimistic")
def record_freely_in_group(*, tag: str) -> None:
    note(tag)


@job(key="patient:{tag}", unique_for=FOREVER, on_redis_error="wait")
def record_if_locked(*, tag: str) -> None:
    note(tag)


@job(key="strict lock:{tag}", unique_for=FOREVER, on_redis_error="refuse", retry_on=())
def refuse_unlocked(*, tag: str) -> None:
    note(tag)
