"""Makes the secrets and signatures of webhooks, by the specification Standard Webhooks (`v1`: HMAC-SHA256).

github.com/standard-webhooks/standard-webhooks
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> bytes:
    """A random secret. The database stores these bytes, sealed. The owner gets the text that `secret_text` returns."""
    return secrets.token_bytes(_SECRET_BYTES)


def secret_text(secret: bytes) -> str:
    """The secret as the text that its owner gets and stores."""
    return PREFIX + base64.b64encode(secret).decode()


def signature(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """One signature for each key (secret), separated by spaces. After a rotation there are two keys, the new and the
    old, and a receiver accepts the signature of either.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join("v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys)
