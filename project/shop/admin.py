from __future__ import annotations

from django.contrib import admin

from project.shop.models import Invoice, Order


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("payment_id", "amount", "email", "source", "charge_id", "created_at")
    list_filter = ("source",)
    search_fields = ("payment_id", "email", "charge_id")
    readonly_fields = ("charge_id", "charged_at", "created_at")


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("number", "order", "amount", "booked_at")
    list_select_related = ("order",)
    autocomplete_fields = ("order",)
    search_fields = ("order__payment_id",)
