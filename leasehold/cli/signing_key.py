"""Makes the key pair that signs packages of converted models, for `leasehold signing-key`."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def make_signing_key() -> dict[str, str]:
    """A new Ed25519 key pair, `private` and `public`, in base64. It is stored nowhere."""
    key = Ed25519PrivateKey.generate()
    pair = {"private": key.private_bytes_raw(), "public": key.public_key().public_bytes_raw()}
    return {name: base64.b64encode(raw).decode() for name, raw in pair.items()}
