"""
Readings for Prometheus: a collector for a registry, and a page to scrape.

    path("", include("dedupjobs.urls"))      # GET /metrics
    dedupjobs.prometheus.register()          # or: beside a project's own metrics

Needs the extra ``prometheus``. Nothing is kept in the process, so several web processes need no
multiprocess mode: each answers for all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from hmac import compare_digest
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dedupjobs import conf, readings
from dedupjobs.readings import Family

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        REGISTRY,
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    is_installed = True
except ImportError:  # the extra is not installed, and only this page needs it
    Collector = object  # type: ignore[assignment,misc]
    is_installed = False

PERMISSION = "dedupjobs.view_processedjob"
CURE = "prometheus-client is missing. Install it: pip install 'dedupjobs[prometheus]'"


class JobsCollector(Collector):
    """Reads everything anew at each scrape."""

    def collect(self) -> Iterator[Metric]:
        return map(_metric, readings.collect())

    def describe(self) -> Iterator[Metric]:
        """Name the metrics without reading them: a registry asks when it is told of us."""
        return map(_metric, readings.empty())


def register(registry: CollectorRegistry | None = None) -> JobsCollector:
    """Let a registry, by default prometheus_client's own, show these metrics beside others."""
    if not is_installed:
        raise ImportError(CURE)
    collector = JobsCollector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def _metric(family: Family) -> Metric:
    name = f"{readings.PREFIX}{family.name}"
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
        bounds = [*(str(float(bound)) for bound in family.bounds), "+Inf"]
        for labels, buckets in family.samples.items():
            histogram.add_metric(
                labels, list(zip(bounds, buckets.counts, strict=True)), buckets.total
            )
        return histogram
    if name.removesuffix("_total") in _GAUGES and family.kind == "counter":
        # OpenMetrics knows a counter without its suffix, where a gauge has that name already.
        metric = Metric(name, family.help, "unknown")
        for labels, value in family.samples.items():
            metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), value)
        return metric
    kind: Any = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    known = kind(name.removesuffix("_total"), family.help, labels=family.labels)
    for labels, value in family.samples.items():
        known.add_metric(labels, value)
    return known  # type: ignore[no-any-return]


_GAUGES = {f"{readings.PREFIX}{name}" for name in readings.GAUGES}


# ---- the page


@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """
    Answer a scrape. By METRICS_TOKEN as a bearer token, or by the permission to view jobs.

    ``name[]=``: only these metrics, as prometheus_client's own page takes it.
    """
    if not _may_read(request):
        return _refusal(request)
    if not is_installed:
        return _said(503, CURE)
    if problem := _problem(request):
        return _said(400, problem)
    registry: Any = CollectorRegistry(auto_describe=False)
    registry.register(JobsCollector())
    if wanted := request.GET.getlist("name[]"):
        registry = registry.restricted_registry(wanted)
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


def _may_read(request: HttpRequest) -> bool:
    token = conf.get().METRICS_TOKEN
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if token and scheme.lower() == "bearer":
        return compare_digest(given.strip().encode(), token.encode())
    user = getattr(request, "user", None)
    return bool(user is not None and user.is_active and user.has_perm(PERMISSION))


def _refusal(request: HttpRequest) -> HttpResponse:
    if getattr(getattr(request, "user", None), "is_authenticated", False):
        return _said(403, f"This user lacks the permission {PERMISSION}.")
    answer = _said(
        401,
        'Send "Authorization: Bearer <token>" with DEDUPJOBS["METRICS_TOKEN"], or log in as a user '
        f"with the permission {PERMISSION}.",
    )
    answer["WWW-Authenticate"] = 'Bearer realm="dedupjobs"'
    return answer


def _problem(request: HttpRequest) -> str:
    """Return what is wrong with a scrape's parameters, or an empty text."""
    for name in request.GET:
        if name != "name[]":
            return f"{name[:100]!r} is no parameter of this page; it takes name[]= only."
    known = {sample for family in readings.empty() for sample in _sample_names(family)}
    for name in request.GET.getlist("name[]"):
        if name not in known:
            near = difflib.get_close_matches(name[:100], known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"name[]={name[:100]!r} is no metric of this page.{hint}"
    return ""


def _sample_names(family: Family) -> list[str]:
    name = f"{readings.PREFIX}{family.name}"
    if family.kind == "histogram":
        return [name, *(f"{name}_{part}" for part in ("bucket", "count", "sum"))]
    return [name]


def _said(status: int, words: str) -> HttpResponse:
    return HttpResponse(f"{words}\n", status=status, content_type="text/plain; charset=utf-8")
