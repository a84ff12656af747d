"""
Signatures over what comes back from Redis, so that somebody who can write there is not believed.

HMAC-SHA256 (RFC 2104) with a key from SECRET_KEY; those in SECRET_KEY_FALLBACKS are accepted,
so that a change of keys loses nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from django.conf import settings

DIGITS = 32  # hex digits, 128 bits


def sign(purpose: str, text: str) -> str:
    """Return the signature of ``text``; ``purpose`` keeps it from being used elsewhere."""
    return _signature(settings.SECRET_KEY, purpose, text)


def is_genuine(purpose: str, text: str, signature: str) -> bool:
    """Whether a process with one of our secret keys has signed ``text`` for this purpose."""
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    given = signature.encode()
    return any(hmac.compare_digest(_signature(k, purpose, text).encode(), given) for k in keys)


def _signature(secret: str | bytes, purpose: str, text: str) -> str:
    message = f"{purpose}\n{text}".encode("utf-8", "surrogatepass")
    return hmac.digest(_key(secret), message, "sha256").hex()[:DIGITS]


@lru_cache(maxsize=8)
def _key(secret: str | bytes) -> bytes:
    secret = secret.encode() if isinstance(secret, str) else secret
    return hashlib.sha256(b"dedupjobs:" + secret).digest()
