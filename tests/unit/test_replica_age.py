"""How old a read from a standby is, by the notes of how long the primary's log was."""

from __future__ import annotations

from typing import Any, cast

import pytest

from leasehold.db import replica as replicas
from leasehold.db.replica import Replica, ReplicaUnusable, _LogPosition
from leasehold.settings import Settings
from tests.support.clock import Clock

SYSTEM, OTHER = 7, 8
TIMELINE = 3


def at(position: int | None, system: int = SYSTEM, timeline: int = TIMELINE) -> _LogPosition:
    return _LogPosition(position, system, timeline)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replicas, "monotonic", clock)
    return clock


@pytest.fixture
def replica(clock: Clock) -> Replica:
    """A standby of a primary whose log grows by a hundred bytes a second: 0 at 1000 s, 300 at 1003 s."""
    nobody = cast("Any", None)
    replica = Replica(Settings(_env_file=None, database_replica_max_lag=5.0), nobody, nobody)
    replica._history = (SYSTEM, TIMELINE)
    for second in range(4):
        clock.now = 1000.0 + second
        replica._remember(clock.now, 100 * second)
    return replica


@pytest.mark.parametrize(
    ("place", "as_of"), [(0, 1000), (99, 1000), (100, 1001), (299, 1002), (300, 1003), (9999, 1003)]
)
def test_a_read_is_as_old_as_the_newest_note_whose_log_is_replayed(replica: Replica, place: int, as_of: float) -> None:
    assert replica._instant_of(at(place)) == as_of


def test_a_standby_behind_every_note_or_behind_the_limit_is_too_far_behind(replica: Replica, clock: Clock) -> None:
    with pytest.raises(ReplicaUnusable, match="too far behind"):
        replica._instant_of(at(-1))
    clock.now = 1005.0
    assert replica._instant_of(at(0)) == 1000
    clock.now = 1005.1
    with pytest.raises(ReplicaUnusable, match="too far behind"):
        replica._instant_of(at(0))
    assert replica._instant_of(at(100)) == 1001


def test_a_standby_before_its_primary_follows_another(replica: Replica) -> None:
    """It has replayed what the primary has not written: the tail of a primary that is no more."""
    assert replica._instant_of(at(300), 300) == 1003
    with pytest.raises(ReplicaUnusable, match="another primary"):
        replica._instant_of(at(301), 300)
    with pytest.raises(ReplicaUnusable, match="another primary"):
        replica._instant_of(at(300, OTHER))


@pytest.mark.parametrize("timeline", [TIMELINE - 1, TIMELINE + 1])
def test_a_standby_of_another_timeline_has_another_log_however_long_it_is(replica: Replica, timeline: int) -> None:
    with pytest.raises(ReplicaUnusable, match="last promotion"):
        replica._instant_of(at(300, SYSTEM, timeline), 300)


def test_a_primary_with_a_shorter_log_is_another_one_whose_notes_begin_anew(replica: Replica, clock: Clock) -> None:
    clock.now = 1004.0
    replica._remember(clock.now, 250)
    assert replica._instant_of(at(250)) == 1004
    with pytest.raises(ReplicaUnusable, match="too far behind"):
        replica._instant_of(at(249))


def test_notes_are_forgotten_when_nobody_may_read_so_old(replica: Replica, clock: Clock) -> None:
    for second in range(4, 1000):
        clock.now = 1000.0 + second
        replica._remember(clock.now, 100 * second)
    assert len(replica._notes) == 6


def test_a_server_that_takes_writes_is_no_standby(replica: Replica) -> None:
    with pytest.raises(ReplicaUnusable, match="takes writes"):
        replica._instant_of(at(None))
