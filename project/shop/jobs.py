"""
What the shop does in the background: charge, then send a receipt and book an invoice.

    charge        calls a service outside our database, in a step: asks it before it charges again
    send_receipt  sends an e-mail: twice does no harm, so it takes no precautions
    book_invoice  writes our own database: in the transaction that ends the job
"""

from __future__ import annotations

from django.conf import settings
from django.core.mail import send_mail
from django.db import IntegrityError, transaction
from django.utils import timezone

from dedupjobs import FOREVER, Done, NotDone, current_attempt, job
from project.shop import payments
from project.shop.models import Invoice, Order


@job(key="payment:{payment_id}", unique_for=FOREVER, timeout=30)
def charge(*, payment_id: str, amount: str) -> dict[str, str]:
    """
    Charge the card once, although the service charges as often as it is asked.

    A worker may die after the service has charged and before we have noted it; the step is
    in doubt then, and the next attempt asks the service by a reference that stays the same
    over all attempts. So it does after an error, which may have come after the charge. Once
    the charge is noted, no attempt asks or charges again.

    Two windows remain, and no code on this side can close them; only a service that itself
    refuses a second charge for one reference can:
    - an attempt died after sending its charge, and the request is still on its way (sent,
      but not yet received by the service) when the next attempt asks;
    - an attempt was frozen between the beginning of the step and the charge for longer than
      its lease, and goes on after the next attempt has asked.
    """
    attempt = current_attempt()
    made = attempt.step(
        "charge card",
        payments.make_charge,
        reference=attempt.idempotency_key("charge card"),
        order=payment_id,
        amount=amount,
        check=_look_up_charge,
    )
    _note_charge(payment_id, amount, made)
    return {"charge": made["id"]}


def _look_up_charge(reference: str) -> Done | NotDone:
    made = payments.find_charge(reference)
    return NotDone() if made is None else Done(made)


def _note_charge(payment_id: str, amount: str, made: payments.Charge) -> None:
    """Note the charge and ask for what follows from it, all or nothing; twice does no harm."""
    with transaction.atomic():
        Order.objects.filter(payment_id=payment_id).update(
            charge_id=made["id"], charged_at=timezone.now()
        )
        send_receipt.enqueue(payment_id=payment_id)
        book_invoice.enqueue(payment_id=payment_id, amount=amount)


@job(key="receipt:{payment_id}", unique_for=FOREVER, timeout=30)
def send_receipt(*, payment_id: str) -> None:
    """
    Mail the receipt: at least once.

    A worker killed between the mail server's answer and our note sends it again. That is
    the right side to err on for a receipt; what must not happen twice looks like ``charge``.
    """
    order = Order.objects.get(payment_id=payment_id)
    send_mail(
        subject=f"Your receipt for {order.payment_id}",
        message=f"We have charged {order.amount} EUR. Thank you!",
        from_email=settings.DEFAULT_FROM_EMAIL,
        recipient_list=[order.email],
    )


# SQLite has one writer: a transaction that could outlast a third of the lease would starve
# the beats of all jobs. One second is a third of three, and the demo's lease is five.
@job(key="invoice:{payment_id}", unique_for=FOREVER, atomic=True, timeout=1)
def book_invoice(*, payment_id: str, amount: str) -> dict[str, int]:
    """Book the invoice exactly once: it commits together with the job's own ending."""
    order = Order.objects.get(payment_id=payment_id)
    try:
        with transaction.atomic():  # a savepoint: a refused INSERT must not spoil the job's own
            invoice = Invoice.objects.create(order=order, amount=amount)
    except IntegrityError:
        # Somebody booked it by hand, which the table's own constraint tells us. The invoice
        # exists, which is all this job is for: nothing failed.
        invoice = Invoice.objects.get(order=order)
    return {"invoice": invoice.pk}
