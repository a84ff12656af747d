"""What makes two calls the same work: names that change, names that are shared, and the hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dedupjobs import FOREVER, job, keys, lifecycle, registry
from dedupjobs.exceptions import JobDefinitionError, KeyValueError, PayloadMismatch
from dedupjobs.models import Kind, ProcessedJob, Status
from dedupjobs.registry import Job
from dedupjobs.testing import run_pending
from tests.app import jobs
from tests.app.models import Ledger
from tests.rows import alter, claimed, job_row

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _jobs_of_this_test() -> Iterator[None]:
    """Forget the jobs that a test has registered."""
    before = set(registry.names())
    yield
    for name in set(registry.names()) - before:
        registry.forget(name)


def first(*, tag: str, text: str = "") -> str:
    jobs.note(tag, f"first {text}")
    return "first"


def second(*, tag: str, text: str = "") -> str:
    jobs.note(tag, f"second {text}")
    return "second"


def define(function: Any, name: str, **options: Any) -> Job[..., Any]:
    options = {"key": "{tag}", "unique_for": FOREVER, **options}
    return job(name=name, **options)(function)


def notes() -> list[str]:
    return list(Ledger.objects.order_by("pk").values_list("note", flat=True))


# ---- aliases: a renamed job


def test_renamed_job_keeps_the_keys_that_its_old_name_holds() -> None:
    define(first, "old").enqueue(tag="a")
    run_pending()
    registry.forget("old")
    renamed = define(first, "new", aliases=("old",))
    outcome = renamed.enqueue(tag="a")
    assert (outcome.kind, outcome.result()) == (Kind.REPLAYED, "first")
    with pytest.raises(PayloadMismatch):
        renamed.enqueue(tag="a", text="other")
    assert run_pending() == 0


def test_rows_that_wait_under_an_old_name_run_by_the_renamed_job() -> None:
    row = define(first, "old").enqueue(tag="a", text="x").job
    registry.forget("old")
    renamed = define(first, "new", aliases=("old",))
    assert renamed.enqueue(tag="a", text="x").kind is Kind.DUPLICATE
    assert run_pending() == 1
    assert (job_row(row).status, notes()) == (Status.SUCCEEDED, ["first x"])


def test_job_that_was_renamed_twice_keeps_its_oldest_keys() -> None:
    """The middle name's processes may still be alive during the deploy."""
    define(first, "oldest").enqueue(tag="a")
    registry.forget("oldest")
    middle = define(first, "middle", aliases=("oldest",))
    assert middle.enqueue(tag="a").kind is Kind.DUPLICATE
    assert middle.enqueue(tag="b").created
    registry.forget("middle")
    newest = define(first, "newest", aliases=("oldest", "middle"))
    assert [newest.enqueue(tag=tag).kind for tag in "ab"] == [Kind.DUPLICATE] * 2
    assert sorted(ProcessedJob.objects.values_list("name", flat=True)) == ["middle", "oldest"]
    assert run_pending() == 2
    assert notes() == ["first ", "first "]


def test_options_of_a_renamed_job_hold_for_rows_under_its_old_name() -> None:
    row = define(first, "old").enqueue(tag="a").job
    registry.forget("old")
    define(first, "new", aliases=("old",), lease=7)
    claim = claimed(row)
    attempt = lifecycle.attempts().get(pk=claim.fence)
    assert (attempt.lease_until - attempt.beat_at).total_seconds() == pytest.approx(7, abs=1)
    assert registry.find("old") is registry.get("new")


def test_renamed_job_reopens_its_keys_under_its_new_name() -> None:
    row = define(first, "old", unique_for=None).enqueue(tag="a").job
    run_pending()
    registry.forget("old")
    renamed = define(first, "new", aliases=("old",), unique_for=None)
    outcome = renamed.enqueue(tag="a")
    assert (outcome.created, outcome.job.pk, outcome.job.name) == (True, row.pk, "new")
    assert outcome.job.generation == 2


def test_forgotten_job_takes_its_former_names_along() -> None:
    define(first, "new", aliases=("old",))
    registry.forget("new")
    assert registry.find("old") is None


