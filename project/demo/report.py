"""
What came of it: counted from the shop's answers, the payment service's record and the
rows, never from what the demo believes to have done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dedupjobs.models import JobAttempt, ProcessedJob, Status
from project.demo import faults, ledger
from project.demo.faults import Faults, Kill
from project.demo.replay import Answer
from project.demo.stack import Stack
from project.shop.models import Invoice
from project.shop.orders import STEPS

RECEIPT_MARK = "Subject: Your receipt for "


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The demo's last line. Deliveries are webhooks and clicks; the next four add up to them."""

    deliveries: int
    accepted: int
    duplicates: int
    mismatches: int
    rejected: int
    charged: int
    charged_twice: int
    lost: int
    events_sent: int
    events_delivered: int
    events_applied: int
    events_applied_twice: int
    worker_kills: int
    recovery_seconds_max: float | None
    seconds: float

    @property
    def good(self) -> bool:
        once = self.charged_twice == 0 and self.events_applied_twice == 0
        return once and self.lost == 0 and self.events_applied == self.events_sent

    def line(self) -> str:
        return json.dumps(asdict(self))


def numbers(answers: list[Answer], struck: Faults, stack: Stack, seconds: float) -> Numbers:
    verdicts = Counter(answer.verdict for answer in answers)
    charged = Counter(charge["order"] for charge in faults.charges())
    entries = ledger.entries(stack.ledger)
    recoveries = [recovery_seconds(kill) for kill in struck.kills]
    return Numbers(
        deliveries=len(answers),
        accepted=verdicts["accepted"],
        duplicates=verdicts["duplicates"],
        mismatches=verdicts["mismatches"],
        rejected=verdicts["rejected"],
        charged=len(charged),
        charged_twice=sum(times > 1 for times in charged.values()),
        lost=len(lost_payments(answers, charged)),
        events_sent=ledger.sent(),
        events_delivered=ledger.delivered(),
        events_applied=len(entries),
        events_applied_twice=sum(times > 1 for times in entries.values()),
        worker_kills=len(struck.kills),
        recovery_seconds_max=max((one for one in recoveries if one is not None), default=None),
        seconds=round(seconds, 1),
    )


def lost_payments(answers: list[Answer], charged: Counter[str]) -> set[str]:
    """
    Return the payments that should be done and are not: never accepted (the provider got no
    answer at all), not charged, or with a job that has not succeeded.
    """
    wanted = {answer.payment_id for answer in answers if answer.payment_id}
    succeeded = Counter(
        key.partition(":")[2]
        for key in ProcessedJob.objects.filter(
            name__startswith="shop.", status=Status.SUCCEEDED
        ).values_list("key", flat=True)
    )
    return {one for one in wanted if not charged[one] or succeeded[one] != len(STEPS)}


def recovery_seconds(kill: Kill) -> float | None:
    """Return the time from the kill to the success of the job that was hit."""
    row = ProcessedJob.objects.get(pk=kill.job_id)
    if row.status != Status.SUCCEEDED or row.finished_at is None:
        return None
    took: float = (row.finished_at - kill.at).total_seconds()
    return round(took, 1)


def table(found: Numbers, answers: list[Answer], struck: Faults, stack: Stack) -> str:
    origins = Counter(answer.origin for answer in answers)
    statuses = Counter(answer.status for answer in answers)
    rows: list[tuple[str, object, str]] = [
        ("webhook deliveries", origins["webhook"], "recorded, replayed over HTTP"),
        ("button clicks", origins["button"], "two at once on each page"),
        ("", "", ""),
        ("accepted", found.accepted, "the first of its payment"),
        ("duplicates", found.duplicates, "recognised, answered with the first one's order"),
        ("mismatches", found.mismatches, "same payment, another amount: 409"),
        (
            "rejected",
            found.rejected,
            f"{statuses[400]} malformed: 400, {statuses[401]} forged: 401",
        ),
        ("unexpected answers", len(unexpected(answers)), _few(unexpected(answers))),
        ("", "", ""),
        ("charged", found.charged, "payments in the payment service's own record"),
        ("charged twice", found.charged_twice, ""),
        ("lost", found.lost, "accepted, but not charged, receipted and invoiced"),
        ("receipts mailed", receipts_mailed(stack), "at least once each"),
        ("invoices booked", Invoice.objects.count(), "exactly once each"),
        ("", "", ""),
        ("events sent", found.events_sent, "order.paid, with the invoice's transaction"),
        ("events delivered", found.events_delivered, "to a Redis stream"),
        ("events applied", found.events_applied, "by the ledger, a service of its own"),
        ("events applied twice", found.events_applied_twice, ""),
        ("", "", ""),
        ("attempts", JobAttempt.objects.count(), _endings()),
    ]
    rows += [
        (f"kill -9 {kill.what}", _seconds(kill), "until its job had succeeded, queue included")
        for kill in struck.kills
    ]
    rows += [
        ("Redis wiped", f"{struck.waiting_at_wipe} jobs", "were waiting in it"),
        ("took", f"{found.seconds} s", "from the first process to here"),
    ]
    return "\n".join(f"  {label:<32}{value:>9}   {note}".rstrip() for label, value, note in rows)


def unexpected(answers: Iterable[Answer]) -> list[str]:
    return [
        f"{one.origin} {one.payment_id}: {one.status or 'no answer'} instead of {one.expected}"
        for one in answers
        if one.status != one.expected
    ]


def receipts_mailed(stack: Stack) -> int:
    return sum(
        mail.read_text(errors="replace").count(RECEIPT_MARK)
        for mail in stack.mail_folder.glob("*.log")
    )


def _endings() -> str:
    endings = Counter(JobAttempt.objects.values_list("outcome", flat=True))
    return ", ".join(f"{count} {ending or 'open'}" for ending, count in endings.most_common())


def _seconds(kill: Kill) -> str:
    seconds = recovery_seconds(kill)
    return "never" if seconds is None else f"{seconds} s"


def _few(sentences: list[str]) -> str:
    return "; ".join(sentences[:3])
