"""The sentences of the Overview: right for one thing and for many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasehold.api.console.findings import _findings_about_queue


@pytest.mark.parametrize(
    ("runnable", "has_more", "workers", "sentence"),
    [
        (1, False, 0, "No worker serves the queue q, in which 1 task waits."),
        (2, False, 0, "No worker serves the queue q, in which 2 tasks wait."),
        (1, False, 1, "The queue q is behind: 1 task waits, for up to 5 min."),
        (1500, True, 1, "The queue q is behind: at least 1,500 tasks wait, for up to 5 min."),
    ],
)
def test_a_queue_with_one_task_and_with_many(runnable: int, workers: int, sentence: str, *, has_more: bool) -> None:
    row: Any = {
        "queue": "q", "runnable": runnable, "paused_because": None, "has_more": has_more, "workers": workers,
        "oldest": datetime.now(UTC) - timedelta(minutes=5, seconds=5),
    }  # fmt: skip
    (finding,) = _findings_about_queue(row, has_workers=True)
    assert finding.sentence == sentence
