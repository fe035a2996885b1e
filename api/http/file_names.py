"""Cleans the file names that clients send. A name is metadata for people, and never a part of an object's key."""

from __future__ import annotations

import unicodedata

MAX_BYTES = 255


def clean_file_name(name: str) -> str:
    """The name in NFC, cut to 255 bytes of UTF-8, without control, formatting and bidirectional characters and without
    lone surrogates. If nothing is left, the name is `unnamed`.
    """
    plain = "".join(
        character
        for character in unicodedata.normalize("NFC", name)
        if unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    ).strip()
    return plain.encode()[:MAX_BYTES].decode(errors="ignore") or "unnamed"
