"""Finds the inputs of a step. For an isolated step it also downloads them and verifies their digests, because a child
process cannot reach the store. The attempts (isolated.py, inline.py) call this module.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from leasehold.db.artifacts import artifacts_of
from leasehold.db.database import Pool
from leasehold.domain.errors import ObjectMissing, ObjectTooLarge, Permanent
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.runtime.gather import gather_or_cancel
from leasehold.storage.store import ObjectStore
from leasehold.transitions.claims import Claimed
from leasehold.worker.attempts.output_cache import OutputCache
from leasehold.worker.attempts.primary import on_primary
from leasehold.worker.leases.held_lease import HeldLease


@dataclass(frozen=True, slots=True)
class Source:
    """An object that a step reads: an input of the job, or an output of another step. `read`: the entry of
    `Step.reads`, which is the name of the input or of the other step. `name`: the name of the input or of the output.
    `sha256`: the digest of an output; None for an input of the job.
    """

    read: str
    name: str
    key: str
    sha256: str | None


async def sources_of(pool: Pool, held: HeldLease, pipeline: Pipeline, step: Step, claimed: Claimed) -> list[Source]:
    """The objects that `Step.reads` names. Raises Permanent when the job lacks a declared input, and when two different
    objects have the same name, because the handler finds objects by name.
    """
    sources = []
    for name in step.reads:
        if name in pipeline.inputs:
            if name not in claimed.inputs:
                raise Permanent("input_missing", f"the job has no input {name!r}")
            sources.append(Source(name, name, claimed.inputs[name], None))
    if steps := [name for name in step.reads if name not in pipeline.inputs]:
        artifacts = await on_primary(pool, held, partial(artifacts_of, job_id=claimed.job_id, steps=steps))
        sources += [Source(artifact.step, artifact.name, artifact.key, artifact.sha256) for artifact in artifacts]
    _refuse_equal_names(step, sources)
    return sources


def _refuse_equal_names(step: Step, sources: Sequence[Source]) -> None:
    """Raise Permanent `input_ambiguous` if two different objects have one name. The same object twice is allowed."""
    by_name: dict[str, Source] = {}
    for source in sources:
        other = by_name.setdefault(source.name, source)
        if (other.key, other.sha256) != (source.key, source.sha256):
            sentence = f"step {step.name} reads two objects named {source.name!r}, from {other.read} and {source.read}"
            raise Permanent("input_ambiguous", sentence)


async def item_of(pool: Pool, held: HeldLease) -> Any:
    """The item of the held task, which is a part of a fan-out: the entry of `FanOut.items` for which the part runs."""
    return await on_primary(
        pool,
        held,
        lambda connection: connection.fetchval("SELECT value FROM item WHERE task_id = $1", held.lease.task_id),
    )


async def fetch(
    store: ObjectStore, cache: OutputCache, sources: list[Source], directory: Path, max_bytes: int
) -> dict[str, tuple[Path, str]]:
    """Write each source into a file of its own in `directory`, all concurrently. A source that is not in `cache` is
    downloaded from the store. Returns the name of each source -> (file, sha256). `max_bytes`: the most bytes of one
    source.

    Raises Permanent for a missing object, because nobody will write it any more. Also raises Permanent for an object
    larger than `max_bytes`, because a client with a signed upload URL may have replaced the object after the API
    checked it.
    """

    async def fetch_source(source: Source, path: Path) -> tuple[Path, str]:
        """Write one source to `path`. Returns the path and the SHA-256."""
        data = cache.find(source.key, source.sha256)
        if data is not None and source.sha256 is not None and len(data) <= max_bytes:
            await asyncio.to_thread(path.write_bytes, data)
            return path, source.sha256
        try:
            stored = await store.fetch_file(source.key, path, sha256=source.sha256, max_bytes=max_bytes)
        except ObjectTooLarge as error:
            raise Permanent("input_too_large", f"an input has more than the {max_bytes} bytes allowed") from error
        except ObjectMissing as error:
            raise Permanent("input_missing", f"the object {source.key} is not in the store") from error
        return path, stored.sha256

    paths = [directory / str(number) for number in range(len(sources))]
    fetched = await gather_or_cancel(fetch_source(source, path) for source, path in zip(sources, paths, strict=True))
    return {source.name: file for source, file in zip(sources, fetched, strict=True)}


def work_digest(step: Step, claimed: Claimed, inputs: Mapping[str, str], item: Any) -> str:
    """The digest of everything that determines the outputs: the step's version, its parameters, the digests of its
    inputs (name -> sha256) and, for a part, its item. The item is included, because a step that fans out a second time
    may give another item to a part of the same name.
    """
    work: dict[str, Any] = {
        "pipeline": claimed.pipeline,
        "step": step.name,
        "version": step.version,
        "params": claimed.params,
        "inputs": dict(inputs),
    }
    if step.part:
        work["item"] = item
    return hashlib.sha256(orjson.dumps(work, option=orjson.OPT_SORT_KEYS)).hexdigest()
