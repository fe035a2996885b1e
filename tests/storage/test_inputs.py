"""What a step reads comes from the store, unless this worker has just put it there."""

from __future__ import annotations

import base64
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from leasehold.domain.errors import Permanent
from leasehold.domain.pipeline import Step
from leasehold.domain.verdicts import Done, File
from leasehold.storage.store import ObjectStore, Stored
from leasehold.transitions.settlements import Completion
from leasehold.worker.attempts.inputs import Source, fetch
from leasehold.worker.attempts.output_cache import MAX_OUTPUT_BYTES, OutputCache
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


async def published(store: ObjectStore, directory: Path, value: Any = None) -> Completion:
    """What an attempt published that could not settle any more: a side output and the primary one."""
    for name in ("made.txt", "side.txt"):
        (directory / name).write_bytes(name.encode())
    files = {name: File(directory / name, "text/plain") for name in ("made.txt", "side.txt")}
    return await publish_outputs(store, None, "prefix", STEP, Done(files, value), "digest", held(1))


async def test_work_whose_outputs_are_all_published_is_not_done_again(store: ObjectStore, tmp_path: Path) -> None:
    completion = await published(store, tmp_path, {"n": 1})
    found = await find_published(store, "prefix", STEP, "digest", by := held(2))
    assert found == replace(completion, lease=by.lease)
    assert {output.name for output in found.outputs} == {"made.txt", "side.txt"}
    assert found.value == {"n": 1}
    assert await find_published(store, "prefix", STEP, "of other work", by) is None
    assert await find_published(store, "elsewhere", STEP, "digest", by) is None
    assert await find_published(store, "prefix", replace(STEP, writes=None), "digest", by) is None


@pytest.mark.parametrize("what", ["is gone", "is another", "is another of the same size", "is of another size"])
async def test_work_of_which_one_output_is_not_what_was_published_is_done_again(
    store: ObjectStore, tmp_path: Path, what: str
) -> None:
    completion = await published(store, tmp_path)
    (side,) = [output for output in completion.outputs if output.name == "side.txt"]
    data = {"is another": b"another", "is another of the same size": b"edis.txt", "is of another size": None}.get(what)
    if what == "is gone":
        await store.delete(side.key)
    elif data is not None:
        await store.put(side.key, data, content_type="text/plain", metadata={}, may_replace=lambda _existing: True)
    else:  # the list of the primary output says another size
        listed = {"outputs": [asdict(side) | {"size": side.size + 1}], "value": None}
        packed = base64.b64encode(orjson.dumps(listed)).decode()
        await store.delete("prefix/made.txt")
        await store.put(
            "prefix/made.txt", b"made.txt", content_type="text/plain", metadata={"work": "digest", "manifest": packed},
        )  # fmt: skip
    assert await find_published(store, "prefix", STEP, "digest", held(2)) is None


async def test_a_value_that_is_too_long_for_the_list_of_outputs_only_lets_the_work_be_done_again(
    store: ObjectStore, tmp_path: Path
) -> None:
    completion = await published(store, tmp_path, {"text": "x" * 2000})
    assert completion.value == {"text": "x" * 2000}
    assert await store.read_head("prefix/made.txt", 20) == b"made.txt"
    assert await find_published(store, "prefix", STEP, "digest", held(2)) is None


@pytest.mark.parametrize("manifest", [b"[]", b"{", b'{"outputs": []}', b'{"value": null}'])
async def test_a_list_of_outputs_that_cannot_be_read_lets_the_work_be_done_again(
    store: ObjectStore, manifest: bytes
) -> None:
    metadata = {"work": "digest", "manifest": base64.b64encode(manifest).decode()}
    await store.put("prefix/made.txt", b"made", content_type="text/plain", metadata=metadata)
    assert await find_published(store, "prefix", STEP, "digest", held(2)) is None


PACKED = base64.b64encode(orjson.dumps({"outputs": [], "value": {"n": 7}})).decode()


@pytest.mark.parametrize(
    ("sha256", "manifest", "is_found"),
    [("abc", PACKED, True), ("", PACKED, False), ("abc", f"!{PACKED}", False), ("abc", PACKED[:-1], False)],
    ids=["whole", "its digest is not kept", "its list has a stray character", "its list is cut"],
)
async def test_a_primary_output_that_has_not_kept_all_its_metadata_is_made_again(
    sha256: str, manifest: str, *, is_found: bool
) -> None:
    """Without its digest, no later step could check what it downloads."""

    async def head(key: str) -> Stored:
        return Stored(key, 4, sha256, "text/plain", None, {"work": "digest", "manifest": manifest})

    lossy: Any = SimpleNamespace(head=head)
    found = await find_published(lossy, "prefix", STEP, "digest", held(2))
    assert (None if found is None else found.value) == ({"n": 7} if is_found else None)


async def test_a_step_without_a_primary_output_publishes_what_it_has_made(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "side.txt").write_bytes(b"side")
    done = Done({"side.txt": File(tmp_path / "side.txt", "text/plain")})
    for step in (replace(STEP, writes=None), STEP):  # the handler has not written its primary output
        completion = await publish_outputs(store, None, "prefix", step, done, "digest", held(1))
        assert [output.name for output in completion.outputs] == ["side.txt"]
    assert await store.read_head("prefix/side.txt", 20) == b"side"


async def test_only_small_outputs_are_kept_in_memory(store: ObjectStore, tmp_path: Path) -> None:
    for size, is_kept in ((MAX_OUTPUT_BYTES, True), (MAX_OUTPUT_BYTES + 1, False)):
        kept: list[int] = []
        cache: Any = SimpleNamespace(add=lambda _key, _sha256, data, kept=kept: kept.append(len(data)))
        (tmp_path / "made.txt").write_bytes(b"x" * size)
        files = {"made.txt": File(tmp_path / "made.txt", "text/plain")}
        completion = await publish_outputs(store, cache, "prefix", STEP, Done(files), "digest", held(1))
        assert [output.size for output in completion.outputs] == [size]
        assert kept == ([size] if is_kept else [])


async def test_what_is_kept_obeys_the_limit_of_the_step_that_reads_it(store: ObjectStore, tmp_path: Path) -> None:
    kept = OutputCache()
    source = await stored(store, kept, tmp_path)
    with pytest.raises(Permanent, match="more than the 3 bytes"):
        await fetch(store, kept, [source], tmp_path, 3)
