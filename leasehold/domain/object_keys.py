"""Keys of objects in the store. They are deterministic: each attempt of a step writes the same keys."""

from __future__ import annotations

import re
from uuid import UUID

from leasehold.domain.errors import Permanent

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # the text between two slashes of an output's name
_MAX_CHARACTERS = 512  # of a key; S3 allows 1024 bytes, and our keys are ASCII


def media_prefix(media_id: UUID) -> str:
    return f"media/{media_id}"


def original_key(media_id: UUID, extension: str) -> str:
    """The key to which a client uploads its picture. The API chooses the key, never the client."""
    return output_key(media_prefix(media_id), f"original.{extension}")


def output_key(prefix: str, name: str) -> str:
    """`{prefix}/{name}`. Raises Permanent `bad_output` for a name that is empty, absolute or too long, or has `..`."""
    parts = name.split("/")
    if not all(_PART.fullmatch(part) for part in parts) or len(prefix) + len(name) >= _MAX_CHARACTERS:
        raise Permanent("bad_output", f"an output cannot be named {name[:100]!r}")
    return f"{prefix}/{name}"
