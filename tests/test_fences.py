"""``FencedModel``: a row that has seen a token refuses every older one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import transaction

from dedupjobs.exceptions import StaleFence
from tests.app.models import Shelf
from tests.rows import together

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf.objects.create(sku="A-1")


def level() -> tuple[int, int]:
    return Shelf.objects.values_list("level", "fence").get()


def test_newer_tokens_and_the_same_one_again_write(shelf: Shelf) -> None:
    for token, wanted in ((5, 1), (5, 2), (9, 3)):
        Shelf.write(token, {"sku": "A-1"}, level=wanted)
        assert level() == (wanted, token)


def test_older_token_is_refused_and_writes_nothing(shelf: Shelf) -> None:
    Shelf.write(9, {"sku": "A-1"}, level=1)
    with pytest.raises(StaleFence, match=r"testapp.Shelf with sku='A-1' has seen token 9, and 8"):
        Shelf.write(8, {"sku": "A-1"}, level=2)
    assert level() == (1, 9)


def test_write_is_one_statement(shelf: Shelf, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        Shelf.write(9, {"sku": "A-1"}, level=1)


def test_saving_writes_all_columns_of_the_row_that_was_read_and_refuses_as_well(
    shelf: Shelf,
) -> None:
    stale = Shelf.objects.get()
    shelf.level, shelf.sku = 4, "A-2"
    shelf.save_fenced(7)
    assert level() == (4, 7)
    assert Shelf.objects.get().sku == "A-2"
    assert shelf.fence == 7
    stale.level = 5
    with pytest.raises(StaleFence, match="pk="):
        stale.save_fenced(6)
    assert level() == (4, 7)
    assert stale.fence == 0


def test_row_that_is_not_there_is_another_error() -> None:
    with pytest.raises(Shelf.DoesNotExist, match=r"no testapp.Shelf with sku='B'"):
        Shelf.write(9, {"sku": "B"}, level=1)


@pytest.mark.parametrize("token", [0, -1, None, "9", 9.0, True])
def test_what_is_no_token_is_refused(shelf: Shelf, token: Any) -> None:
    with pytest.raises(TypeError, match=r"is no token: pass attempt.fence"):
        Shelf.write(token, {"sku": "A-1"}, level=1)
    assert level() == (0, 0)


def test_refusal_leaves_the_callers_transaction_usable(shelf: Shelf) -> None:
    Shelf.write(9, {"sku": "A-1"}, level=1)
    with transaction.atomic():
        with pytest.raises(StaleFence):
            Shelf.write(8, {"sku": "A-1"}, level=2)
        Shelf.write(10, {"sku": "A-1"}, level=3)
    assert level() == (3, 10)


def test_writers_at_once_leave_the_newest_ones_value(shelf: Shelf) -> None:
    def write(token: int) -> None:
        try:
            Shelf.write(token, {"sku": "A-1"}, level=token)
        except StaleFence:
            assert Shelf.objects.get().fence > token

    for first in (1, 11, 21):
        together(*(partial(write, first + n) for n in range(4)))
        assert level() == (first + 3, first + 3)


def test_script_that_the_docs_show_refuses_older_tokens(redis_client: redis.Redis) -> None:
    page = (Path(__file__).parent.parent / "docs" / "steps.md").read_text()
    (script,) = re.findall(r"```lua\n(.*?)```", page, re.DOTALL)
    write = redis_client.register_script(script)
    told = [write(keys=["shelf"], args=[fence, fence * 10]) for fence in (5, 5, 9, 8, 10)]
    assert told == [1, 1, 1, 0, 1]
    assert redis_client.hget("shelf", "value") == b"100"
