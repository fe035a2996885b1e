"""Words that the product no longer uses, what it says instead, and where an old word may still stand.

A rename adds its old word here. GONE holds everywhere: in names, comments, messages and pages. GONE_NAMES holds for the
names of the product's Python code only, because SQL, metrics or plain sentences need the word.
STILL and NAMES_STILL only shrink: a file in them waits for its rename, or keeps a name that was shipped (a queue, a
kind of event, a migration) or that a library defines.
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
    "park parks parked parking": (
        "api/console/timeline.py",  # the kind of event `parked` was shipped
        "bench/generation.py",  # the kind of event `parked` was shipped
        "chaos/",  # the queue `leasehold.parked` of dead-lettered hints was shipped
        "docs/operations/upgrading.md",
        "docs/operations/observability.md",  # an outcome of leasehold_attempts_total
        "leasehold/broker/amqp/topology.py",  # the queue
        "leasehold/transitions/settlements/snoozing.py",  # the kind of event
        "tests/transitions/golden/snooze.sql",
        "tests/transitions/test_not_due.py",
        "worker/attempts/runner.py",  # an outcome of leasehold_attempts_total was shipped
        "tests/worker/test_runner.py",
    ),
    "door doors": (
        "migrations/versions/0002_add_the_runs_door.py",
        "migrations/versions/0003_add_the_conversion_door.py",
        "migrations/versions/0005_add_the_generation_door.py",
        "tests/security/",
    ),
}

#: Old parts of names -> what a name says instead.
GONE_NAMES = {
    "gate gates gated": "limit",
    "look looks looked": "poll, query or read",
    "said told tell tells": "the thing itself: answer, message, record",
    "asked took": "the thing itself: options, body, seconds",
    "ours theirs": "whose it is: worker_end, child_end",
}

#: Old parts of names -> the names that may still stand, by file.
NAMES_STILL: dict[str, dict[str, tuple[str, ...]]] = {
    "gate gates gated": {
        "leasehold/db/run_tables.py": ("gate", "gate_job"),  # the tables' names
        "leasehold/transitions/claims/records.py": ("gated",),  # the column's name
    },
    "said told tell tells": {
        "leasehold/pipelines/media/animation.py": ("tell",),  # Pillow's interface of a picture
    },
}
