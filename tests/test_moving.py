"""Projects that move to dedupjobs, by the steps and files of docs/tasks.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings

from tests.shop import Project

pytestmark = pytest.mark.large

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n# (shop/\w+\.py)\n(.*?)```", re.S)


def blocks(heading: str) -> list[tuple[str, str]]:
    """Return (file, text) of a section's files, in the order of its steps."""
    section = (DOCS / "tasks.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = BLOCK.findall(section)
    return [(path, text) for path, text in found]


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Project]:
    return lambda *apps: Project(tmp_path, "shop", *apps)


def test_project_moves_from_the_immediate_backend_without_touching_its_tasks(
    project: Callable[..., Project],
) -> None:
    tasks, views, wanted, keyed = blocks("From the immediate backend")
    shop = project(*([] if django.VERSION >= (6, 0) else ["django_tasks"]))
    shop.put(*tasks)
    shop.put(*views)
    shop.pay(1, 1)
    assert shop.sent() == ["Receipt 1", "Receipt 1"]

    shop.put(*wanted)  # steps 1 and 2
    shop.manage("migrate", "--verbosity", "0")
    shop.manage("check", "--fail-level", "WARNING")
    shop.pay(2)
    assert "Receipt 2" not in shop.sent()
    shop.work()
    assert shop.sent().count("Receipt 2") == 1
    result = shop.pay(3).split("'")[3]
    shop.work()
    read = f"from shop.tasks import send_receipt as s; print(s.get_result({result!r}).return_value)"
    assert shop.manage("shell", "--verbosity", "0", "-c", read).strip() == "3"

    shop.put(*keyed)  # step 3
    shop.pay(4, 4, 4)
    shop.work()
    shop.pay(4)
    shop.work()
    assert shop.sent().count("Receipt 4") == 1


def test_step_to_keys_also_works_under_the_immediate_backend(
    project: Callable[..., Project],
) -> None:
    _, views, wanted, keyed = blocks("From the immediate backend")
    home = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    shop = project(*([] if django.VERSION >= (6, 0) else ["django_tasks"]))
    shop.put(*wanted)
    shop.put(
        "shop/settings.py",
        f'TASKS = {{"default": {{"BACKEND": "{home}.backends.immediate.ImmediateBackend"}}}}',
    )
    shop.put(*keyed)
    shop.put(*views)
    shop.pay(1)
    assert shop.sent() == ["Receipt 1"]


def test_project_moves_from_plain_django_rq_and_loses_nothing_that_waits(
    project: Callable[..., Project],
) -> None:
    jobs, views, wanted, new_jobs, new_views = blocks(
        "From `django_rq.enqueue` and `@django_rq.job`"
    )
    shop = project("django_rq")
    queues: dict[str, Any] = {"default": {"URL": settings.RQ_URL}}
    shop.put("shop/settings.py", f"RQ_QUEUES = {queues!r}\n")
    shop.put(*jobs)
    shop.put(*views)
    shop.pay(1)
    shop.work()
    assert shop.sent() == ["Receipt 1", "Reminder 1"]
    shop.pay(2)  # these wait in Redis while the project moves

    shop.put(*wanted)  # steps 1 and 2
    shop.manage("migrate", "--verbosity", "0")
    shop.manage("check", "--fail-level", "WARNING")
    shop.pay(3)  # by code of before
    shop.put(*new_jobs)  # step 3
    shop.put(*new_views)
    shop.pay(4, 4, 4)
    shop.work()
    assert shop.sent() == sorted(
        [f"{kind} {order}" for kind in ("Receipt", "Reminder") for order in (1, 2, 3, 4)]
        + ["Reminder 4"] * 2
    )

    shop.put("shop/settings.py", "DEDUPJOBS = {}\n")  # step 4
    shop.pay(5)
    shop.work()
    assert shop.sent().count("Receipt 5") == 1
