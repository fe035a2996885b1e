"""Since when a snapshot is held, where PostgreSQL tells only its oldest transaction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leasehold.exporter import snapshots
from leasehold.exporter.snapshots import SnapshotAges


def every_ten_seconds() -> Iterator[float]:
    second = 0.0
    while True:
        yield second
        second += 10.0


@pytest.fixture
def ages() -> SnapshotAges:
    times = every_ten_seconds()
    return SnapshotAges(clock=lambda: next(times))


def test_a_snapshot_is_as_old_as_the_first_round_after_it(ages: SnapshotAges) -> None:
    """Taken at 1050, between the first round and the second."""
    assert ages.seconds(1000, 0) == 0
    assert [ages.seconds(next_xid, next_xid - 1050) for next_xid in (1100, 1200, 1300)] == [0, 10, 20]


def test_short_snapshots_on_a_busy_server_are_not_old(ages: SnapshotAges) -> None:
    assert [ages.seconds(1000 * turn, 5) for turn in range(1, 20)] == [0] * 19


def test_a_standby_that_always_needs_what_is_a_minute_old_holds_a_minute(ages: SnapshotAges) -> None:
    """Its xmin moves, as with a read that begins before the one before it ends."""
    assert [ages.seconds(1000 * turn, 6000) for turn in range(1, 20)][-1] == 50


def test_nothing_is_held_where_nothing_is_written(ages: SnapshotAges) -> None:
    """A standby that feeds back names the next transaction, for as long as none begins."""
    assert [ages.seconds(1000, 0) for _ in range(9)] == [0] * 9
    assert ages.seconds(1001, 1) == 0
    assert ages.seconds(1001, 1) == 10


def test_another_server_has_transactions_of_its_own(ages: SnapshotAges) -> None:
    for next_xid in (9000, 9100):
        ages.seconds(next_xid, 50)
    assert ages.seconds(500, 10) == 0
    assert ages.seconds(600, 110) == 10


def test_the_rounds_that_are_remembered_have_a_bound(ages: SnapshotAges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_MAX_ROUNDS", 3)
    assert [ages.seconds(100 + turn, 50 + turn) for turn in range(6)] == [0, 10, 20, 30, 30, 30]
    assert len(ages._times) == len(ages._next_xids) == 3
