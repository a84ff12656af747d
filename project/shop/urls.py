from __future__ import annotations

from django.urls import path

from project.shop import views

app_name = "shop"
urlpatterns = [
    path("", views.product, name="product"),
    path("buy/", views.buy, name="buy"),
    path("orders/", views.order_list, name="orders"),
    path("orders/<slug:payment_id>/", views.order, name="order"),
    path("webhooks/payments/", views.payment_webhook, name="payment-webhook"),
]
