"""Storing what a step made, and finding out that an earlier attempt has stored it already.

Every object carries the digest of the work that made it; the step's primary output goes last and carries the list
of the others, so that its presence proves them all.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from leasehold.domain.errors import StoreError
from leasehold.domain.lease import Lease
from leasehold.domain.object_keys import output_key
from leasehold.domain.pipeline import Step
from leasehold.domain.verdicts import Done, File
from leasehold.runtime import failpoints
from leasehold.runtime.gather import gather_or_cancel
from leasehold.storage.store import ObjectStore, Stored
from leasehold.transitions.settlements import Completion, Output
from leasehold.worker.attempts.heartbeat import Held
from leasehold.worker.attempts.output_cache import MAX_OUTPUT_BYTES, OutputCache

_DIGEST = "work"
_WRITER = "writer"
_MANIFEST = "manifest"
#: S3 allows 2 KB of user metadata in all; a longer manifest is left out, and nothing is adopted.
_MANIFEST_BYTES = 1500


def signed(lease: Lease) -> dict[str, str]:
    """The metadata that says who wrote an object."""
    return {_WRITER: f"{lease.task_id} {lease.epoch}"}


def replaceable(held: Held) -> Callable[[Stored], bool]:
    """Whether what lies under a key of ours is the leftover of an attempt before us.

    Trust in the lease alone would not do: one that was taken over early (its owner's presence had ended, and the owner
    has not heard of it yet) must not replace what its successor wrote. A store that forgets metadata leaves only trust.
    """

    def answer(there: Stored) -> bool:
        task, _, epoch = there.metadata.get(_WRITER, "").partition(" ")
        newer = task == str(held.lease.task_id) and epoch.isdecimal() and int(epoch) > held.lease.epoch
        return held.trusted() and not newer

    return answer


async def store_outputs(
    store: ObjectStore, kept: OutputCache | None, prefix: str, step: Step, done: Done, digest: str, held: Held
) -> Completion:
    """Upload every file, the primary output last, and keep what is small; raises what the store raises."""

    async def put(name: str, file: File, metadata: dict[str, str]) -> Output:
        small = None if kept is None else await asyncio.to_thread(_small, file.path)
        stored = await store.put(
            output_key(prefix, name),
            file.path if small is None else small,
            content_type=file.content_type,
            metadata={_DIGEST: digest, **signed(held.lease), **metadata},
            may_replace=replaceable(held),
            fresh=held.lease.epoch == 1,
        )
        if kept is not None and small is not None:
            kept.keep(stored.key, stored.sha256, small)
        return _output(name, stored)

    primary = step.writes
    outputs = await gather_or_cancel(put(name, file, {}) for name, file in done.files.items() if name != primary)
    failpoints.reach("mid_upload")
    if primary is not None and primary in done.files:
        manifest = _packed(outputs, done.value)
        outputs.append(await put(primary, done.files[primary], {_MANIFEST: manifest} if manifest else {}))
    return Completion(held.lease, outputs, done.value)


def _small(path: Path) -> bytes | None:
    return path.read_bytes() if path.stat().st_size <= MAX_OUTPUT_BYTES else None


async def adopt(store: ObjectStore, prefix: str, step: Step, digest: str, held: Held) -> Completion | None:
    """What an earlier attempt at the same work stored, if all of it is still there."""
    if step.writes is None:
        return None
    try:
        primary = await store.head(output_key(prefix, step.writes))
        if primary is None or primary.metadata.get(_DIGEST) != digest or not primary.sha256:
            return None
        manifest = _unpacked(primary.metadata.get(_MANIFEST))
        if manifest is None:
            return None
        others = [Output(**said) for said in manifest["outputs"]]
        for other, there in zip(others, await gather_or_cancel(store.head(o.key) for o in others), strict=True):
            if there is None or there.sha256 != other.sha256 or there.size != other.size:
                return None
    except StoreError:
        return None  # looking was only a short cut
    return Completion(held.lease, [*others, _output(step.writes, primary)], manifest["value"])


def _output(name: str, stored: Stored) -> Output:
    return Output(name, stored.key, stored.size, stored.sha256, stored.content_type)


def _packed(outputs: list[Output], value: Any) -> str | None:
    said = orjson.dumps({"outputs": [asdict(output) for output in outputs], "value": value})
    packed = base64.b64encode(said).decode()
    return packed if len(packed) <= _MANIFEST_BYTES else None


def _unpacked(packed: str | None) -> dict[str, Any] | None:
    if packed is None:
        return None
    try:
        said = orjson.loads(base64.b64decode(packed, validate=True))
    except ValueError:
        return None
    return said if isinstance(said, dict) and {"outputs", "value"} <= said.keys() else None
