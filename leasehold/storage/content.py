"""Computes digests of local files and reads parts of them. The functions block, so the store calls them in a thread."""

from __future__ import annotations

import hashlib
from pathlib import Path

CHUNK = 1024 * 1024  # the number of bytes that one read of a file returns


def digest_of(path: Path) -> tuple[str, int]:
    """The sha256 and the size of a file. The file is read in pieces, so that a large file needs little memory."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def digest_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_part(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
