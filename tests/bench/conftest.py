"""One test stand for all figures: durable servers of its own, as `scripts/bench` starts them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bench.scale import Scale
from bench.testbed import Testbed
from tests.scenarios.fleet import QUEUES


@pytest.fixture(scope="session")
async def testbed() -> AsyncIterator[Testbed]:
    # A child of `conversion` costs each worker 0.8 s of CPU time at its start; the figure that needs one says so.
    async with Testbed(worker_queues=",".join(QUEUES)) as started:
        yield started


@pytest.fixture
def scale() -> Scale:
    """As little as gives a number."""
    return Scale(
        runs=1,
        jobs=300,
        warm_up_jobs=20,
        paced_jobs=5,
        paced_rate=50.0,
        picture_width=320,
        picture_height=240,
        picture_rounds=1,
        finished=(10, 20),
        claims=2,
        finished_beside=10,
        choice_minutes=0.05,
        steady_minutes=0.01,
        steady_windows=2,
        settle_seconds=0.0,
        idle_seconds=0.3,
        requests_seconds=0.3,
        requests_at_once=2,
        waiting=12,
        model_width=4,
        model_images=2,
        model_downloads=1,
        generations=200,
        generation_seconds=2.0,
        generation_head_start=3.0,
        attacks=("bodies",),
        hostile_seconds=2.0,
        peers=(),
        workflow_steps=128,
        workflow_calls=20,
        asleep=60,
        woken=20,
        wake_lead_seconds=1.0,
        wake_pause_seconds=0.2,
    )