@pytest.mark.parametrize("order", ["alias second", "alias first"])
def test_former_name_that_another_job_bears_is_refused(order: str) -> None:
    """Or both jobs would answer for each other's keys, and each other's rows."""
    if order == "alias second":
        define(first, "mine")
        with pytest.raises(JobDefinitionError, match="mine"):
            define(second, "other", aliases=("mine",))
    else:
        define(second, "other", aliases=("mine",))
        with pytest.raises(JobDefinitionError, match="mine"):
            define(first, "mine")


@pytest.mark.parametrize("wrong", [("",), (7,)])
def test_former_name_that_is_no_text_is_refused(wrong: Any) -> None:
    with pytest.raises(JobDefinitionError, match="aliases"):
        define(first, "new", aliases=wrong)


# ---- two jobs


def test_two_jobs_with_the_same_key_text_do_not_meet() -> None:
    one, two = define(first, "one"), define(second, "two")
    assert (one.enqueue(tag="a").created, two.enqueue(tag="a").created) == (True, True)
    assert len(set(ProcessedJob.objects.values_list("key", flat=True))) == 1
    run_pending()
    assert sorted(notes()) == ["first ", "second "]


def test_two_jobs_with_one_namespace_share_their_keys() -> None:
    one, two = (define(f, f.__name__, namespace="orders") for f in (first, second))
    created = one.enqueue(tag="a")
    outcome = two.enqueue(tag="a")
    assert (outcome.kind, outcome.job.pk) == (Kind.DUPLICATE, created.job.pk)
    assert run_pending() == 1
    assert two.enqueue(tag="a").result() == "first"
    assert notes() == ["first "]


def test_job_that_reopens_a_shared_key_runs_itself() -> None:
    one, two = (define(f, f.__name__, namespace="orders", unique_for=None) for f in (first, second))
    one.enqueue(tag="a")
    run_pending()
    assert two.enqueue(tag="a").job.name == "second"
    run_pending()
    assert notes() == ["first ", "second "]


@pytest.mark.parametrize("conflict", ["replace", "rerun"])
def test_job_whose_payload_wins_on_a_shared_key_runs_itself(conflict: str) -> None:
    """REPLACED says: "now runs with these arguments". They are the second job's."""
    one, two = (
        define(f, f.__name__, namespace="orders", unique_for=None, on_conflict=conflict)
        for f in (first, second)
    )
    one.enqueue(tag="a", text="x")
    assert two.enqueue(tag="a", text="y").kind is Kind.REPLACED
    run_pending()
    assert notes() == ["second y"]


def test_job_whose_rerun_waits_on_a_shared_key_runs_itself() -> None:
    one, two = (
        define(f, f.__name__, namespace="orders", unique_for=None, on_conflict="rerun")
        for f in (first, second)
    )
    claim = claimed(one.enqueue(tag="a", text="x").job)
    assert two.enqueue(tag="a", text="y").kind is Kind.RERUN
    lifecycle.complete(claim, "null", unique_for=None)
    run_pending()
    assert notes() == ["second y"]


# ---- tenants


def test_same_key_of_two_tenants_is_two_jobs_also_where_their_texts_run_together() -> None:
    calls = [("a", "bc"), ("ab", "c"), ("", "abc")]
    for tenant, tag in calls[:2]:
        assert jobs.record_for_tenant.enqueue(tenant=tenant, tag=tag).created
        assert not jobs.record_for_tenant.enqueue(tenant=tenant, tag=tag).created
    with pytest.raises(KeyValueError, match="tenant"):
        jobs.record_for_tenant.enqueue(tenant="", tag="abc")
    assert sorted(ProcessedJob.objects.values_list("scope", "key")) == [
        ("a", "tenant:bc"),
        ("ab", "tenant:c"),
    ]


def test_tenant_that_is_a_number_is_the_tenant_of_that_text() -> None:
    one = jobs.record_for_tenant.enqueue(tenant=5, tag="a")
    with pytest.raises(PayloadMismatch):  # the same tenant; the argument has another type
        jobs.record_for_tenant.enqueue(tenant="5", tag="a")
    assert one.job.scope == "5"


# ---- words of other libraries


@pytest.mark.parametrize("word", ["delay", "apply_async", "send", "enqueue_on_commit"])
def test_word_of_another_library_is_no_attribute_and_the_error_names_enqueue(word: str) -> None:
    with pytest.raises(AttributeError, match=rf"testapp\.record\.{word}.*\.enqueue\("):
        getattr(jobs.record, word)
    assert not hasattr(jobs.record, word)


