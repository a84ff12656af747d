"""For processes that tests start to consume: named in their AUTODISCOVER."""

from __future__ import annotations

from tests.app import events

events.register()
