"""The container that the open toolchain packages a model in: a manifest, and the parts that it names by sha256.

    8 bytes   magic, "LHNEF" 0 0 2
    8 bytes   length of the manifest, big-endian
    32 bytes  sha256 of the manifest
    32 bytes  Ed25519 public key of who signed it, or zeros
    64 bytes  signature of everything above and of the manifest, or zeros
    n bytes   the manifest: JSON in UTF-8
    parts     one behind the other, in the manifest's order

It is no binary of a chip's vendor, and its magic says so to whoever takes it for one. The digests find damage; the
signature, which covers every part by its digest in the manifest, says which installation packaged it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from leasehold.domain.errors import LeaseholdError

MAGIC = b"LHNEF\x00\x00\x02"
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_DIGESTED = len(MAGIC) + 8 + 32
_HEAD = _DIGESTED + _KEY_BYTES + _SIGNATURE_BYTES
_MAX_MANIFEST = 1024 * 1024
_CHUNK = 1024 * 1024


class BadContainer(LeaseholdError):
    """Not a container of ours, a damaged one, or one that nobody trusted has signed."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container whose manifest and signature have been checked; a part is checked when it is read."""

    path: Path
    manifest: Mapping[str, Any]
    start: int  # of the first part, in bytes
    signed_by: bytes | None  # the public key of a signature that is good

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
        file.write(MAGIC + len(manifest).to_bytes(8, "big") + hashlib.sha256(manifest).digest())
        file.write(bytes(_KEY_BYTES + _SIGNATURE_BYTES) + manifest)
        for part in parts.values():
            for chunk in _chunks(part):
                file.write(chunk)


def is_container(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def sign(path: Path, key: Ed25519PrivateKey) -> None:
    """Sign the container in place; the same key gives the same bytes. Raises BadContainer."""
    with path.open("r+b") as file:
        head, raw = _head(file)
        public = key.public_key().public_bytes_raw()
        signature = key.sign(head[:_DIGESTED] + public + raw)
        file.seek(_DIGESTED)
        file.write(public + signature)


def read(path: Path, trusted: Collection[bytes] | None = None) -> Container:
    """Open a container and check its manifest, its length and its signature, if it has one.

    `trusted`: raw public keys; one of them must have signed it. Raises BadContainer.
    """
    with path.open("rb") as file:
        head, raw = _head(file)
        manifest: dict[str, Any] = orjson.loads(raw)
        start = file.tell()
        if file.seek(0, os.SEEK_END) != start + sum(part["size"] for part in manifest["parts"]):
            raise BadContainer("its parts do not fill it")
    signer = _signer(head, raw)
    if trusted is not None and signer not in trusted:
        raise BadContainer("nobody who is trusted has signed it")
    return Container(path, manifest, start, signer)


def _head(file: BinaryIO) -> tuple[bytes, bytes]:
    """What comes before the manifest, and the manifest's bytes."""
    head = file.read(_HEAD)
    if len(head) < _HEAD or not head.startswith(MAGIC):
        raise BadContainer("not a container of the open toolchain")
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "big")
    if length > _MAX_MANIFEST:
        raise BadContainer("its manifest is too large")
    raw = file.read(length)
    if hashlib.sha256(raw).digest() != head[len(MAGIC) + 8 : _DIGESTED]:
        raise BadContainer("its manifest is damaged")
    return head, raw


def _signer(head: bytes, raw: bytes) -> bytes | None:
    public, signature = head[_DIGESTED : _DIGESTED + _KEY_BYTES], head[_DIGESTED + _KEY_BYTES :]
    if not any(public + signature):
        return None
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, head[:_DIGESTED] + public + raw)
    except (InvalidSignature, ValueError):
        raise BadContainer("its signature is not good") from None
    return public


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
