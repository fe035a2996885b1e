"""Counters of the duties: unforeseen errors, failed units, paused schedules, unanswered questions of the exporter. A
duty is a maintenance loop of a worker, and a unit is one thing that it works on. The label `duty` is the duty's name.
"""

from __future__ import annotations

from leasehold.telemetry.meters import counter

ERRORS = counter(
    "duty_errors_total",
    "Turns of a duty that ended with an unforeseen error, or again and again as in an outage, while others get answers",
    ["duty"],
)
FAILURES = counter(
    "unit_failures_total", "Units of a duty that failed by themselves, and went to the quarantine", ["duty"]
)
STUCK = counter("units_stuck_total", "Units of a duty that failed too often in a row", ["duty"])


def counted(duty: str) -> str:
    """Make the counters of a duty whose units may be set aside, with the value 0. Returns the duty's name. The reason:
    PromQL's `increase()` does not count the event with which a counter first appears. So without this call, the first
    stuck unit would cause no alert.
    """
    FAILURES.labels(duty)
    STUCK.labels(duty)
    return duty


SCHEDULES_PAUSED = counter(
    "schedules_paused_total", "Schedules that paused themselves. because: broken, refused, runs_failed", ["because"]
)
EXPORTER_REFUSED = counter(
    "exporter_refused_total", "Questions of the exporter that the database did not answer", ["question"]
)
