"""Secrets of clients at rest: encrypted with the installation's keys, of which the newest seals and all open."""

from __future__ import annotations

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from leasehold.errors import LeaseholdError, Unavailable
from leasehold.settings import Settings


class Unsealable(LeaseholdError):
    """Sealed with a key that is not among the installation's, or damaged."""


class Sealing:
    """Rotation: put a new key before the others, and remove an old one once nothing is sealed with it."""

    def __init__(self, settings: Settings) -> None:
        keys = [key.strip() for key in settings.sealing_keys.get_secret_value().split(",") if key.strip()]
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

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
