"""The file format (LHNEF) of models that the open toolchain packages. A file has one manifest and its parts, and may be
signed.

    8 bytes   magic, "LHNEF" 0 0 2
    8 bytes   length of the manifest, big-endian
    32 bytes  sha256 of the manifest
    32 bytes  Ed25519 public key of the signer, or zeros
    64 bytes  signature of everything above and of the manifest, or zeros
    n bytes   the manifest: JSON in UTF-8
    parts     one after another, in the order of the manifest

The chip vendor's NEF is another format, with other magic bytes. The manifest has the sha256 of each part, so a reader
notices a damaged part. The signature shows which installation packaged the model. The signature covers the manifest,
which has the sha256 of each part, so it protects the parts, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from leasehold.domain.errors import LeaseholdError

#: The first bytes of each file.
MAGIC = b"LHNEF\x00\x00\x02"
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_KEY_POSITION = len(MAGIC) + 8 + 32  # the position of the public key in the file
#: How many bytes come before the manifest.
_HEAD_BYTES = _KEY_POSITION + _KEY_BYTES + _SIGNATURE_BYTES
_MAX_MANIFEST_BYTES = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


class BadContainer(LeaseholdError):
    """The file is not a container of the open toolchain, is damaged, or is not signed by a trusted key."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container with a checked manifest and signature. The parts are not checked yet: `part` reads one part and
    checks it.
    """

    path: Path
    manifest: Mapping[str, Any]
    start: int  # the position of the first part, in bytes
    signed_by: bytes | None  # the public key of the valid signature, if there is one

    def part(self, name: str) -> bytes:
        """The bytes of the part. Raises KeyError for an unknown name, and BadContainer if the part is damaged."""
        position = self.start
        for part in self.manifest["parts"]:
            if part["name"] == name:
                with self.path.open("rb") as file:
                    file.seek(position)
                    data = file.read(part["size"])
                if hashlib.sha256(data).hexdigest() != part["sha256"]:
                    raise BadContainer(f"part {name} is damaged")
                return data
            position += part["size"]
        raise KeyError(name)


def write(path: Path, facts: Mapping[str, Any], parts: Mapping[str, Path]) -> None:
    """Write an unsigned container of `parts` (name: file). The manifest has the fields `facts` about the model, and the
    name, size and sha256 of each part. The same facts and parts give the same bytes.

    Raises BadContainer if the manifest would be too large for `read`.
    """
    part_records = [
        {"name": name, "size": file.stat().st_size, "sha256": _sha256(file)} for name, file in parts.items()
    ]
    manifest = orjson.dumps({**facts, "parts": part_records}, option=orjson.OPT_SORT_KEYS)
    if len(manifest) > _MAX_MANIFEST_BYTES:
        raise BadContainer(f"the manifest has more than {_MAX_MANIFEST_BYTES} bytes")
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
    """Sign the container in place. A second call with the same key gives the same bytes. Raises BadContainer."""
    with path.open("r+b") as file:
        head, manifest_bytes = _read_head(file)
        public_key = key.public_key().public_bytes_raw()
        signature = key.sign(head[:_KEY_POSITION] + public_key + manifest_bytes)
        file.seek(_KEY_POSITION)
        file.write(public_key + signature)


def read(path: Path, trusted: Collection[bytes] | None = None) -> Container:
    """Open a container. Check its manifest, its length and, if it is signed, its signature.

    `trusted`: raw public keys. One of these keys must have signed the container. With None, the container may be
    unsigned, or have the valid signature of any key. Raises BadContainer.
    """
    with path.open("rb") as file:
        head, manifest_bytes = _read_head(file)
        manifest = _parse_manifest(manifest_bytes)
        start = file.tell()
        if file.seek(0, os.SEEK_END) != start + sum(part["size"] for part in manifest["parts"]):
            raise BadContainer("the length of the container is not the sum of its parts")
    signer = _verify_signature(head, manifest_bytes)
    if trusted is not None and signer not in trusted:
        raise BadContainer("no trusted key has signed the container")
    return Container(path, manifest, start, signer)


def _read_head(file: BinaryIO) -> tuple[bytes, bytes]:
    """The bytes before the manifest, and the bytes of the manifest. Raises BadContainer."""
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(MAGIC):
        raise BadContainer("not a container of the open toolchain")
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "big")
    if length > _MAX_MANIFEST_BYTES:
        raise BadContainer("the manifest is too large")
    manifest_bytes = file.read(length)
    if hashlib.sha256(manifest_bytes).digest() != head[len(MAGIC) + 8 : _KEY_POSITION]:
        raise BadContainer("the manifest is damaged")
    return head, manifest_bytes


def _parse_manifest(manifest_bytes: bytes) -> dict[str, Any]:
    """The manifest. Raises BadContainer if its form is not the form that `write` gives it. This must be checked,
    because anybody can write a package, and a correct sha256 proves nothing about the form.
    """
    try:
        manifest = orjson.loads(manifest_bytes)
    except orjson.JSONDecodeError:
        raise BadContainer("the manifest is not JSON") from None
    parts = manifest.get("parts") if isinstance(manifest, dict) else None
    if not isinstance(parts, list) or not all(_is_part(part) for part in parts):
        raise BadContainer("the manifest does not list the parts")
    return cast("dict[str, Any]", manifest)


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("name"), str)
        and isinstance(part.get("sha256"), str)
        and type(part.get("size")) is int  # `isinstance` would accept True
        and part["size"] >= 0
    )


def _verify_signature(head: bytes, manifest_bytes: bytes) -> bytes | None:
    """The public key that signed the container; None: it is unsigned. Raises BadContainer for an invalid signature."""
    public_key, signature = head[_KEY_POSITION : _KEY_POSITION + _KEY_BYTES], head[_KEY_POSITION + _KEY_BYTES :]
    if not any(public_key + signature):
        return None
    signed_bytes = head[:_KEY_POSITION] + public_key + manifest_bytes
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed_bytes)
    except (InvalidSignature, ValueError):
        raise BadContainer("the signature is not valid") from None
    return public_key


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
