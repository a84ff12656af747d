"""A small Django project in a directory, for tests that run its own commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import django
from django.conf import settings

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

    def manage(self, *command: str) -> str:
        return self.run("manage.py", *command)

    def run(self, *command: str) -> str:
        """Run Python in the project's directory, and return what it printed; 0 is expected."""
        ours = ("DJANGO_", "DEDUPJOBS_", "PYTEST_")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=self.home,
            env={k: v for k, v in os.environ.items() if not k.startswith(ours)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-3_000:]
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
