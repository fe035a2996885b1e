"""Secrets of clients at rest: encrypted with the installation's keys, of which the newest seals and all open."""

from __future__ import annotations

import base64
import hmac

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from leasehold.domain.errors import LeaseholdError, Unavailable
from leasehold.settings import Settings


class Unsealable(LeaseholdError):
    """Sealed with a key that is not among the installation's, or damaged."""


class Sealing:
    """Rotation: put a new key before the others, and remove an old one once nothing is sealed with it."""

    def __init__(self, settings: Settings) -> None:
        keys = [key.strip() for key in settings.sealing_keys.get_secret_value().split(",") if key.strip()]
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None
        self._signing = [key.encode() for key in keys]

    @property
    def possible(self) -> bool:
        """Whether the installation has a key."""
        return self._fernet is not None

    def sign(self, purpose: str, text: bytes) -> str:
        """The same each time, fit for a URL, and of use for nothing but `purpose`. Raises Unavailable."""
        self._keys()
        return _signature(self._signing[0], purpose, text)

    def verifies(self, purpose: str, text: bytes, signature: str) -> bool:
        """By any of the keys. Raises Unavailable."""
        self._keys()
        said = signature.encode()  # of text, only ASCII can be compared
        return any(hmac.compare_digest(_signature(key, purpose, text).encode(), said) for key in self._signing)

    def seal(self, secret: bytes) -> bytes:
        """Raises Unavailable when the installation has no key."""
        return self._keys().encrypt(secret)

    def open(self, sealed: bytes) -> bytes:
        """Raises Unsealable, or Unavailable when the installation has no key."""
        try:
            return self._keys().decrypt(sealed)
        except InvalidToken:
            raise Unsealable("no key of this installation opens it") from None

    def _keys(self) -> MultiFernet:
        if self._fernet is None:
            raise Unavailable("sealing_not_configured", "This installation has no LEASEHOLD_SEALING_KEYS.")
        return self._fernet


def _signature(key: bytes, purpose: str, text: bytes) -> str:
    own = hmac.digest(key, f"leasehold {purpose}".encode(), "sha256")  # a key for this purpose alone
    return base64.urlsafe_b64encode(hmac.digest(own, text, "sha256")).decode().rstrip("=")
