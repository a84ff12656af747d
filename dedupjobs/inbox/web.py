"""
Events by webhook, signed as the Standard Webhooks specification has it.

    path("events/", inbox.webhook_view("ledger"))

Answers: 204 taken, or known already; 400 no event; 401 nobody whom we know has signed it; 405 no
POST; 413 too large; 503 the handler failed, so send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig
from django.http import HttpRequest, HttpResponse
from django.urls import get_resolver
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from dedupjobs import clock, conf, envelope
from dedupjobs.exceptions import EventError, SignatureError
from dedupjobs.inbox import handlers, marks
from dedupjobs.inbox.marks import Fate

MARK = "dedupjobs_consumer"  # of a view, and of what is wrapped around it
TRY_LATER = "5"  # seconds, for who sends events that failed


def receive(request: HttpRequest, *, consumer: str) -> Fate:
    """
    Take the event of a request, if one of the consumer's secrets has signed it of late.

    Raises SignatureError, EventError, and what a database raises that is out of reach.
    """
    if wrong := handlers.why_unknown(consumer):
        raise ImproperlyConfigured(wrong)
    options = conf.inbox().consumers[consumer]
    if not options.secrets:
        raise ImproperlyConfigured(
            f'DEDUPJOBS["INBOX"]["CONSUMERS"][{consumer!r}] has no secrets, so nobody can tell who '
            'sends its events. Give "secrets".'
        )
    event_id = envelope.verify(
        request.headers,
        request.body,
        now=clock.utcnow().timestamp(),
        secrets=options.secrets,
        tolerance=options.tolerance,
    )
    event = envelope.of_text(event_id, request.body.decode(errors="replace"))
    return marks.take(event, consumer=consumer)


def webhook_view(consumer: str) -> Callable[[HttpRequest], HttpResponse]:
    """Return a view that takes a consumer's events; whoever sends proves himself by a signature."""

    @csrf_exempt
    @require_POST
    def view(request: HttpRequest) -> HttpResponse:
        try:
            fate = receive(request, consumer=consumer)
        except SignatureError as error:
            return _said(401, error)
        except EventError as error:
            return _said(400, error)
        except RequestDataTooBig as error:
            return _said(413, error)
        if fate == Fate.FAILED:
            answer = _said(503, "The event could not be handled yet; send it again.")
            answer["Retry-After"] = TRY_LATER
            return answer
        return HttpResponse(status=204)

    setattr(view, MARK, consumer)
    return view


def problems() -> list[str]:
    """Return a sentence per view of the project's addresses whose consumer settings lack."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    known = conf.inbox().consumers
    asked: set[Any] = {getattr(view, MARK, None) for view in _views(get_resolver())} - {
        None,
        *known,
    }
    names = ", ".join(known) or "none"
    return [
        f"webhook_view({consumer!r}) stands in the URLs, and INBOX['CONSUMERS'] lacks this "
        f"consumer (there: {names})."
        for consumer in sorted(asked)
    ]


def _views(resolver: Any) -> Iterator[Any]:
    for pattern in resolver.url_patterns:
        if hasattr(pattern, "url_patterns"):
            yield from _views(pattern)
        else:
            yield getattr(pattern, "callback", None)


def _said(status: int, words: object) -> HttpResponse:
    return HttpResponse(f"{words}\n", status=status, content_type="text/plain; charset=utf-8")
