"""The Overview's rates say which numbers are counted, and which are estimated or not known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasehold.api.console import rates
from leasehold.db.job_lists import Page

START = datetime(2026, 1, 1, tzinfo=UTC)
END = START + timedelta(minutes=5)


@pytest.mark.parametrize(("is_cut", "exact"), [(False, True), (True, False)])
def test_no_jobs_in_a_part_is_exact_only_if_the_whole_part_was_read(is_cut: bool, exact: bool) -> None:
    """A read that meets only jobs past their retention ends before it has found one."""
    page = Page([], has_more=False, ended_at={"id": "unread"} if is_cut else None)  # type: ignore[arg-type]  # any row
    part = rates._part(START, END, page)
    assert (part.n, part.failed, part.exact) == (0, 0, exact)


@pytest.mark.parametrize("per_second", [100, 500, 10_000])
@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_steady_rate_is_estimated_as_it_is(per_second: int, late: float) -> None:
    """Also where jobs are created while the page reads the parts, or where the clock of this process is slow: the
    sample then has jobs of the time after `now` (`late`: how many seconds after it the newest was created).
    """
    now = START + timedelta(minutes=4)
    newest = now + timedelta(seconds=late)
    created_at = [newest - timedelta(seconds=number / per_second) for number in range(rates.SAMPLE)]
    rows: Any = [{"created_at": at, "status": "failed"} for at in created_at]
    page = Page(rows, has_more=True)
    part = rates._part(START, now, page)
    assert part.n == part.failed == pytest.approx(per_second * 240, rel=0.02)
    assert not part.exact


def test_a_sample_of_one_instant_gives_a_number() -> None:
    rows: Any = [{"created_at": END, "status": "running"}] * rates.SAMPLE
    page = Page(rows, has_more=True)
    assert rates._part(START, END, page).n > rates.SAMPLE
