"""
Delivering what was raised and cleared: by e-mail to ADMINS, by a POST to a webhook.

Notices wait in a table, so they outlive the process that wrote them. A channel's oldest goes
first; one that fails is tried again after 1, 2, 4, … 300 s and dropped after TRIES, which the log
says. Each channel has a thread of its own in a coordinator: one that hangs holds up nothing else,
and shows as the alert ``untold``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.core.mail import mail_admins

from dedupjobs import conf, posting, signals
from dedupjobs.alerts import book
from dedupjobs.alerts.book import MAIL, WEBHOOK
from dedupjobs.clock import DbNow
from dedupjobs.visible import line

TRIES = 12  # about half an hour
LONGEST_PAUSE = 300.0  # seconds
MAIL_TIMEOUT = 60.0  # seconds after which another coordinator may try, too


def deliver(channel: str) -> int:
    """Deliver the notices of a channel that are due, the oldest first; return how many."""
    done = 0
    while (notice := book.notices(channel).order_by("pk").first()) is not None:
        if not _claim(notice):
            break
        try:
            SEND[channel](notice.body)
        except Exception as error:  # whatever it is, it is the channel's
            _keep_or_drop(notice, error)
            break
        book.notices(channel).filter(pk=notice.pk).delete()
        done += 1
    return done


def _claim(notice: Any) -> bool:
    """Take a notice that is due, for the time that a try may last and the pause after it."""
    timeout = conf.alerts().WEBHOOK_TIMEOUT if notice.channel == WEBHOOK else MAIL_TIMEOUT
    until = DbNow(timeout + pause(notice.tries))
    free = book.notices(notice.channel).filter(
        pk=notice.pk, tries=notice.tries, due_at__lte=DbNow()
    )
    return bool(free.update(due_at=until, tries=notice.tries + 1))


def pause(tries: int) -> float:
    """Return the seconds after a try that failed; ``tries``: how many failed before it."""
    return float(min(2.0**tries, LONGEST_PAUSE))


def _keep_or_drop(notice: Any, error: Exception) -> None:
    mine = book.notices(notice.channel).filter(pk=notice.pk)
    if notice.tries + 1 >= TRIES:
        mine.delete()
        signals.tell(signals.notice_dropped, "", channel=notice.channel, error=error)
    else:
        words = line(f"{type(error).__name__}: {error}", 250)
        mine.update(error=words, due_at=DbNow(pause(notice.tries)))


def _mail(body: str) -> None:
    news = json.loads(body)
    about = f" ({news['subject']})" if news["subject"] else ""
    subject = f"dedupjobs: {news['kind']}{about} {news['event']}"
    text = f"{news['words']}\n\n{news['cure']}\n\nraised {news['raised_at']}"
    if news["cleared_at"]:
        text += f"\ncleared {news['cleared_at']}"
    mail_admins(line(subject, 200), text)


def _post(body: str) -> None:
    """POST to the webhook; raises whatever is wrong."""
    told = conf.alerts()
    posting.post(told.WEBHOOK or "", body, {}, timeout=told.WEBHOOK_TIMEOUT)


SEND: dict[str, Callable[[str], None]] = {MAIL: _mail, WEBHOOK: _post}
