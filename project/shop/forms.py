from __future__ import annotations

import uuid
from decimal import Decimal

from django import forms
from django.core.signing import BadSignature, Signer

UNIT_PRICE = Decimal("9.90")
_signer = Signer(salt="shop.buy")


class BuyForm(forms.Form):
    """
    One order. The hidden token is made when the page is made, and becomes the payment's id:
    so two clicks on one page are one order, and two pages are two.
    """

    token = forms.CharField(widget=forms.HiddenInput)
    quantity = forms.IntegerField(min_value=1, max_value=9, initial=1)
    email = forms.EmailField(
        label="E-mail for the receipt",
        initial="you@example.com",
        widget=forms.EmailInput(attrs={"autocomplete": "email"}),
    )

    @classmethod
    def fresh(cls) -> BuyForm:
        # Signed, so that nobody can order under the id of somebody else's payment.
        return cls(initial={"token": _signer.sign(f"web_{uuid.uuid4().hex}")})

    def clean_token(self) -> str:
        try:
            return _signer.unsign(self.cleaned_data["token"])
        except BadSignature as error:
            raise forms.ValidationError("This page is out of date. Load it again.") from error

    @property
    def amount(self) -> Decimal:
        return UNIT_PRICE * int(self.cleaned_data["quantity"])
