"""
Signatures over what comes back from Redis, so that somebody who can write there is not believed.

Keyed BLAKE2b (RFC 7693) with a key from SECRET_KEY; those in SECRET_KEY_FALLBACKS are accepted,
so that a change of keys loses nothing.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest

from django.conf import settings

BYTES = 16  # 128 bits, as 32 hex digits


def sign(purpose: str, text: str) -> str:
    """Return the signature of ``text``; ``purpose`` keeps it from being used elsewhere."""
    return _signature(settings.SECRET_KEY, f"{purpose}\n{text}".encode())


def is_genuine(purpose: str, text: str, signature: str) -> bool:
    """Whether a process with one of our secret keys has signed ``text`` for this purpose."""
    message = f"{purpose}\n{text}".encode()
    if _fits(settings.SECRET_KEY, message, signature):
        return True
    return any(_fits(key, message, signature) for key in settings.SECRET_KEY_FALLBACKS)


def _fits(secret: str | bytes, message: bytes, signature: str) -> bool:
    return compare_digest(_signature(secret, message).encode(), signature.encode())


def _signature(secret: str | bytes, message: bytes) -> str:
    return blake2b(message, digest_size=BYTES, key=_key(secret)).hexdigest()


@lru_cache(maxsize=8)
def _key(secret: str | bytes) -> bytes:
    secret = secret.encode() if isinstance(secret, str) else secret
    return blake2b(secret, digest_size=32, person=b"dedupjobs").digest()
