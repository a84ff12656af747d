"""
To be told of trouble: what is seen, what of it is an alert, who is told.

``sight`` looks, ``rules`` judge what was seen (each a pure function), ``book`` raises and clears,
once each, ``couriers`` deliver, ``watch`` does it all in a round, in threads of a coordinator that
hold up neither its ticks nor a job.
"""

from __future__ import annotations
