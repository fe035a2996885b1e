"""Publishes a step's outputs to the object store, and finds outputs that an earlier attempt has published already.

Every object that `publish_outputs` uploads carries the digest of the work that produced the object. The step's primary
output (`Step.writes`) is published last, and carries a list of the other outputs. So if the primary output exists, all
outputs exist. (Inline steps publish their outputs themselves. Of this module, they use only `writer_of` and
`replacement_rule`.)
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
from leasehold.worker.attempts.output_cache import MAX_OUTPUT_BYTES, OutputCache
from leasehold.worker.leases.held_lease import HeldLease

#: The fields of an object's user metadata. `_DIGEST`: the digest of the work. `_WRITER`: the attempt that wrote the
#: object. `_MANIFEST`: the list of the other outputs; only a primary output has this field.
_DIGEST = "work"
_WRITER = "writer"
_MANIFEST = "manifest"
#: The manifest has at most this many bytes, because S3 allows 2 KB of user metadata in all. A longer manifest is left
#: out, and a later attempt then repeats the work.
_MANIFEST_BYTES = 1500


def writer_of(lease: Lease) -> dict[str, str]:
    """The metadata that names the attempt that wrote an object."""
    return {_WRITER: f"{lease.task_id} {lease.epoch} {lease.owner}"}


def replacement_rule(held: HeldLease) -> Callable[[Stored], bool]:
    """The rule by which the store decides whether this attempt may replace an object that exists under the output's
    key.

    The attempt may replace the object of an earlier attempt, but not the object of a newer attempt. While the attempt
    does not trust its lease (the lease may have expired), it may replace no object. But trust alone is not enough. If
    PostgreSQL lost the session of the owner, another worker may have taken the task over, and the old owner still
    trusts its lease for a moment. With trust alone, it could then overwrite the new owner's output. If the store drops
    metadata, no object names its writer, and only trust decides.

    After a failover that lost the last commits, PostgreSQL may give the same epoch to a second owner. Only the owner
    that PostgreSQL confirms may replace the other owner's object.
    """

    def may_replace(existing: Stored) -> bool:
        if not held.trusted():
            return False
        writer = existing.metadata.get(_WRITER, "").split(" ")
        task_id, epoch, owner = [*writer, "", "", ""][:3]  # an empty text for each part that the metadata lacks
        if task_id != str(held.lease.task_id) or not epoch.isdecimal():  # the object names no attempt at this task
            return True
        if int(epoch) != held.lease.epoch:
            return int(epoch) < held.lease.epoch
        return owner in ("", str(held.lease.owner)) or held.confirmed()

    return may_replace


async def publish_outputs(
    store: ObjectStore, cache: OutputCache | None, prefix: str, step: Step, done: Done, digest: str, held: HeldLease
) -> Completion:
    """Upload every file of `done`, the primary output last. `prefix`: the prefix of the job's objects. `digest`: the
    digest of the work. Small files are also put into `cache`. Raises the errors of the store.
    """

    async def publish(name: str, file: File, metadata: dict[str, str]) -> Output:
        data = None if cache is None else await asyncio.to_thread(_read_small, file.path)
        stored = await store.put(
            output_key(prefix, name),
            file.path if data is None else data,
            content_type=file.content_type,
            metadata={_DIGEST: digest, **writer_of(held.lease), **metadata},
            may_replace=replacement_rule(held),
        )
        if cache is not None and data is not None:
            cache.add(stored.key, stored.sha256, data)
        return _output(name, stored)

    primary = step.writes
    outputs = await gather_or_cancel(publish(name, file, {}) for name, file in done.files.items() if name != primary)
    failpoints.reach("mid_upload")  # a failpoint: here a test can stop or kill the process
    if primary is not None and primary in done.files:
        manifest = _encoded_manifest(outputs, done.value)
        outputs.append(await publish(primary, done.files[primary], {_MANIFEST: manifest} if manifest else {}))
    return Completion(held.lease, outputs, done.value)


def _read_small(path: Path) -> bytes | None:
    return path.read_bytes() if path.stat().st_size <= MAX_OUTPUT_BYTES else None


async def find_published(
    store: ObjectStore, prefix: str, step: Step, digest: str, held: HeldLease
) -> Completion | None:
    """A completion with the outputs that an earlier attempt at the same work has published. None: there is no such
    attempt, an output is missing, or the search fails.
    """
    if step.writes is None:
        return None
    try:
        primary = await store.head(output_key(prefix, step.writes))
        if primary is None or primary.metadata.get(_DIGEST) != digest or not primary.sha256:
            return None
        manifest = _decoded_manifest(primary.metadata.get(_MANIFEST))
        if manifest is None:
            return None
        # TypeError: another release has written other fields.
        listed_outputs = [Output(**fields) for fields in manifest["outputs"]]
        existing = await gather_or_cancel(store.head(output.key) for output in listed_outputs)
        for output, stored in zip(listed_outputs, existing, strict=True):
            if stored is None or stored.sha256 != output.sha256 or stored.size != output.size:
                return None
    except (StoreError, TypeError):
        return None  # the search only saves time: the attempt does the work instead
    return Completion(held.lease, [*listed_outputs, _output(step.writes, primary)], manifest["value"])


def _output(name: str, stored: Stored) -> Output:
    return Output(name, stored.key, stored.size, stored.sha256, stored.content_type)


def _encoded_manifest(outputs: list[Output], value: Any) -> str | None:
    """The manifest as base64 text; None if it is too long for the metadata."""
    manifest = orjson.dumps({"outputs": [asdict(output) for output in outputs], "value": value})
    encoded = base64.b64encode(manifest).decode()
    return encoded if len(encoded) <= _MANIFEST_BYTES else None


def _decoded_manifest(encoded: str | None) -> dict[str, Any] | None:
    """The manifest; None if the object has no manifest, or a manifest that this release cannot read."""
    if encoded is None:
        return None
    try:
        manifest = orjson.loads(base64.b64decode(encoded, validate=True))
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and {"outputs", "value"} <= manifest.keys() else None
