"""Two attempts of one task that both believe in their lease: what the later one wrote stays."""

from __future__ import annotations

from time import monotonic
from uuid import UUID, uuid4

import pytest

from leasehold.domain.errors import ObjectExists
from leasehold.domain.lease import Lease
from leasehold.storage.store import ObjectStore
from leasehold.worker.attempts.publishing import replaceable, writer_of
from leasehold.worker.leases.held_lease import HeldLease

TASK = uuid4()


def held(epoch: int, task: UUID = TASK, *, seconds: float = 60.0) -> HeldLease:
    return HeldLease(Lease(task, uuid4(), epoch, epoch, monotonic() + seconds), monotonic() + 60.0)


async def write(store: ObjectStore, by: HeldLease, data: bytes) -> None:
    await store.put("k", data, content_type="text/plain", metadata=writer_of(by.lease), may_replace=replaceable(by))


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


async def test_what_nobody_signed_and_what_another_task_wrote_is_replaced_while_the_lease_is_trusted(
    store: ObjectStore,
) -> None:
    await store.put("k", b"unsigned", content_type="text/plain", metadata={})
    await write(store, held(1), b"first")
    await write(store, held(1, uuid4()), b"second")
    with pytest.raises(ObjectExists):
        await write(store, held(9, seconds=-1.0), b"third")
    assert await store.read_head("k", 20) == b"second"
