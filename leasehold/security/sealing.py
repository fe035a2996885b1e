"""Encrypts clients' secrets for the database, and signs URLs, with the installation's sealing keys.

The first key of the setting `sealing_keys` encrypts and signs. Every key decrypts and verifies. The section "Secrets in
files" of docs/operations/index.md says how to rotate the keys.
"""

from __future__ import annotations

import base64
import hmac

import structlog
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from leasehold.domain.errors import LeaseholdError, Unavailable
from leasehold.settings import Settings

log = structlog.get_logger(__name__)


class Unsealable(LeaseholdError):
    """The sealed bytes are damaged, or the installation no longer has the key that sealed them."""


class Sealing:
    """The installation's sealing keys."""

    def __init__(self, settings: Settings) -> None:
        self._setting = settings.sealing_keys
        self._parsed_text = ""  # the text of the setting when it was last parsed
        self._fernet: MultiFernet | None = None
        self._signing_keys: list[bytes] = []
        self._current_keys()

    @property
    def has_key(self) -> bool:
        """Whether the installation has a key."""
        return self._current_keys() is not None

    def sign(self, purpose: str, text: bytes) -> str:
        """A signature of `text` that is valid for `purpose` only. It is deterministic and fits into a URL.

        Raises Unavailable when the installation has no key.
        """
        self._required_keys()
        return _signature(self._signing_keys[0], purpose, text)

    def verifies(self, purpose: str, text: bytes, signature: str) -> bool:
        """Whether one of the keys made the signature. Raises Unavailable when the installation has no key."""
        self._required_keys()
        signature_bytes = signature.encode()  # as bytes, because compare_digest refuses text that is not ASCII
        return any(
            hmac.compare_digest(_signature(key, purpose, text).encode(), signature_bytes) for key in self._signing_keys
        )

    def require(self) -> None:
        """Raises Unavailable when the installation has no key."""
        self._required_keys()

    def seal(self, secret: bytes) -> bytes:
        """Encrypt the secret. Raises Unavailable when the installation has no key."""
        return self._required_keys().encrypt(secret)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt the secret. Raises Unsealable, or Unavailable when the installation has no key."""
        try:
            return self._required_keys().decrypt(sealed)
        except InvalidToken:
            raise Unsealable("no key of this installation opens this secret") from None

    def _required_keys(self) -> MultiFernet:
        if (fernet := self._current_keys()) is None:
            raise Unavailable("sealing_not_configured", "This installation has no LEASEHOLD_SEALING_KEYS.")
        return fernet

    def _current_keys(self) -> MultiFernet | None:
        """The keys of the setting, or None if the setting has no keys. The setting may come from a file that changes.
        So a changed text is parsed again. If the changed text has a malformed key, the earlier keys stay in force.
        """
        text = self._setting.get_secret_value()
        if text == self._parsed_text:
            return self._fernet
        keys = [key.strip() for key in text.split(",") if key.strip()]
        try:
            fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None
        except ValueError:
            if self._fernet is None:
                raise
            log.warning("the new LEASEHOLD_SEALING_KEYS are not used: one of them is not a key")
        else:
            self._fernet = fernet
            self._signing_keys = [key.encode() for key in keys]
        self._parsed_text = text  # also a text with a malformed key, so that it causes only one warning
        return self._fernet


def _signature(key: bytes, purpose: str, text: bytes) -> str:
    # Each purpose has a key of its own, so a signature for one purpose is not valid for another.
    purpose_key = hmac.digest(key, f"leasehold {purpose}".encode(), "sha256")
    return base64.urlsafe_b64encode(hmac.digest(purpose_key, text, "sha256")).decode().rstrip("=")
