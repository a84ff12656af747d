"""What a person of a model of one's own does in the admin; told by a process of its own."""

from __future__ import annotations

import django

django.setup()

from django.contrib.admin.models import LogEntry  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.test import Client  # noqa: E402

from dedupjobs.models import BulkOperation, Operation, Status  # noqa: E402
from dedupjobs.testing import run_pending  # noqa: E402
from tests.admin_rows import address, fresh, make  # noqa: E402
from tests.people.models import Person  # noqa: E402


def main() -> None:
    call_command("migrate", run_syncdb=True, verbosity=0)
    ada = Person.objects.create_superuser("ada@example.com")
    client = Client()
    client.force_login(ada)
    one, others = make(Status.DEAD), [make(Status.DEAD) for _ in range(3)]
    form = {"action": "retry", "confirmed": "1", "reason": "because"}
    seen = f"{one.pk}:{one.version}:DEAD"
    assert client.post(address("operate"), {**form, "row": seen}, follow=True).status_code == 200
    assert fresh(one).status == "PENDING"
    client.post(address("bulk_start"), {**form, "state": "DEAD"}, follow=True)
    run_pending(name="dedupjobs.bulk")
    assert BulkOperation.objects.get().changed == len(others)
    for page, args in (("changelist", []), ("change", [one.pk]), ("history", [one.pk])):
        assert client.get(address(page, *args)).status_code == 200, page
    assert {o.by for o in Operation.objects.all()} == {"ada@example.com"}
    assert {e.user for e in LogEntry.objects.all()} == {ada}
    print(f"told: {Operation.objects.count()} operations")


if __name__ == "__main__":
    main()
