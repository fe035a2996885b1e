"""Two attempts of one task that both believe in their lease: what the later one wrote stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel

from leasehold.domain.errors import LeaseLost, ObjectExists
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Step
from leasehold.domain.verdicts import Done, File
from leasehold.storage.store import ObjectStore, Stored
from leasehold.worker.attempts.inline import InlineAttempt
from leasehold.worker.attempts.publishing import publish_outputs, replacement_rule, writer_of
from leasehold.worker.leases.held_lease import HeldLease

TASK = uuid4()


def held(epoch: int, task: UUID = TASK, *, seconds: float = 60.0) -> HeldLease:
    return HeldLease(Lease(task, uuid4(), epoch, epoch, monotonic() + seconds), monotonic() + 60.0)


async def write(store: ObjectStore, by: HeldLease, data: bytes) -> None:
    await store.put(
        "k", data, content_type="text/plain", metadata=writer_of(by.lease), may_replace=replacement_rule(by)
    )


async def test_a_predecessor_whose_lease_was_taken_early_replaces_nothing(store: ObjectStore) -> None:
    """Presence ended, so another has the task; the heartbeat has not heard of it, and the lease is still trusted."""
    zombie, successor = held(1), held(2)
    assert zombie.trusted()
    await write(store, successor, b"committed")
    with pytest.raises(ObjectExists):
        await write(store, zombie, b"late")
    assert await store.read_head("k", 20) == b"committed"


async def test_what_a_predecessor_left_is_replaced(store: ObjectStore) -> None:
    await write(store, held(1), b"leftover")
    await write(store, held(2), b"right")
    assert await store.read_head("k", 20) == b"right"


async def test_of_two_owners_of_one_epoch_the_one_that_postgresql_confirms_replaces(store: ObjectStore) -> None:
    """An asynchronous failover lost the first claim, and the new primary gave its epoch out again."""
    lost, claimed_anew = held(2), held(2)
    lost.confirmed = lambda: False  # its heartbeat has no connection to the new primary yet
    await write(store, claimed_anew, b"committed")
    with pytest.raises(ObjectExists):
        await write(store, lost, b"late")
    assert await store.read_head("k", 20) == b"committed"

    await store.delete("k")
    await write(store, lost, b"lost")
    await write(store, lost, b"lost, again")  # what it wrote itself
    await write(store, claimed_anew, b"right")
    assert await store.read_head("k", 20) == b"right"


async def test_what_an_older_release_signed_without_the_owner_is_an_attempts_own(store: ObjectStore) -> None:
    by = held(2)
    by.confirmed = lambda: False
    await store.put("k", b"draft", content_type="text/plain", metadata={"writer": f"{TASK} 2"})
    await write(store, by, b"final")
    assert await store.read_head("k", 20) == b"final"


async def test_an_attempt_may_write_a_key_again(store: ObjectStore) -> None:
    await write(store, held(2), b"draft")
    await write(store, held(2), b"final")
    assert await store.read_head("k", 20) == b"final"


async def test_what_nobody_signed_and_what_another_task_wrote_is_replaced_while_the_lease_is_trusted(
    store: ObjectStore,
) -> None:
    await store.put("k", b"unsigned", content_type="text/plain", metadata={})
    await write(store, held(7), b"first")
    await write(store, held(1, uuid4()), b"second")
    with pytest.raises(ObjectExists):
        await write(store, held(9, seconds=-1.0), b"third")
    assert await store.read_head("k", 20) == b"second"


def test_an_object_whose_writer_is_no_attempt_at_the_task_is_replaced() -> None:
    """Another release, or another program, may have signed it in another way."""
    for writer in ("", "2", f"{TASK}", f"{TASK} ", f"{TASK} two", f"{TASK} -2", f"{uuid4()} 9 x"):
        existing = Stored("k", 1, "", "text/plain", None, {"writer": writer})
        assert replacement_rule(held(1))(existing), writer
        assert not replacement_rule(held(1, seconds=-1.0))(existing), writer


class NoParams(BaseModel):
    pass


def inline(store: ObjectStore, by: HeldLease) -> InlineAttempt:
    claimed: Any = SimpleNamespace(lease=by.lease, output_prefix="p", params={})
    pipeline: Any = SimpleNamespace(name="p", params=NoParams)
    parts: Any = SimpleNamespace()
    return InlineAttempt(claimed, pipeline, Step("s"), by, store, parts, parts, None, parts, parts, parts, parts)


async def publish(store: ObjectStore, by: HeldLease, path: Path) -> None:
    """As the runner does it with what a child process has made: a side output, then the primary one."""
    files = {"side": File(path, "text/plain"), "made": File(path, "text/plain")}
    step = Step("s", writes="made", isolated=True)
    await publish_outputs(store, None, "p", step, Done(files), "digest", by)


async def write_bytes(store: ObjectStore, by: HeldLease, path: Path) -> None:
    await inline(store, by).write("made", await asyncio.to_thread(path.read_bytes), "text/plain")


async def write_file(store: ObjectStore, by: HeldLease, path: Path) -> None:
    await inline(store, by).write_file("made", path, "text/plain")


WAYS: list[Callable[[ObjectStore, HeldLease, Path], Awaitable[None]]] = [publish, write_bytes, write_file]


@pytest.mark.parametrize("way", WAYS)
async def test_the_first_attempt_overwrites_nothing_of_its_successor_whichever_way_it_writes(
    store: ObjectStore, tmp_path: Path, way: Callable[[ObjectStore, HeldLease, Path], Awaitable[None]]
) -> None:
    """Its lease was taken early: epoch 1 does not mean that nobody else can have written the key."""
    (committed := tmp_path / "committed").write_bytes(b"committed")
    (late := tmp_path / "late").write_bytes(b"late")
    zombie, successor = held(1), held(2)
    await way(store, successor, committed)
    with pytest.raises(ObjectExists):
        await way(store, zombie, late)
    assert [await store.read_head(found.key, 20) async for found in store.list("p/")] == (
        [b"committed"] * (2 if way is publish else 1)
    )


@pytest.mark.parametrize("way", WAYS)
async def test_an_attempt_replaces_a_leftover_of_an_earlier_one_and_nothing_once_it_distrusts_its_lease(
    store: ObjectStore, tmp_path: Path, way: Callable[[ObjectStore, HeldLease, Path], Awaitable[None]]
) -> None:
    for name in ("leftover", "right", "third"):
        (tmp_path / name).write_bytes(name.encode())
    await way(store, held(1), tmp_path / "leftover")
    await way(store, right := held(2), tmp_path / "right")
    with pytest.raises((ObjectExists, LeaseLost)):
        await way(store, held(3, seconds=-1.0), tmp_path / "third")
    assert await store.read_head("p/made", 20) == b"right"
    written = await store.head("p/made")
    assert written is not None
    assert written.metadata["writer"] == f"{TASK} 2 {right.lease.owner}"


@pytest.mark.parametrize("way", [write_bytes, write_file])
async def test_a_handler_that_writes_after_its_lease_may_have_passed_stores_nothing(
    store: ObjectStore, tmp_path: Path, way: Callable[[ObjectStore, HeldLease, Path], Awaitable[None]]
) -> None:
    (tmp_path / "late").write_bytes(b"late")
    lost = held(1)
    lost.lost = True
    for by in (held(1, seconds=-1.0), lost):
        with pytest.raises(LeaseLost):
            await way(store, by, tmp_path / "late")
    assert await store.head("p/made") is None
