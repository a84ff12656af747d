"""
Spans for OpenTelemetry, where opentelemetry-api is installed and the project has set a provider;
nobody imports this but ``apps``.

    send <queue>      PRODUCER    a call; its context stands in the row as a W3C traceparent
    process <queue>   CONSUMER    an attempt, in a trace of its own, linked to the call's span

A call that is turned away is linked to the call whose row it met. Names and attributes are those
of OpenTelemetry's semantic conventions for messaging, with ours under ``dedupjobs.``; no key, no
argument and no text of an error is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dedupjobs import signals, spans
from dedupjobs.lifecycle import Answer, Claim
from dedupjobs.models import Cause, Kind

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    is_installed = True
except ImportError:  # the extra is not installed
    is_installed = False

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

LINKED = 100  # of one call of enqueue_many
FLUSH = 2_000  # milliseconds that the end of a horse may wait for a collector


def connect() -> None:
    """Trace from now on, as soon as there is a provider."""
    if is_installed:
        spans.tracer = OpenTelemetry()
        signals.hear(signals.duplicate_detected, _duplicate)


class OpenTelemetry:
    """``provider``: the one to use; None: the process's, once the project has set one."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider

    @property
    def provider(self) -> TracerProvider | None:
        """The provider, or None where nobody has set one."""
        found = self._provider or trace.get_tracer_provider()
        return None if isinstance(found, trace.ProxyTracerProvider) else found

    @contextmanager
    def producing(self, name: str, queue: str, count: int) -> Iterator[_Producing | None]:
        """Make a call's span the current one for the block."""
        if self.provider is None:
            yield None
            return
        facts = {**_facts("send", queue), "dedupjobs.job": name}
        if count > 1:
            facts["messaging.batch.message_count"] = count
        with self._span(f"send {queue}", trace.SpanKind.PRODUCER, facts) as span:
            try:
                yield _Producing(span, _traceparent(span))
            except BaseException as error:
                _fail(span, type(error).__name__)
                raise

    @contextmanager
    def consuming(self, claim: Claim) -> Iterator[_Consuming | None]:
        """Make an attempt's span the current one for the block."""
        if self.provider is None:
            yield None
            return
        facts = {
            **_facts("process", claim.queue),
            "messaging.message.id": claim.rq_id,
            "dedupjobs.job": claim.name,
            "dedupjobs.row": claim.job_pk,
            "dedupjobs.key_hash": claim.key_hash,
            "dedupjobs.attempt": claim.number,
            "dedupjobs.fence": claim.fence,
        }
        name, origin = f"process {claim.queue}", _context_of(claim.traceparent)
        with self._span(name, trace.SpanKind.CONSUMER, facts, links=origin, root=True) as span:
            yield _Consuming(span)

    def headers(self) -> dict[str, str]:
        """Return the present context as headers, by the project's propagators."""
        found: dict[str, str] = {}
        if self.provider is not None:
            propagate.inject(found)
        return found

    def flush(self) -> None:
        """Send what ended, within FLUSH."""
        flush = getattr(self.provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH)

    def duplicate(self, queue: str, name: str, cause: str, traceparent: str) -> None:
        """Note that a message was turned away, linked to the call whose row it met."""
        if self.provider is not None:
            facts = {
                **_facts("process", queue),
                "dedupjobs.job": name,
                "dedupjobs.duplicate": cause,
            }
            origin, kind = _context_of(traceparent), trace.SpanKind.CONSUMER
            with self._span(f"process {queue}", kind, facts, links=origin, root=True):
                pass

    @contextmanager
    def _span(
        self,
        name: str,
        kind: Any,
        facts: dict[str, Any],
        *,
        links: Sequence[SpanContext] = (),
        root: bool = False,
    ) -> Iterator[Span]:
        assert self.provider is not None  # noqa: S101 - asked by all callers
        with self.provider.get_tracer("dedupjobs").start_as_current_span(
            name,
            context=context.Context() if root else None,
            kind=kind,
            attributes=facts,
            links=[trace.Link(link) for link in links],
            record_exception=False,  # its text may have arguments
            set_status_on_exception=False,
        ) as span:
            yield span


@dataclass(slots=True)
class _Producing:
    span: Span
    traceparent: str

    def answered(self, answers: Sequence[Answer]) -> None:
        if not self.span.is_recording():
            return
        kinds = sorted({str(answer.kind) for answer in answers})
        self.span.set_attribute("dedupjobs.kind", ",".join(kinds))
        if len(answers) == 1:
            row = answers[0].row
            self.span.set_attribute("dedupjobs.row", row.pk)
            if answers[0].sends and row.dispatch_id:
                self.span.set_attribute("messaging.message.id", row.dispatch_id)
        met = [answer.row for answer in answers if answer.kind not in (Kind.CREATED, Kind.REPLACED)]
        for row in met[:LINKED]:
            if row.traceparent != self.traceparent:
                for origin in _context_of(row.traceparent):
                    self.span.add_link(origin)


@dataclass(slots=True)
class _Consuming:
    span: Span

    def ended(self, outcome: str | None, status: str | None, error: str) -> None:
        self.span.set_attribute("dedupjobs.outcome", outcome or "LAPSED")
        if status is None:
            _fail(self.span, "LeaseLost")
        else:
            self.span.set_attribute("dedupjobs.status", str(status))
        if error:
            _fail(self.span, error)


def _duplicate(sender: str, cause: str, traceparent: str = "", queue: str = "", **_: Any) -> None:
    if cause in (Cause.REDELIVERY, Cause.RACE) and isinstance(spans.tracer, OpenTelemetry):
        spans.tracer.duplicate(queue, sender, str(cause), traceparent)


def _facts(operation: str, queue: str) -> dict[str, Any]:
    return {
        "messaging.system": "rq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
    }


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(trace.StatusCode.ERROR)


def _traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def _context_of(traceparent: str) -> list[SpanContext]:
    """Return the context of a traceparent, or nothing for one that is none."""
    if not traceparent:
        return []
    carrier = {"traceparent": traceparent}
    found = TraceContextTextMapPropagator().extract(carrier, context.Context())
    origin = trace.get_current_span(found).get_span_context()
    return [origin] if origin.is_valid else []
