"""Projects that move to dedupjobs, by the steps and files of docs/tasks.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings

pytestmark = pytest.mark.large

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n# (shop/\w+\.py)\n(.*?)```", re.S)
BASE = """
from pathlib import Path
BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "not a secret"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = {apps!r}
USE_TZ = True
DATABASES = {{
    "default": {{
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "db.sqlite3",
        "OPTIONS": {{
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        }},
    }}
}}
EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
EMAIL_FILE_PATH = BASE_DIR / "sent"
"""
URLS = """
from django.urls import path
from shop import views
urlpatterns = [path("pay/<int:order_id>/", views.pay)]
"""
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
PAY = """
from django.test import Client
for order in {orders}:
    answer = Client().get(f"/pay/{{order}}/")
    assert answer.status_code == 200, answer.content
    print(answer.json())
"""


class Project:
    """A Django project in a directory, made of what the docs show."""

    def __init__(self, home: Path, *apps: str) -> None:
        self.home = home
        (home / "shop").mkdir()
        self.put("shop/__init__.py", "")
        self.put("shop/urls.py", URLS)
        self.put("manage.py", MANAGE)
        self.put("shop/settings.py", BASE.format(apps=["django.contrib.contenttypes", *apps]))

    def put(self, path: str, text: str) -> None:
        """Write a file as the docs have it; the settings grow, and name this test's servers."""
        text = text.replace("redis://localhost:6379/0", settings.RQ_URL)
        text = text.replace("redis://localhost:6379/1", settings.CACHE_URL)
        if django.VERSION < (6, 0):
            text = text.replace("from django.tasks import", "from django_tasks import")
        file = self.home / path
        before = file.read_text() if path == "shop/settings.py" and file.exists() else ""
        file.write_text(before + text)

    def manage(self, *command: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "manage.py", *command],
            cwd=self.home,
            env={**{k: v for k, v in os.environ.items() if "DJANGO" not in k}, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        return done.stdout

    def pay(self, *orders: int) -> str:
        """Ask the view once for each order."""
        return self.manage("shell", "--verbosity", "0", "-c", PAY.format(orders=orders))

    def work(self) -> None:
        self.manage("rqworker", "--burst")

    def sent(self) -> list[str]:
        """Return the subjects of all mails."""
        texts = [f.read_text() for f in sorted((self.home / "sent").glob("*"))]
        return sorted(re.findall(r"^Subject: (.*)$", "\n".join(texts), re.M))


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
