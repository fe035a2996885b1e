"""Checks an uploaded object, for the endpoint `complete-upload`. Reads only the object's size and first bytes."""

from __future__ import annotations

from dataclasses import dataclass

from leasehold.domain.errors import Conflict, ObjectMissing, Permanent
from leasehold.pipelines.media import refusals
from leasehold.pipelines.media.kinds import HEAD_BYTES, is_as_declared, sniff
from leasehold.pipelines.media.limits import PictureLimits
from leasehold.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why the object can never be processed. A step of the pipeline would fail with the same code."""

    code: str
    message: str
    size: int


async def inspect_upload(store: ObjectStore, key: str, declared_type: str, limits: PictureLimits) -> int | Refusal:
    """The object's size in bytes, or the reason of its refusal. `declared_type`: the content type that the client
    named for the upload URL.

    Raises Conflict if there is no object yet, and StoreUnavailable if the store does not answer.
    """
    try:
        size, head = await store.size_and_head(key, HEAD_BYTES)
    except ObjectMissing:
        raise Conflict("upload_missing", "Nothing was uploaded for this media yet.") from None
    try:
        _check_size(size, limits)
        _check_type(head, declared_type)
    except Permanent as error:
        return Refusal(error.code, error.message, size)
    return size


def _check_size(size: int, limits: PictureLimits) -> None:
    if size == 0:
        raise refusals.empty_file()
    if size > limits.max_bytes:
        raise refusals.too_large(size, limits.max_bytes)


def _check_type(head: bytes, declared_type: str) -> None:
    actual_type = sniff(head)
    if actual_type is None:
        raise refusals.unknown_format()
    if not is_as_declared(declared_type, actual_type):
        raise refusals.mislabelled(declared_type, actual_type)
