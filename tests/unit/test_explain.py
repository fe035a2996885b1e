"""The sentences of an explanation, which people read: they are right for one, too."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.api.jobs.explain import Serving, explanation
from leasehold.db.handler_reads import Served
from leasehold.domain.ids import new_id


def message_of(step: dict[str, Any] | None = None, limit: dict[str, Any] | None = None) -> str:
    job: Any = {"id": new_id(), "status": "pending", "held": limit is not None, "error": None}
    steps: list[Any] = [] if step is None else [step]
    limits: list[Any] = [] if limit is None else [limit]
    (reason,) = explanation(job, steps, limits, [])["reasons"]
    return str(reason["message"])


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(0, "behind 0 others"), (1, "behind 1 other"), (2, "behind 2 others"), (20, "at least 20 others")],
)
def test_a_waiting_step_says_how_many_are_before_it(ahead: int, words: str) -> None:
    step = {
        "step": "work", "status": "queued", "later": False, "queue": "q", "paused_because": None, "handler": "a.work",
        "ahead": ahead, "ahead_bound": 20,
    }  # fmt: skip
    assert message_of(step).endswith(f"{words}.")


ROOMY = {"key": "l", "at_most": None, "inside": 0, "per_minute": None, "lately": 0, "ahead": 0, "starts_at": None}


@pytest.mark.parametrize(
    ("at_most", "inside", "message"),
    [
        (1, 1, "The limit l admits 1 job at once, and 1 is running."),
        (3, 1200, "The limit l admits 3 jobs at once, and 1,200 are running."),
    ],
)
def test_a_full_limit_says_how_many_it_admits(at_most: int, inside: int, message: str) -> None:
    limit = ROOMY | {"at_most": at_most, "inside": inside}
    assert message_of(limit=limit) == message


def test_a_limit_of_one_job_a_minute_says_so() -> None:
    limit = ROOMY | {"per_minute": 1, "lately": 1}
    assert message_of(limit=limit) == "The limit l admits 1 job a minute, and 1 started in the last minute."


UNKNOWN = (
    "No worker serves a.work: no worker of the queue q has its code. No worker with the code of a.work has been seen."
)


@pytest.mark.parametrize(
    ("status", "paused", "served", "sentences"),
    [
        ("running", None, (1, 1), ["The lease on work has expired. Another worker takes work over."]),
        ("running", "why", (1, 1), ["The lease on work has expired.", "The queue q is paused: why"]),
        (
            "cancel_requested",
            "why",
            (1, 1),
            [
                "The job was asked to stop. Its running steps are stopped after the grace.",
                "The lease on work has expired. A worker's sweeper ends work.",
            ],
        ),
        (
            "running",
            None,
            (0, 0),
            [
                "The lease on work has expired.",
                "No worker serves the queue q. No worker with the code of a.work has been seen.",
            ],
        ),
        (
            "running",
            None,
            (1, 0),
            [
                "The lease on work has expired.",
                UNKNOWN,
            ],
        ),
    ],
)
def test_of_a_lease_that_has_expired_it_says_who_takes_the_step_over_or_why_nobody_does(
    status: str, paused: str | None, served: tuple[int, int], sentences: list[str]
) -> None:
    job: Any = {"id": new_id(), "status": status, "held": False, "error": None}
    step: Any = {"step": "work", "status": "running", "lapsed": True, "queue": "q", "paused_because": paused,
                 "handler": "a.work", "ahead": 0, "ahead_bound": 20}  # fmt: skip
    serving = Serving({("q", "a.work"): Served(*served, elsewhere=0, seen_at=None)})
    reasons = explanation(job, [step], [], [], serving)["reasons"]
    assert [reason["message"] for reason in reasons] == sentences
