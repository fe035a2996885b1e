"""Judges changes of status (I3, I4, I16): a step succeeds once, by an edge of the state diagram, after its needs.

Triggers recorded the changes of the rows. The checks compare them with the platform's own events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Row
from chaos.history import History
from leasehold.domain.states import JOB_MOVES, TASK_MOVES, TASK_TERMINAL, JobState, TaskState

_UNFINISHED = frozenset(TaskState) - TASK_TERMINAL


def _edges(
    moves: Mapping[str, tuple[frozenset[TaskState], ...] | tuple[frozenset[JobState], ...]],
) -> set[tuple[str | None, str | None]]:
    return {(str(old), str(new)) for sources, targets in moves.values() for old, new in product(sources, targets)}


#: The edges that the platform's transitions declare, and four more: a row is made; a suspension makes a row and claims
#: it (I5 checks the owner); a step becomes runnable because the step that it needs succeeded; a job ends with
#: unfinished steps.
TASK_EDGES: set[tuple[str | None, str | None]] = (
    _edges(TASK_MOVES)
    | {(None, "blocked"), (None, "pending"), (None, "running"), ("blocked", "pending")}
    | {(str(old), new) for old in _UNFINISHED for new in ("skipped", "cancelled")}
)
JOB_EDGES: set[tuple[str | None, str | None]] = _edges(JOB_MOVES) | {(None, "pending"), (None, "queued")}


def i3(history: History) -> Iterator[Observation]:
    """Exactly one committed effect per job and step."""
    completions = Counter(event["task_id"] for event in history.events if event["kind"] == "completed")
    for task in history.tasks:
        changes = history.task_changes.get(task["id"], ())
        moves = [change.moved() or ("", "") for change in changes]
        committed = sum(new == "succeeded" for _, new in moves)
        rewound = sum(old == "succeeded" for old, _ in moves)  # a replay from an earlier step runs this step again
        yield observed(
            "step",
            f"{history.name_of(task['id'])} is {task['status']}, was committed {committed} times, rewound {rewound}"
            f" times, and its events say {completions[task['id']]}",
            good=committed == completions[task["id"]] and committed - rewound == int(task["status"] == "succeeded"),
        )


def i4(history: History) -> Iterator[Observation]:
    """Each change of a status is an edge of the state diagram, and each row is as its last event says."""
    for change in history.changes:
        edges = TASK_EDGES if change.kind == "task" else JOB_EDGES
        move = change.moved() if change.kind in ("task", "job") else None
        if move is not None:
            sentence = f"{change.kind} {change.row['id']} went from {move[0]} to {move[1]}"
            yield observed("change of state", sentence, good=move in edges)
    for job in history.jobs:
        yield from _compare_with_events(history, job)


def _compare_with_events(history: History, job: Row) -> Iterator[Observation]:
    events = history.events_of.get(job["id"], [])
    last_status = events[-1]["job_status"] if events else None
    sentence = f"job {job['id']} is {job['status']}, its last event says {last_status}"
    yield observed("job", sentence, good=last_status == job["status"])
    last = {event["task_id"]: (event["task_status"], event["epoch"]) for event in events if event["task_id"]}
    for task in history.tasks_of.get(job["id"], ()):
        by_events = last.get(task["id"])
        is_now = (task["status"], task["epoch"])
        untouched = by_events is None and task["status"] in ("pending", "blocked")
        sentence = f"{history.name_of(task['id'])} is {is_now}, its events say {by_events}"
        yield observed("step", sentence, good=untouched or by_events == is_now)


def i16(history: History) -> Iterator[Observation]:
    """A step never starts before the steps that it needs are committed."""
    done = {
        (change.row["job_id"], change.row["step"]): change.number
        for change in history.changes
        if change.kind == "task" and (change.moved() or ("", ""))[1] == "succeeded"
    }
    for task in history.tasks:
        job = history.job_by_id[task["job_id"]]
        for claim in history.claims.get(task["id"], ()):
            for need in history.terms.needs.get((job["pipeline"], task["step"]), ()):
                sentence = f"{history.name_of(task['id'])} started before {need} was committed"
                yield observed(
                    "start", sentence, good=done.get((task["job_id"], need), claim.change_number) < claim.change_number
                )
