"""The container that the open toolchain packages a model in: a manifest, and the parts that it names by sha256.

    8 bytes   magic, "LHNEF" 0 0 1
    8 bytes   length of the manifest, big-endian
    32 bytes  sha256 of the manifest
    n bytes   the manifest: JSON in UTF-8
    parts     one behind the other, in the manifest's order

It is no binary of a chip's vendor, and its magic says so to whoever takes it for one. The digests find damage; who
made the file is for the store's access rules to say.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from leasehold.errors import LeaseholdError

MAGIC = b"LHNEF\x00\x00\x01"
_HEAD = len(MAGIC) + 8 + 32
_MAX_MANIFEST = 1024 * 1024
_CHUNK = 1024 * 1024


class BadContainer(LeaseholdError):
    """Not a container of ours, or a damaged one."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container whose manifest has been checked; a part is checked when it is read."""

    path: Path
    manifest: Mapping[str, Any]
    start: int  # of the first part, in bytes

    def part(self, name: str) -> bytes:
        """The part's bytes. Raises KeyError when there is none, BadContainer when it is damaged."""
        at = self.start
        for part in self.manifest["parts"]:
            if part["name"] == name:
                with self.path.open("rb") as file:
                    file.seek(at)
                    data = file.read(part["size"])
                if hashlib.sha256(data).hexdigest() != part["sha256"]:
                    raise BadContainer(f"part {name} is damaged")
                return data
            at += part["size"]
        raise KeyError(name)


def write(path: Path, facts: Mapping[str, Any], parts: Mapping[str, Path]) -> None:
    """Write a container of `parts`; the same facts and parts give the same bytes."""
    listed = [{"name": name, "size": file.stat().st_size, "sha256": _sha256(file)} for name, file in parts.items()]
    manifest = orjson.dumps({**facts, "parts": listed}, option=orjson.OPT_SORT_KEYS)
    with path.open("wb") as file:
        file.write(MAGIC + len(manifest).to_bytes(8, "big") + hashlib.sha256(manifest).digest() + manifest)
        for part in parts.values():
            for chunk in _chunks(part):
                file.write(chunk)


def read(path: Path) -> Container:
    """Open a container and check its manifest and its length. Raises BadContainer."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
        if len(head) < _HEAD or not head.startswith(MAGIC):
            raise BadContainer("not a container of the open toolchain")
        manifest = _manifest(file, head)
        start = file.tell()
        if file.seek(0, os.SEEK_END) != start + sum(part["size"] for part in manifest["parts"]):
            raise BadContainer("its parts do not fill it")
    return Container(path, manifest, start)


def _manifest(file: BinaryIO, head: bytes) -> dict[str, Any]:
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "big")
    if length > _MAX_MANIFEST:
        raise BadContainer("its manifest is too large")
    raw = file.read(length)
    if hashlib.sha256(raw).digest() != head[-32:]:
        raise BadContainer("its manifest is damaged")
    manifest: dict[str, Any] = orjson.loads(raw)
    return manifest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
