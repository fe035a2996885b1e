"""The story that the platform tells of itself, against the one that the rows' own history tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

from chaos.history import History, Row
from leasehold.domain.states import JOB_MOVES, TASK_MOVES, TASK_TERMINAL, JobState, TaskState

_UNFINISHED = frozenset(TaskState) - TASK_TERMINAL


def _edges(
    moves: Mapping[str, tuple[frozenset[TaskState], ...] | tuple[frozenset[JobState], ...]],
) -> set[tuple[str | None, str | None]]:
    return {(str(old), str(new)) for froms, tos in moves.values() for old, new in product(froms, tos)}


#: Beside the verbs: a row is made, a step is freed by the one it needed, and a job ends with steps unfinished.
TASK_EDGES: set[tuple[str | None, str | None]] = (
    _edges(TASK_MOVES)
    | {(None, "blocked"), (None, "pending"), ("blocked", "pending")}
    | {(str(old), new) for old in _UNFINISHED for new in ("skipped", "cancelled")}
)
JOB_EDGES: set[tuple[str | None, str | None]] = _edges(JOB_MOVES) | {(None, "pending")}


def i3(history: History) -> Iterator[str]:
    """Exactly one committed effect per job and step."""
    told = Counter(event["task_id"] for event in history.events if event["kind"] == "completed")
    for task in history.tasks:
        changes = history.task_changes.get(task["id"], ())
        committed = sum((change.moved() or ("", ""))[1] == "succeeded" for change in changes)
        wanted = int(task["status"] == "succeeded")
        if committed != wanted or told[task["id"]] != wanted:
            yield (
                f"{history.name_of(task['id'])} is {task['status']}, was committed {committed} times and its events"
                f" say {told[task['id']]}"
            )


def i4(history: History) -> Iterator[str]:
    """Only edges of the state diagram were used, and each row equals the fold of its events."""
    for change in history.changes:
        edges = TASK_EDGES if change.of == "task" else JOB_EDGES
        move = change.moved() if change.of in ("task", "job") else None
        if move is not None and move not in edges:
            yield f"{change.of} {change.row['id']} went from {move[0]} to {move[1]}"
    for job in history.jobs:
        yield from _unlike_its_events(history, job)


def _unlike_its_events(history: History, job: Row) -> Iterator[str]:
    events = history.events_of.get(job["id"], [])
    if not events:
        yield f"job {job['id']} has no events"
        return
    if events[-1]["job_status"] != job["status"]:
        yield f"job {job['id']} is {job['status']}, its last event says {events[-1]['job_status']}"
    last = {event["task_id"]: (event["task_status"], event["epoch"]) for event in events if event["task_id"]}
    for task in (task for task in history.tasks if task["job_id"] == job["id"]):
        said = last.get(task["id"])
        if said is None and task["status"] not in ("pending", "blocked"):
            yield f"{history.name_of(task['id'])} is {task['status']} and no event tells of it"
        if said is not None and said != (task["status"], task["epoch"]):
            yield f"{history.name_of(task['id'])} is {(task['status'], task['epoch'])}, its events say {said}"


def i16(history: History) -> Iterator[str]:
    """A step never starts before the steps that it needs are committed."""
    done = {
        (change.row["job_id"], change.row["step"]): change.n
        for change in history.changes
        if change.of == "task" and (change.moved() or ("", ""))[1] == "succeeded"
    }
    for task in history.tasks:
        job = history.job_by_id[task["job_id"]]
        for claim in history.claims.get(task["id"], ()):
            for need in history.terms.needs.get((job["pipeline"], task["step"]), ()):
                if done.get((task["job_id"], need), claim.n) >= claim.n:
                    yield f"{history.name_of(task['id'])} started before {need} was committed"


def i20(history: History) -> Iterator[str]:
    """Event numbers are gap-free per job, and a client that resumes sees each event once, in order."""
    for job in history.jobs:
        numbers = [event["seq"] for event in history.events_of.get(job["id"], [])]
        if numbers != list(range(1, len(numbers) + 1)) or job["event_seq"] != len(numbers):
            yield f"job {job['id']} counts {job['event_seq']} events and has {numbers}"
    for job_id, pieces in history.streams.items():
        for cursor, seen in pieces:
            if seen != list(range(cursor + 1, cursor + 1 + len(seen))):
                yield f"who resumed job {job_id} after {cursor} saw {seen}"
