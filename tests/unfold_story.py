"""A story that a process of its own tells, since a theme is chosen in INSTALLED_APPS."""

from __future__ import annotations

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.test import Client  # noqa: E402

from dedupjobs.models import Operation, Status  # noqa: E402
from tests.admin_rows import address, fresh, make, try_of  # noqa: E402

PRESENT = {
    "changelist": ("Raise the attempt limit", "stuck: lease expired", "dj-dead"),
    "change": ("dead: failed", "Who says what", "<svg", "Retry"),
    "locks": ("A lock only filters",),
    "history": (),
}


def tell() -> None:
    row = make(Status.DEAD, failures=5, error="no luck")
    try_of(row, outcome="FAILED", ended_at=row.created_at)
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    for page, words in PRESENT.items():
        args = [row.pk] if page in ("change", "history") else []
        answer = client.get(address(page, *args))
        text = answer.content.decode()
        assert answer.status_code == 200, page
        assert "unfold" in text, page
        for word in words:
            assert word in text, (page, word)
    chosen = {"action": "retry", "_selected_action": [row.pk]}
    assert 'name="reason"' in client.post(address("changelist"), chosen).content.decode()
    across = client.post(address("changelist"), {**chosen, "select_across": "1"})
    assert "1 job matches" in across.content.decode()
    seen = f"{row.pk}:{fresh(row).version}:DEAD"
    form = {"action": "retry", "row": seen, "confirmed": "1", "reason": "because"}
    assert client.post(address("operate"), form, follow=True).status_code == 200
    assert fresh(row).status == "PENDING"
    started = client.post(address("bulk_start"), {**form, "state": "PENDING"}, follow=True)
    assert "waiting for a worker" in started.content.decode()
    print(f"told under unfold: {Operation.objects.count()} operation")


if __name__ == "__main__":
    tell()
