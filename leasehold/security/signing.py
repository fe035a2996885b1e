"""Signatures of Standard Webhooks (github.com/standard-webhooks/standard-webhooks, `v1`: HMAC-SHA256)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


def shown(secret: bytes) -> str:
    """As its owner keeps it."""
    return PREFIX + base64.b64encode(secret).decode()


def signature(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """One signature a key, separated by spaces: while secrets rotate the receiver takes either."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join("v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys)
