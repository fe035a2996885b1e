"""Which ids have a time, and which a program may give to a new run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from leasehold.domain.errors import Invalid
from leasehold.domain.ids import MAX_AGE, MAX_LEAD, id_of_instant, id_of_new_run, instant_of, is_recent, new_id

_BEYOND_THE_CALENDAR = UUID("ffffffff-ffff-7fff-bfff-ffffffffffff")
_MARGIN = timedelta(minutes=0.5)


def test_only_a_uuid_of_version_7_has_a_time() -> None:
    instant = datetime(2026, 11, 29, tzinfo=UTC)
    assert instant_of(id_of_instant(instant)) == instant
    as_version_4 = UUID(int=id_of_instant(instant).int, version=4)
    with pytest.raises(ValueError, match="no UUIDv7"):
        instant_of(as_version_4)
    with pytest.raises((ValueError, OverflowError)):
        instant_of(_BEYOND_THE_CALENDAR)


def test_the_id_of_a_new_run_is_of_the_last_24_hours() -> None:
    now = datetime.now(UTC)
    recent = (new_id(), id_of_instant(now - MAX_AGE + _MARGIN), id_of_instant(now + MAX_LEAD - _MARGIN))
    assert [is_recent(one) for one in recent] == [True] * 3
    assert [id_of_new_run(str(one)) for one in recent] == [*recent]
    others = (
        id_of_instant(now - MAX_AGE - _MARGIN),
        id_of_instant(now + MAX_LEAD + _MARGIN),
        UUID(int=new_id().int, version=4),
        uuid4(),
        _BEYOND_THE_CALENDAR,
    )
    assert [is_recent(one) for one in others] == [False] * 5
    for one in others:
        with pytest.raises(Invalid, match=rf"UUIDv7 of the last 24 hours, not {one}: uuid7\(\) of") as refused:
            id_of_new_run(one)
        assert refused.value.code == "invalid_id"
