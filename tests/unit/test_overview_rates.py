"""The Overview's rates say which numbers are counted, and which are estimated or not known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

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
