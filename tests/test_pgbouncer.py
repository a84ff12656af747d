"""Jobs behind PgBouncer in transaction mode, set up as docs/deployment.md says."""

from __future__ import annotations

import configparser
import os
import pwd
import shutil
from typing import Any

import psycopg
import pytest
from django.db import connection

from dedupjobs.models import AttemptOutcome, JobAttempt
from tests import live
from tests.app import jobs
from tests.live import Spawn
from tests.servers import HOST, Server
from tests.test_deployment import DEPLOY, live_a_life, settings_of, start

pytestmark = [
    pytest.mark.large,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="PgBouncer is for PostgreSQL"),
    pytest.mark.skipif(
        shutil.which("pgbouncer") is None, reason="no pgbouncer here; .ci/run brings Debian's"
    ),
]


class PgBouncer(Server):
    """PgBouncer with the recipe's settings, before a server where everybody is let in."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.target = port

    def _command(self) -> list[str]:
        ours = configparser.ConfigParser(interpolation=None)
        ours.read(DEPLOY / "pgbouncer.ini")
        ours["databases"] = {"*": f"host={HOST} port={self.target}"}
        ours["pgbouncer"].pop("auth_file")
        here = {
            "listen_port": str(self.port),
            "auth_type": "any",
            "default_pool_size": "4",
            "unix_socket_dir": "",
        }
        ours["pgbouncer"].update(here)
        ours["databases"]["*"] += " user=postgres"
        with (self.home / "pgbouncer.ini").open("w") as file:
            ours.write(file)
        return ["pgbouncer", "-q", "pgbouncer.ini"]

    def _user(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        os.chown(self.home, nobody.pw_uid, nobody.pw_gid)
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def _is_mine(self) -> bool:
        try:
            with psycopg.connect(
                host=HOST, port=self.port, user="postgres", dbname="postgres", autocommit=True
            ) as client:
                return client.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False


def test_jobs_live_behind_pgbouncer_in_transaction_mode(spawn: Spawn) -> None:
    with PgBouncer(int(connection.settings_dict["PORT"])) as pooler:
        shown = settings_of("PgBouncer in transaction mode", **{"6432": str(pooler.port)})
        direct = {name: connection.settings_dict[name] for name in ("ENGINE", "NAME", "USER")}
        given = {"DATABASES": {"default": direct | shown["DATABASES"]["default"]}}
        live_a_life(spawn, given)
        worker = start(spawn, given)
        atomic = [jobs.record_atomically.enqueue(tag=f"atomic {n}") for n in range(5)]
        waiting = jobs.hang.enqueue(tag="hangs", how="sql")
        for outcome in atomic:
            live.wait_for(outcome)
        live.wait_for_outcome(waiting, AttemptOutcome.TIMED_OUT)
        assert worker.is_alive()
        assert JobAttempt.objects.filter(outcome="SUCCEEDED", job__key__startswith="atomic").count()