def test_word_that_nobody_uses_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'enqeue'"):
        jobs.record.enqeue  # noqa: B018


# ---- S-095: the key is computed once


def test_key_function_is_called_once_with_a_copy_and_retries_keep_the_key() -> None:
    calls: list[dict[str, Any]] = []

    def key(**values: Any) -> str:
        calls.append(dict(values))
        values["options"]["changed"] = True
        return f"{values['tag']}-{len(calls)}"  # another one at each call

    def fail_at_first(*, tag: str, options: dict[str, Any]) -> None:
        jobs.note(tag, json.dumps(options))
        if len(notes()) == 1:
            raise ValueError(tag)

    specimen = define(fail_at_first, "fails", key=key, backoff=60)
    given = {"mine": 1}
    row = specimen.enqueue(tag="a", options=given).job
    assert calls == [{"tag": "a", "options": {"mine": 1, "changed": True}}]
    assert given == {"mine": 1}
    assert run_pending() == 1
    alter(row, run_after=row.created_at)
    assert run_pending() == 1
    assert notes() == ['{"mine": 1}'] * 2  # the job's own arguments, at each attempt
    after = job_row(row)
    assert (after.status, after.key, after.key_hash) == ("SUCCEEDED", "a-1", row.key_hash)
    assert len(calls) == 1
    assert ProcessedJob.objects.count() == 1


def test_key_function_is_called_once_a_call_of_a_batch() -> None:
    calls: list[str] = []

    def key(*, tag: str, text: str) -> str:
        calls.append(tag)
        return tag

    specimen = define(first, "batch", key=key)
    specimen.enqueue_many([{"tag": "a"}, {"tag": "b"}, {"tag": "a"}])
    assert calls == ["a", "b", "a"]
    assert ProcessedJob.objects.count() == 2


def test_key_function_gets_values_of_the_types_that_were_passed() -> None:
    seen: list[Any] = []

    def key(*, tag: Any, text: Any) -> str:
        seen.append((tag, text))
        return "k"

    specimen = define(first, "typed", key=key)
    specimen.enqueue(tag=("a", 1), text=b"raw")
    assert seen == [(("a", 1), b"raw")]


@pytest.mark.parametrize("empty", [None, ""])
def test_key_function_that_returns_nothing_is_refused(empty: Any) -> None:
    specimen = define(first, "empty", key=lambda tag, text: empty)
    with pytest.raises(KeyValueError, match="key"):
        specimen.enqueue(tag="a")
    assert not ProcessedJob.objects.exists()


# ---- S-085: the hash carries its scheme


def sha256(parts: list[Any]) -> str:
    text = json.dumps(parts, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def test_hash_covers_scheme_tenant_name_and_key() -> None:
    """A change here lets duplicates in during an upgrade: it needs another SCHEME."""
    template = jobs.record.enqueue(tag="a").job
    assert template.key_hash == sha256([1, "", "testapp.record", ["record:", "a"]])
    tenant = jobs.record_for_tenant.enqueue(tenant="t", tag="a").job
    assert tenant.key_hash == sha256([1, "t", "testapp.record_for_tenant", ["tenant:", "a"]])
    own = jobs.record.using(key="k").enqueue(tag="a").job
    assert own.key_hash == sha256([1, "", "testapp.record", [["key", "k"]]])
    shared = define(first, "shared", namespace="orders", key=("tag",)).enqueue(tag="a").job
    assert shared.key_hash == sha256([1, "", "orders", [["tag", "a"]]])


def test_another_scheme_gives_every_key_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jobs.record.identity_of({"tag": "a"})
    monkeypatch.setattr(keys, "SCHEME", keys.SCHEME + 1)
    assert jobs.record.identity_of({"tag": "a"}) != before


def test_hash_of_a_row_is_not_computed_again_when_the_scheme_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = jobs.record.enqueue(tag="a", text="x").job
    monkeypatch.setattr(keys, "SCHEME", keys.SCHEME + 1)
    assert run_pending() == 1
    after = job_row(row)
    assert (after.key_hash, after.status) == (row.key_hash, Status.SUCCEEDED)
