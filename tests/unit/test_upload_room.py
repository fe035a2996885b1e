"""What a process remembers of the room that tenants' uploads take: for a second, and of a bounded number of tenants."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.limits import upload_room
from leasehold.limits.upload_room import FRESH_SECONDS, UploadRoom


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, in a list that a test changes."""
    clock = [1000.0]
    monkeypatch.setattr(upload_room, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants whose uploads PostgreSQL was asked to count, each of which has none."""
    tenants: list[str] = []

    async def count(_connection: Any, tenant_id: str) -> int:
        tenants.append(tenant_id)
        return 0

    monkeypatch.setattr(upload_room, "count", count)
    return tenants


async def reserve(room: UploadRoom, *tenants: str) -> None:
    connection: Any = None  # `count` is another one here
    for tenant in tenants:
        assert await room.reserve(connection, tenant, 1)


async def test_a_count_is_used_for_a_second_and_then_made_anew(now: list[float], counted: list[str]) -> None:
    room = UploadRoom(1000)
    await reserve(room, "t")
    now[0] += 0.999 * FRESH_SECONDS
    await reserve(room, "t")
    assert counted == ["t"]
    now[0] = 1000.0 + FRESH_SECONDS
    await reserve(room, "t")
    assert counted == ["t", "t"]


async def test_of_too_many_tenants_the_one_whose_count_is_oldest_is_forgotten(
    now: list[float], counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_room, "_MAX_TENANTS", 2)
    room = UploadRoom(1000)
    await reserve(room, "a", "b", "a", "b")
    assert counted == ["a", "b"]
    now[0] += FRESH_SECONDS
    await reserve(room, "a")  # counted anew: now the count of `b` is the oldest
    now[0] -= FRESH_SECONDS / 2  # all counts are fresh
    await reserve(room, "c", "a", "c")
    assert counted == ["a", "b", "a", "c"]
    await reserve(room, "b")
    assert counted == ["a", "b", "a", "c", "b"]
