"""Fetching what a step reads, and knowing that it is what was written."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from leasehold.db.artifacts import artifacts_of
from leasehold.db.database import Pool
from leasehold.domain.errors import ObjectMissing, ObjectTooLarge, Permanent
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.runtime.gather import gather_or_cancel
from leasehold.storage.store import ObjectStore
from leasehold.transitions.claims import Claimed
from leasehold.worker.attempts.output_cache import OutputCache


@dataclass(frozen=True, slots=True)
class Source:
    """An object that a step reads, for what it declares: an input, or the step of this job that made it. `sha256` is
    known of the latter.
    """

    read: str
    name: str
    key: str
    sha256: str | None


async def sources_of(pool: Pool, pipeline: Pipeline, step: Step, claimed: Claimed) -> list[Source]:
    """The step's declared reads, resolved to keys. Raises Permanent when the job lacks a declared input."""
    sources = []
    for name in step.reads:
        if name in pipeline.inputs:
            if name not in claimed.inputs:
                raise Permanent("input_missing", f"the job has no input {name!r}")
            sources.append(Source(name, name, claimed.inputs[name], None))
    if steps := [name for name in step.reads if name not in pipeline.inputs]:
        async with pool.acquire() as connection:
            made = await artifacts_of(connection, claimed.job_id, steps)
        sources += [Source(artifact.step, artifact.name, artifact.key, artifact.sha256) for artifact in made]
    return sources


async def fetch(
    store: ObjectStore, kept: OutputCache, sources: list[Source], directory: Path, max_bytes: int
) -> dict[str, tuple[Path, str]]:
    """Download all at once, but what is kept here: name -> (file, sha256).

    Raises Permanent for an object that is missing (it will not come), or larger than `max_bytes`: whoever holds a
    signed upload URL may have put anything there meanwhile.
    """

    async def one(source: Source, path: Path) -> tuple[Path, str]:
        data = kept.find(source.key, source.sha256)
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
    fetched = await gather_or_cancel(one(source, path) for source, path in zip(sources, paths, strict=True))
    return {source.name: file for source, file in zip(sources, fetched, strict=True)}


def work_digest(step: Step, claimed: Claimed, inputs: Mapping[str, str]) -> str:
    """What the outputs are a function of: the handler's version, the parameters and the bytes it reads."""
    said = {
        "pipeline": claimed.pipeline,
        "step": step.name,
        "version": step.version,
        "params": claimed.params,
        "inputs": dict(inputs),
    }
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()
