"""Spans: a call, its attempts linked to it, duplicates linked to it; and none without a tracer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dedupjobs import (
    FOREVER,
    clock,
    controls,
    current_attempt,
    job,
    registry,
    runner,
    spans,
    tracing,
)
from dedupjobs.models import ProcessedJob, Status
from tests import live
from tests.app import jobs
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with live.brisk(LOCK_TIMEOUT=10, PUSH_TIMEOUT=10):
        yield


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """A tracer as a project would set one, for this test alone."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    spans.tracer, before = tracing.OpenTelemetry(made), spans.tracer
    yield made
    spans.tracer = before
    made.shutdown()


@pytest.fixture
def ended(provider: TracerProvider, exporter: InMemorySpanExporter) -> Any:
    """Return the spans that have ended, oldest first, by their kind."""
    return lambda kind: [s for s in exporter.get_finished_spans() if s.kind is kind]


def run(row: Any) -> Status | None:
    fresh = ProcessedJob.objects.get(pk=getattr(row, "job", row).pk)
    return runner.deliver(fresh.pk, fresh.generation, owner=clock.token())


def links(span: Any) -> list[int]:
    return [link.context.span_id for link in span.links]


def traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_call_is_a_producer_span_whose_context_stands_in_the_row(ended: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    (sent,) = ended(SpanKind.PRODUCER)
    assert sent.name == "send default"
    assert dict(sent.attributes) == {
        "messaging.system": "rq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "default",
        "messaging.message.id": row.dispatch_id,
        "dedupjobs.job": "testapp.record",
        "dedupjobs.row": row.pk,
        "dedupjobs.kind": "CREATED",
    }
    context = sent.get_span_context()
    assert ProcessedJob.objects.get().traceparent == traceparent(context)


def test_call_within_a_request_is_part_of_its_trace(provider: Any, ended: Any) -> None:
    with provider.get_tracer("shop").start_as_current_span("GET /buy") as request:
        jobs.record.enqueue(tag="a")
    (sent,) = ended(SpanKind.PRODUCER)
    assert sent.parent.span_id == request.get_span_context().span_id


def test_every_attempt_is_a_consumer_span_linked_to_the_call(ended: Any) -> None:
    row = jobs.fail.enqueue(tag="a", times=1).job
    run(row)
    ProcessedJob.objects.update(run_after=row.created_at)
    run(row)
    (sent,) = ended(SpanKind.PRODUCER)
    first, second = ended(SpanKind.CONSUMER)
    for number, attempt in ((1, first), (2, second)):
        assert attempt.name == "process default"
        assert links(attempt) == [sent.get_span_context().span_id]
        assert attempt.parent is None, "a trace of its own"
        assert attempt.attributes["dedupjobs.attempt"] == number
        assert attempt.attributes["messaging.operation.type"] == "process"
        assert attempt.attributes["dedupjobs.key_hash"] == row.key_hash
    assert first.status.status_code is StatusCode.ERROR
    assert first.attributes["error.type"] == "builtins.ValueError"
    assert (first.attributes["dedupjobs.outcome"], first.attributes["dedupjobs.status"]) == (
        "FAILED",
        "RETRYING",
    )
    assert second.status.status_code is StatusCode.UNSET
    assert second.attributes["dedupjobs.outcome"] == "SUCCEEDED"


def test_spans_of_the_jobs_code_are_children_of_its_attempt(provider: Any, ended: Any) -> None:
    seen: list[Any] = []

    @job(name="testapp.traced", key="traced:{tag}", unique_for=FOREVER)
    def traced(*, tag: str) -> None:
        with provider.get_tracer("shop").start_as_current_span("charge", kind=SpanKind.CLIENT):
            seen.append(current_attempt().trace_headers())

    try:
        run(traced.enqueue(tag="a"))
    finally:
        registry.forget("testapp.traced")
    (attempt,), (charge,) = ended(SpanKind.CONSUMER), ended(SpanKind.CLIENT)
    assert charge.parent.span_id == attempt.get_span_context().span_id
    assert seen == [{"traceparent": traceparent(charge.get_span_context())}]
    assert not trace.get_current_span().get_span_context().is_valid


def test_call_that_is_turned_away_is_linked_to_the_original(ended: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    jobs.record.enqueue(tag="a")
    run(row)
    jobs.record.enqueue(tag="a")  # the database knows the success
    assert jobs.record.status(tag="a") == Status.SUCCEEDED
    jobs.record.enqueue(tag="a")  # the status cache does
    original, *others = ended(SpanKind.PRODUCER)
    kinds = [other.attributes["dedupjobs.kind"] for other in others]
    assert kinds == ["DUPLICATE", "REPLAYED", "REPLAYED"]
    assert [links(other) for other in others] == [[original.get_span_context().span_id]] * 3
    assert all("messaging.message.id" not in other.attributes for other in others)


def test_message_that_finds_nothing_is_linked_to_the_original(ended: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    run(row)
    run(row)
    (original,) = ended(SpanKind.PRODUCER)
    _, dropped = ended(SpanKind.CONSUMER)
    assert dropped.attributes["dedupjobs.duplicate"] == "redelivery"
    assert links(dropped) == [original.get_span_context().span_id]


def test_batch_is_one_span_and_all_its_rows_have_its_context(ended: Any) -> None:
    jobs.record.enqueue(tag="a")
    jobs.record.enqueue_many([{"tag": tag} for tag in "abc"])
    first, batch = ended(SpanKind.PRODUCER)
    assert batch.attributes["messaging.batch.message_count"] == 3
    assert batch.attributes["dedupjobs.kind"] == "CREATED,DUPLICATE"
    assert links(batch) == [first.get_span_context().span_id]
    contexts = set(ProcessedJob.objects.exclude(key="record:a").values_list("traceparent"))
    assert len(contexts) == 1
    assert f"{batch.get_span_context().span_id:016x}" in contexts.pop()[0]


def test_key_that_runs_anew_belongs_to_the_newer_call(ended: Any) -> None:
    row = jobs.record_again.enqueue(tag="a").job
    run(row)
    jobs.record_again.enqueue(tag="a")
    run(row)
    calls, runs = ended(SpanKind.PRODUCER), ended(SpanKind.CONSUMER)
    assert [links(r)[0] for r in runs] == [c.get_span_context().span_id for c in calls]


def test_no_span_has_a_key_an_argument_or_the_text_of_an_error(
    provider: Any, exporter: InMemorySpanExporter
) -> None:
    run(jobs.fail_for_good.enqueue(tag="rahasia"))
    jobs.record.enqueue(tag="rahasia", text="one")
    with pytest.raises(Exception, match="another"):
        jobs.record.enqueue(tag="rahasia", text="rahasia")
    told = exporter.get_finished_spans()
    assert len(told) == 4
    for span in told:
        assert "rahasia" not in span.to_json()


def test_odd_traceparent_in_a_row_is_no_link_and_harms_nobody(ended: Any) -> None:
    row = jobs.record.enqueue(tag="a").job
    for odd in ("nonsense", "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        ProcessedJob.objects.update(traceparent=odd)
        jobs.record.enqueue(tag="a")
    assert [links(span) for span in ended(SpanKind.PRODUCER)[1:]] == [[], [], []]
    assert run(row) is Status.SUCCEEDED


def test_without_a_provider_nothing_is_traced_and_no_statement_is_added() -> None:
    assert isinstance(spans.tracer, tracing.OpenTelemetry)
    assert spans.tracer.provider is None
    controls.current(at_most=0.0)  # which a process reads once in a while
    with CaptureQueriesContext(connection) as captured:
        row = jobs.record.enqueue(tag="a").job
    with_tracer = len(captured.captured_queries)
    spans.tracer, before = None, spans.tracer
    try:
        controls.current(at_most=0.0)
        with CaptureQueriesContext(connection) as captured:
            jobs.record.enqueue(tag="b")
    finally:
        spans.tracer = before
    assert with_tracer == len(captured.captured_queries)
    assert ProcessedJob.objects.get(pk=row.pk).traceparent == ""
    run(row)


def test_headers_without_a_tracer_name_the_call_that_was_traced() -> None:
    seen: list[Any] = []

    @job(name="testapp.untraced", key="untraced:{tag}", unique_for=FOREVER)
    def untraced(*, tag: str) -> None:
        seen.append(current_attempt().trace_headers())

    origin = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    try:
        for tag, stands in (("a", origin), ("b", "")):
            row = untraced.enqueue(tag=tag).job
            ProcessedJob.objects.filter(pk=row.pk).update(traceparent=stands)
            run(row)
    finally:
        registry.forget("testapp.untraced")
    assert seen == [{"traceparent": origin}, {}]


def test_without_opentelemetry_the_app_loads_and_runs() -> None:
    code = (
        "import sys\n"
        "for name in ('opentelemetry', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import django; django.setup()\n"
        "from dedupjobs import prometheus, spans, tracing, urls\n"
        "assert spans.tracer is None and not tracing.is_installed\n"
        "assert not prometheus.is_installed\n"
        "with spans.producing('a', 'b') as span: assert span is None\n"
        "print('fine')\n"
    )
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# ---- horses


@pytest.mark.large
@pytest.mark.parametrize("worker", [live.DEDUP, live.STOCK])
def test_horse_sends_its_spans_before_it_is_gone(
    spawn: live.Spawn, tmp_path: Path, worker: str
) -> None:
    """By a processor that would send them in an hour."""
    file = tmp_path / "spans"
    with live.changed(RQ={"WORKER_CLASS": worker}):
        outcome = jobs.record.enqueue(tag="a")
        live.start_worker(spawn, worker=worker, env={"DEDUPJOBS_TEST_SPANS": str(file)})
        live.wait_for(outcome)
        until(file.exists, 20, what="the spans are there")
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["attributes"]["dedupjobs.row"] == outcome.job.pk


def test_flush_waits_for_a_collector_that_hangs_no_longer_than_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Slow(TracerProvider):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            asked.append(timeout_millis)
            raise RuntimeError("the collector is gone")

    monkeypatch.setattr(spans, "tracer", tracing.OpenTelemetry(Slow()))
    spans.flush()
    assert asked == [], "only in a horse"
    monkeypatch.setattr(spans, "_forked", True)
    spans.flush()
    assert asked == [tracing.FLUSH]
