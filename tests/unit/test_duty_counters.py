"""What the counters of the duties must be, so that the alerts see each event."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from leasehold.schedules import firing
from leasehold.transitions import external, sweeps, webhooks
from leasehold.transitions.concurrency import names
from leasehold.transitions.workflows import children


@pytest.mark.parametrize(
    "duty",
    [
        sweeps.LEASES, sweeps.CANCELS, sweeps.DEADLINES, sweeps.RETENTION, names.JOBS, names.LIMITS, children.DUTY,
        children.ORPHANS, external.DUTY, firing.DUTY, webhooks.DUTY,
    ],
)  # fmt: skip
def test_the_first_unit_that_gets_stuck_is_seen(duty: str) -> None:
    """`increase()` sees no event with which a series appears. These duties set units aside in an API, too, which has no
    loop of that name, or under another name than their loop's.
    """
    for metric in ("leasehold_units_stuck_total", "leasehold_unit_failures_total"):
        assert REGISTRY.get_sample_value(metric, {"duty": duty}) is not None
