"""The suite's own app: specimen jobs in `jobs.py`, and a ledger of what they did."""

from __future__ import annotations

import os

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    """Labelled so that no other app named "app" can clash with it."""

    name = "tests.app"
    label = "testapp"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if path := os.environ.get("DEDUPJOBS_TEST_SPANS"):
            _write_spans(path)


def _write_spans(path: str) -> None:
    """Trace this process and its children into a file, a line a span, sent once an hour."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    provider = TracerProvider()
    # Opened and closed with each span: a stream that two processes share would mix them up.
    exporter = ConsoleSpanExporter(
        out=_Appended(path),  # type: ignore[arg-type]
        formatter=lambda span: (span.to_json(indent=None) or "") + "\n",
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    trace.set_tracer_provider(provider)


class _Appended:
    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text)

    def flush(self) -> None:
        """Each text is written at once."""
