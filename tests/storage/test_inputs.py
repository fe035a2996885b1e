"""What a step reads comes from the store, unless this worker has just put it there."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest

from leasehold.domain.errors import Permanent
from leasehold.domain.pipeline import Step
from leasehold.domain.verdicts import Done, File
from leasehold.storage.store import ObjectStore
from leasehold.worker.attempts.inputs import Source, fetch
from leasehold.worker.attempts.output_cache import OutputCache
from leasehold.worker.attempts.publishing import find_published, publish_outputs
from tests.storage.test_writers import held

STEP = Step("made", writes="made.txt", isolated=True)


async def stored(store: ObjectStore, kept: OutputCache | None, directory: Path) -> Source:
    path = directory / "made.txt"
    path.write_bytes(b"made")
    completion = await publish_outputs(
        store, kept, "prefix", STEP, Done({"made.txt": File(path, "text/plain")}), "digest", held(1)
    )
    (output,) = completion.outputs
    return Source("step", output.name, output.key, output.sha256)


async def test_the_next_step_in_the_same_worker_downloads_nothing(store: ObjectStore, tmp_path: Path) -> None:
    kept = OutputCache()
    source = await stored(store, kept, tmp_path)
    assert await store.read_head(source.key, 10) == b"made"
    await store.delete(source.key)  # so that a download could not work
    path, sha256 = (await fetch(store, kept, [source], tmp_path, 10))[source.name]
    assert (path.read_bytes(), sha256) == (b"made", source.sha256)


async def test_a_step_in_another_worker_reads_the_same_from_the_store(store: ObjectStore, tmp_path: Path) -> None:
    source = await stored(store, None, tmp_path)
    path, sha256 = (await fetch(store, OutputCache(), [source], tmp_path, 10))[source.name]
    assert (path.read_bytes(), sha256) == (b"made", source.sha256)


@pytest.mark.parametrize("outputs", [[{"digest": "of a later release"}], [1], 1])
async def test_outputs_that_another_release_published_are_made_again(store: ObjectStore, outputs: Any) -> None:
    manifest = {"outputs": outputs, "value": None}
    packed = base64.b64encode(orjson.dumps(manifest)).decode()
    metadata = {"work": "digest", "manifest": packed}
    await store.put("prefix/made.txt", b"made", content_type="text/plain", metadata=metadata)
    assert await find_published(store, "prefix", STEP, "digest", held(2)) is None


async def test_what_is_kept_obeys_the_limit_of_the_step_that_reads_it(store: ObjectStore, tmp_path: Path) -> None:
    kept = OutputCache()
    source = await stored(store, kept, tmp_path)
    with pytest.raises(Permanent, match="more than the 3 bytes"):
        await fetch(store, kept, [source], tmp_path, 3)
