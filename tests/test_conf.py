"""The DEDUPJOBS setting: typed, and wrong ones are named with their cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from dedupjobs import conf, registry


def test_defaults_are_those_of_the_design() -> None:
    assert asdict(conf.Settings()) == {
        "AUTODISCOVER": ("jobs",),
        "LOCK_CACHE": "default",
        "PREFIX": "dedupjobs",
        "TICK": 1.0,
        "RECLAIM_EVERY": 5.0,
        "RESEND_AFTER": 30.0,
        "LEADER_TTL": 10.0,
        "TIMEOUT_GRACE": 5.0,
        "SHUTDOWN_GRACE": 25.0,
        "HORSE_JOBS": 1_000,
        "HORSE_MEMORY": 256 * 1024**2,
        "HEARTBEAT_FILE": None,
        "BATCH": 100,
        "THREADS": 1,
        "FOREIGN_PICKLE": False,
        "PRUNE_EVERY": 3600.0,
        "FOLD_EVERY": 10.0,
        "SUMMARISE_EVERY": 20.0,
        "PUSH_TIMEOUT": 0.25,
        "LOCK_TIMEOUT": 0.5,
        "STATUS_CACHE": "default",
        "L1_TTL": 2.0,
        "L1_SIZE": 10_000,
        "L2_TTL": 3600.0,
        "LISTEN": "lazy",
        "MAX_PAYLOAD": 65_536,
        "MAX_RESULT": 65_536,
        "MAX_STEPS": 1_000,
        "MAX_STEP_RESULT": 65_536,
        "MAX_TRACEBACK": 16_384,
        "REDACT": ("password", "passwd", "secret", "token", "api_key", "apikey", "credential"),
        "METRICS": True,
        "METRICS_TOKEN": None,
        "LOG_KEYS": False,
        "DEFAULTS": {},
        "ALERTS": {},
        "PRESSURE": {},
        "OUTBOX": {},
        "INBOX": {},
    }


def test_defaults_have_no_problem() -> None:
    with override_settings(DEDUPJOBS={}):
        assert list(conf.problems()) == []
        assert conf.get() == conf.Settings()
    with override_settings(DEDUPJOBS=asdict(conf.Settings())):
        assert list(conf.problems()) == []


@pytest.fixture
def _told_of_a_deletion() -> Iterator[None]:
    """Django sends no signal when a setting is deleted, nor when it is back."""
    conf._forget(setting="DEDUPJOBS")
    yield
    conf._forget(setting="DEDUPJOBS")


@pytest.mark.usefixtures("_told_of_a_deletion")
def test_missing_setting_means_the_defaults() -> None:
    from django.conf import settings

    with override_settings():
        del settings.DEDUPJOBS
        assert conf.get() == conf.Settings()
        assert list(conf.problems()) == []


def test_setting_that_changes_is_read_anew() -> None:
    with override_settings(DEDUPJOBS={"RESEND_AFTER": 10}):
        assert conf.get().RESEND_AFTER == 10.0
        with override_settings(DEDUPJOBS={"RESEND_AFTER": 20}):
            assert conf.get().RESEND_AFTER == 20.0
        assert conf.get().RESEND_AFTER == 10.0


@pytest.mark.parametrize("value", [5, 5.0, timedelta(seconds=5)])
def test_seconds_may_be_a_number_or_a_timedelta(value: Any) -> None:
    with override_settings(DEDUPJOBS={"TICK": value}):
        assert conf.get().TICK == 5.0
        assert type(conf.get().TICK) is float


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TICK", 0, "give seconds from"),
        ("TICK", -1, "give seconds from"),
        ("TICK", 0.0004, "give seconds from"),
        ("TICK", float("nan"), "give seconds from"),
        ("TICK", float("inf"), "give seconds from"),
        ("TICK", True, "give seconds from"),
        ("TICK", "5", "give seconds from"),
        ("TICK", None, "give seconds from"),
        ("TICK", timedelta(0), "give seconds from"),
        ("TICK", timedelta(days=31), "give seconds from"),
        ("BATCH", 0, "whole number"),
        ("BATCH", 1.5, "whole number"),
        ("BATCH", True, "whole number"),
        ("BATCH", "100", "whole number"),
        ("HORSE_JOBS", 0, "whole number of at least 1"),
        ("HORSE_JOBS", None, "whole number of at least 1"),
        ("HORSE_MEMORY", -1, "whole number of bytes; 0 or None"),
        ("HORSE_MEMORY", 1.5, "whole number of bytes"),
        ("HORSE_MEMORY", True, "whole number of bytes"),
        ("FOREIGN_PICKLE", 1, "True or False"),
        ("FOREIGN_PICKLE", "no", "True or False"),
        ("PREFIX", "", "non-empty string"),
        ("PREFIX", 1, "non-empty string"),
        ("AUTODISCOVER", "jobs", "tuple of module names"),
        ("AUTODISCOVER", (1,), "tuple of module names"),
        ("DEFAULTS", [("lease", 5)], "dict of @job options"),
    ],
)
def test_wrong_value_is_a_problem_that_names_it_and_the_cure(
    name: str, value: Any, words: str
) -> None:
    with override_settings(DEDUPJOBS={name: value}):
        [problem] = conf.problems()
        assert name in problem
        assert repr(value) in problem
        assert words in problem
        with pytest.raises(ImproperlyConfigured, match=name):
            conf.get()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RESEND_AFTR", "Did you mean 'RESEND_AFTER'?"),
        ("resend_after", "RESEND_AFTER"),
        ("LOCKCACHE", "Did you mean 'LOCK_CACHE'?"),
        ("ZZZ", "Known: AUTODISCOVER, "),
        (7, "7"),
    ],
)
def test_unknown_name_is_a_problem_that_names_the_nearest(name: Any, words: str) -> None:
    with override_settings(DEDUPJOBS={name: 1}):
        [problem] = conf.problems()
        assert "is not a setting" in problem
        assert words in problem


@pytest.mark.parametrize("value", [None, [], "x", 1], ids=repr)
def test_setting_that_is_no_dict_is_one_problem(value: Any) -> None:
    with override_settings(DEDUPJOBS=value):
        assert list(conf.problems()) == [f"DEDUPJOBS is {value!r}; it must be a dict."]
        with pytest.raises(ImproperlyConfigured):
            conf.get()
        assert conf.option_defaults() == {}


def test_every_mistake_is_named() -> None:
    with override_settings(DEDUPJOBS={"TICK": 0, "BATCH": 0, "NO": 1}):
        assert len(list(conf.problems())) == 3


def test_defaults_of_options_hold_for_jobs_decorated_later_and_yield_to_their_own() -> None:
    with override_settings(DEDUPJOBS={"DEFAULTS": {"lease": 5, "max_attempts": 2}}):

        @registry.job(key=None, name="tests.defaulted", max_attempts=3)
        def defaulted() -> None: ...

    try:
        assert (defaulted.options.lease, defaulted.options.max_attempts) == (5.0, 3)
    finally:
        registry.forget("tests.defaulted")
