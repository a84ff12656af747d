"""
The shop's pages, and the webhook. Nothing is ever bought by a GET.
"""

from __future__ import annotations

from http import HTTPStatus

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe

from dedupjobs.exceptions import PayloadMismatch
from project.shop import orders, webhooks
from project.shop.forms import UNIT_PRICE, BuyForm
from project.shop.models import Order

LISTED_ORDERS = 50


@require_safe
def product(request: HttpRequest) -> HttpResponse:
    context = {"form": BuyForm.fresh(), "unit_price": UNIT_PRICE}
    return render(request, "shop/product.html", context)


@require_POST
def buy(request: HttpRequest) -> HttpResponse:
    """Place the order; the second click on the same page ends at the same order."""
    form = BuyForm(request.POST)
    if not form.is_valid():
        context = {"form": form, "unit_price": UNIT_PRICE}
        return render(request, "shop/product.html", context, status=HTTPStatus.BAD_REQUEST)
    payment_id = form.cleaned_data["token"]
    try:
        outcome = orders.place(
            payment_id=payment_id,
            amount=form.amount,
            email=form.cleaned_data["email"],
            source=Order.Source.BUTTON,
        )
    except PayloadMismatch:
        context = {"order": get_object_or_404(Order, payment_id=payment_id)}
        return render(request, "shop/mismatch.html", context, status=HTTPStatus.CONFLICT)
    page = redirect("shop:order", payment_id)
    if not outcome.created:
        page["Location"] += "?again=1"
    return page


@require_safe
def order(request: HttpRequest, payment_id: str) -> HttpResponse:
    found = get_object_or_404(Order, payment_id=payment_id)
    [progress] = orders.progress_of([found])
    context = {"order": found, "progress": progress, "again": "again" in request.GET}
    return render(request, "shop/order.html", context)


@require_safe
def order_list(request: HttpRequest) -> HttpResponse:
    context = {
        "listed": orders.progress_of(Order.objects.all()[:LISTED_ORDERS]),
        "total": Order.objects.count(),
    }
    return render(request, "shop/order_list.html", context)


@csrf_exempt  # the signature proves the sender
@require_POST
def payment_webhook(request: HttpRequest) -> HttpResponse:
    """Answer 202 as soon as the order is in the database; the rest is the jobs' business."""
    signature = request.headers.get("X-Signature", "")
    if not webhooks.is_genuine(request.body, signature, settings.WEBHOOK_SECRET):
        return _refuse(HTTPStatus.UNAUTHORIZED, "the signature does not fit the body")
    try:
        event = webhooks.parse(request.body)
        outcome = orders.place(
            payment_id=event.payment_id,
            amount=event.amount,
            email=event.email,
            source=Order.Source.WEBHOOK,
        )
    except webhooks.Malformed as error:
        return _refuse(HTTPStatus.BAD_REQUEST, str(error))
    except PayloadMismatch as error:
        return _refuse(HTTPStatus.CONFLICT, str(error))
    answer = {"created": outcome.created, "kind": outcome.kind, "status": outcome.job.status}
    return JsonResponse(answer, status=HTTPStatus.ACCEPTED)


def _refuse(status: HTTPStatus, error: str) -> JsonResponse:
    return JsonResponse({"error": error}, status=status)
