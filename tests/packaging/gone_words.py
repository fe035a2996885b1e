"""Words that the product no longer uses, what it says instead, and where an old word may still stand.

A rename adds its old word here. STILL only shrinks: a file in it waits for its rename, or keeps a name that was shipped
(a queue, a kind of event, a migration).
"""

from __future__ import annotations

#: Old word, in all its forms -> the term of docs/explanation/glossary.md.
GONE = {
    "crew crews": "slot pool",
    "lane lanes": "batcher",
    "horizon horizons lookback": "poll window",
    "easing": "duty cycle",
    "workshop workshops": "provider context",
    "office offices": "delivery context",
    "park parks parked parking": "snooze",
    "door doors": "endpoint",
}

#: Old words -> files, or folders with a slash, in which one of them may stand.
STILL: dict[str, tuple[str, ...]] = {
    "crew crews": (
        "tests/packaging/test_public_face.py",  # asks for a name that must not be there
    ),
    "lane lanes": ("tests/crossings/",),
    "horizon horizons lookback": (
        "leasehold/broker/outbox.py",
        "leasehold/db/database.py",
        "leasehold/transitions/",
        "tests/transitions/",
    ),
    "park parks parked parking": (
        "bench/generation.py",  # the kind of event `parked` was shipped
        "chaos/",  # the queue `leasehold.parked` of dead-lettered hints was shipped
        "docs/explanation/design.md",
        "docs/operations/upgrading.md",
        "docs/operations/observability.md",  # an outcome of leasehold_attempts_total
        "leasehold/broker/amqp/topology.py",
        "leasehold/transitions/",
        "tests/",
        "worker/attempts/runner.py",  # an outcome of leasehold_attempts_total was shipped
    ),
    "door doors": (
        "api/",
        "bench/",
        "docs/explanation/design.md",
        "leasehold/pipelines/conversion/",
        "leasehold/pipelines/generation/",
        "migrations/versions/0002_add_the_runs_door.py",
        "migrations/versions/0003_add_the_conversion_door.py",
        "migrations/versions/0005_add_the_generation_door.py",
        "tests/api/",
        "tests/conversion/",
        "tests/generation/",
        "tests/runs/",
        "tests/security/",
    ),
}
