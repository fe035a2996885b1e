"""Signs finished packages. The worker itself calls `sign_package`, so that the child process that packages an untrusted
model never sees the key.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from leasehold.domain.errors import DeclarationError
from leasehold.pipelines.conversion import nef
from leasehold.settings import Settings

#: The file of a package that `sign_package` signs.
_NEF = "output/out.nef"


def sign_package(settings: Settings, files: Mapping[str, Path]) -> None:
    """Sign the package, if the installation has a key. Only packages of the platform's own toolchain are containers,
    which can be signed. A package of the vendor's toolchain stays unchanged. Raises DeclarationError for an invalid
    key.
    """
    text = settings.conversion_signing_key.get_secret_value()
    if text and nef.is_container(files[_NEF]):
        nef.sign(files[_NEF], key_of(text))


def key_of(text: str) -> Ed25519PrivateKey:
    """The key that the setting holds. Raises DeclarationError for a text that is not a key."""
    try:
        return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error):
        raise DeclarationError("conversion_signing_key is not 32 bytes in base64") from None
