"""The history of a run: all that the checker reads. Times are in seconds since 1970.

`chaos.collect` fills the fields of `History` with evidence. Its properties group the evidence, and find claims and runs
of handlers in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from chaos.amqp_tap import HintRecord
from chaos.evidence import Bound, ExternalLease, Operation, Order, Request, Row, StoredObject, Terms
from chaos.postgres_tap import Session
from chaos.receiver import Delivery
from chaos.row_changes import Change
from chaos.starvation import Starvation, Starved
from leasehold.domain.states import JOB_TERMINAL, JobState

#: The longest gap between two journal lines of a process at work. In the rest of a longer gap the process counts as
#: standing still.
_STILL_SECONDS = 0.5
#: The processes of a run commit many times a second. A longer time without a commit counts as an outage.
_SILENT_SECONDS = 1.0
_CLOSED = JOB_TERMINAL | {JobState.CANCEL_REQUESTED}
#: The moves of a job that is retried: `pending` if it waits at limits or for an external worker.
REPLAYED = {("failed", "pending"), ("failed", "queued")}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, as the change of the task's row shows it. `change_number`: the number of that change. `before`: the
    row before the claim; {}: the claim made the row.
    """

    task: str
    epoch: int
    attempt: int
    process: str
    owner: str
    change_number: int
    at: float
    before: Row


class Failover(NamedTuple):
    """A standby was the primary from `promoted_at` on, in seconds since 1970. The old primary answered nothing from
    `silent_since` on; None: it had ended. Else it may have served some processes again until `ended_at`. `old_port`: of
    the old primary. The processes of the slots `cut_off` did not reach the new primary before `reached_at`.
    """

    silent_since: float | None
    promoted_at: float
    ended_at: float
    old_port: int = 0
    cut_off: tuple[str, ...] = ()
    reached_at: float = 0.0


@dataclass
class History:
    """Rows are dicts by column, as they are at rest. `changes`: every change of a row during the run, in order."""

    terms: Terms
    jobs: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    outputs: list[Row] = field(default_factory=list)
    results: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    media: list[Row] = field(default_factory=list)
    upload_rows: list[Row] = field(default_factory=list)
    conversions: list[Row] = field(default_factory=list)
    generations: list[Row] = field(default_factory=list)
    outbox: list[Row] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    run_rows: list[Row] = field(default_factory=list)
    firings: list[Row] = field(default_factory=list)  # the run rows that schedules made
    subscribers: frozenset[str] = frozenset()  # tenants that have webhooks
    deliveries: list[Delivery] = field(default_factory=list)  # webhooks, as their receiver recorded them
    journal: list[Row] = field(default_factory=list)  # the lines of handlers: begin, tick, end and stop
    leases: list[ExternalLease] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    tags: list[Row] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)  # as the providers recorded them
    hint_records: list[HintRecord] = field(default_factory=list)  # hints, as the proxy before the broker saw them
    sessions: list[Session] = field(default_factory=list)  # as the proxy before PostgreSQL saw them
    objects: dict[str, StoredObject] = field(default_factory=dict)  # by key
    overwritten: set[str] = field(default_factory=set)  # keys that the store replaced in spite of create-only
    uploads: list[str] = field(default_factory=list)  # keys of uploads open at rest that a worker could have ended
    expected_bytes: dict[tuple[str, str, str], str] = field(default_factory=dict)  # pipeline, output, words: sha256
    streams: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)  # job: (cursor, events received)
    schedules: list[Row] = field(default_factory=list)
    probes: list[tuple[str, str, int]] = field(default_factory=list)  # with another tenant's key: kind, request, status
    overdue: list[list[str]] = field(default_factory=list)  # for each look after the faults: leases passed long ago
    queued: dict[str, int] = field(default_factory=dict)  # by queue: the messages that were ready at rest
    returned: dict[str, int] = field(default_factory=dict)  # by queue: messages that came back when the workers left
    dead_letters: list[str] = field(default_factory=list)  # the bodies of dead-lettered hints
    leftovers: list[tuple[str, list[str]]] = field(default_factory=list)  # kind of thing, what was left of it
    has_broker: bool = True
    gathered: bool = False  # the rows were read from an installation, after the run
    rested: bool = False
    rest_seconds: float = 0.0  # from the end of the faults until the installation was at rest
    children_killed: int = 0
    jumps: list[tuple[float, float]] = field(default_factory=list)  # of the database's clock: the time, seconds ahead
    of_release: set[str] = field(default_factory=set)  # processes that ran the release's code
    starved: list[Starved] = field(default_factory=list)  # waits for a processor, of the platform and of the run
    in_progress: dict[str, float] = field(default_factory=dict)  # by transaction: it may have lasted until then
    begun: dict[str, float] = field(default_factory=dict)  # by transaction: by then it had begun
    restarts: list[float] = field(default_factory=list)  # of the database: soon after these times
    failovers: list[Failover] = field(default_factory=list)
    has_only_failovers: bool = True  # the plan has no other faults

    def database_time(self, at: float) -> float:
        """The time of the database's clock at the true time `at`."""
        return at + next((ahead for since, ahead in reversed(self.jumps) if since <= at), 0.0)

    def locked_until(self, change: Change) -> float:
        """Until when the transaction of the change may have been in progress: others saw the row as it was before, and
        could not change it.
        """
        return max(change.at, self.in_progress.get(change.xact, 0.0))

    @cached_property
    def tagged(self) -> dict[str, list[str]]:
        """The value of a tag -> the jobs that have it."""
        grouped: defaultdict[str, list[str]] = defaultdict(list)
        for tag in self.tags:
            grouped[tag["value"]].append(tag["job_id"])
        return grouped

    @cached_property
    def cancelled_in_bulk(self) -> set[str]:
        """The jobs that a bulk operation may have cancelled."""
        return {
            job
            for operation in self.operations
            if operation.action == "cancel"
            for job in self.tagged.get(operation.key, ())
        }

    def value_of(self, job: str) -> Any:
        """The result of a job with one step, or None."""
        tasks = {task["id"] for task in self.tasks_of.get(job, ())}
        return next((result["value"] for result in self.results if result["task_id"] in tasks), None)

    @cached_property
    def job_by_id(self) -> dict[str, Row]:
        return {job["id"]: job for job in self.jobs}

    @cached_property
    def runs_of(self) -> dict[str, list[str]]:
        """Schedule -> the jobs that it made."""
        grouped: defaultdict[str, list[str]] = defaultdict(list)
        for run in self.firings:
            grouped[run["schedule_id"]].append(run["job_id"])
        return grouped

    @cached_property
    def revived(self) -> set[str]:
        """The jobs that had failed and were retried."""
        return {change.row["id"] for change in self.changes if change.kind == "job" and change.moved() in REPLAYED}

    @cached_property
    def task_by_id(self) -> dict[str, Row]:
        return {task["id"]: task for task in self.tasks}

    @cached_property
    def tasks_of(self) -> dict[str, list[Row]]:
        grouped: defaultdict[str, list[Row]] = defaultdict(list)
        for task in self.tasks:
            grouped[task["job_id"]].append(task)
        return grouped

    @cached_property
    def events_of(self) -> dict[str, list[Row]]:
        grouped: defaultdict[str, list[Row]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: (event["job_id"], event["seq"])):
            grouped[event["job_id"]].append(event)
        return grouped

    @cached_property
    def task_changes(self) -> dict[str, list[Change]]:
        grouped: defaultdict[str, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.kind == "task":
                grouped[change.row["id"]].append(change)
        return grouped

    @cached_property
    def closed_at(self) -> dict[str, float]:
        """Job -> when it first had a status in which no step is claimed."""
        closed: dict[str, float] = {}
        for change in self.changes:
            if change.kind == "job" and change.row["status"] in _CLOSED:
                closed.setdefault(change.row["id"], change.at)
        return closed

    @cached_property
    def claims(self) -> dict[str, list[Claim]]:
        """Task -> its claims in order: the changes that raised the epoch or gave the lease to another worker."""
        grouped: defaultdict[str, list[Claim]] = defaultdict(list)
        for task, changed in self.task_changes.items():
            for change in changed:
                before, after = change.before, change.after
                if after and _is_claim(before, after):
                    grouped[task].append(
                        Claim(task, after["epoch"], after["attempt"], change.process, after["lease_owner"],
                              change.number, change.at, before or {})
                    )  # fmt: skip
        return grouped

    @cached_property
    def ended_at(self) -> dict[str, float]:
        """Job -> when it first ended."""
        ended: dict[str, float] = {}
        for change in self.changes:
            if change.kind == "job" and change.row["status"] in JOB_TERMINAL:
                ended.setdefault(change.row["id"], change.at)
        return ended

    def seconds_held_up(self, since: float, until: float, *, allow_starvation: bool = True) -> float:
        """For how many of the seconds between the two times no worker could end a job: gaps of more than
        _SILENT_SECONDS between commits and, if `allow_starvation`, the time for which some process waited for a
        processor.
        """
        moments = [since, *self._commits[bisect_right(self._commits, since) : bisect_left(self._commits, until)], until]
        held_up = 0.0
        for earlier, later in pairwise(moments):
            gap = later - earlier
            if gap > _SILENT_SECONDS:
                held_up += gap
            elif gap > 0.0 and allow_starvation:
                held_up += min(gap, self.starvation.longest_wait(earlier, later))
        return held_up

    @cached_property
    def _commits(self) -> list[float]:
        return sorted(change.at for change in self.changes)

    def seconds_worked(self, process: str, since: float, until: float, *, allow_starvation: bool = True) -> float:
        """For how many of the seconds between the two times the journal shows that the process did not stand still. If
        `allow_starvation`, without the time for which it waited for a processor.
        """
        lines = self._signs_of_life.get(process, [])
        moments = [since, *lines[bisect_right(lines, since) : bisect_left(lines, until)], until]
        return sum(
            min(
                max(0.0, gap - (self.starvation.wait_of(process, earlier, later) if allow_starvation else 0.0)),
                _STILL_SECONDS,
            )
            for earlier, later in pairwise(moments)
            if (gap := later - earlier) > 0.0
        )

    @cached_property
    def starvation(self) -> Starvation:
        return Starvation(self.starved)

    @cached_property
    def _signs_of_life(self) -> dict[str, list[float]]:
        lines: defaultdict[str, list[float]] = defaultdict(list)
        for line in self.journal:
            lines[line["process"]].append(line["at"])
        return {process: sorted(moments) for process, moments in lines.items()}

    @cached_property
    def handler_runs(self) -> list[Run]:
        """Every run of a handler in the journal, with the claim to which the run belongs."""
        return list(self._runs())

    def _runs(self) -> Iterator[Run]:
        ends = {line["run"]: line["at"] for line in self.journal if line["what"] == "end"}
        lasts = {line["run"]: line["at"] for line in self.journal}
        begins: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for line in self.journal:
            if line["what"] == "begin":
                begins[line["task"], line["process"]].append(line)
        claim_of = {line["run"]: claim for lines in begins.values() for line, claim in self._claims_of(lines)}
        for line in self.journal:
            if line["what"] == "begin":
                yield Run(
                    line["run"], line["task"], line["step"], line["process"], line["at"], ends.get(line["run"]),
                    lasts[line["run"]], claim_of[line["run"]],
                )  # fmt: skip

    def _claims_of(self, begins: Sequence[Row]) -> Iterator[tuple[Row, Claim | None]]:
        """Each run of a task in one process, with its claim: the newest before the run that no later run has. A process
        may have claimed the task again before it began a run of its earlier claim. Two runs have the same claim only if
        the process had no other.
        """
        taken: set[int] = set()
        for line in reversed(begins):
            earlier = [
                claim
                for claim in self.claims.get(line["task"], ())
                if claim.process == line["process"] and claim.at <= line["at"]
            ]
            free = [claim for claim in earlier if claim.epoch not in taken] or earlier
            if free:
                taken.add(free[-1].epoch)
            yield line, free[-1] if free else None

    def text_param_of(self, job: Row) -> str:
        """The text in the job's parameters, on which its outputs depend."""
        return str(job["params"].get("text", ""))

    def name_of(self, task: str) -> str:
        """The task's pipeline, step and id, for evidence."""
        row = self.task_by_id.get(task)
        job = self.job_by_id.get(row["job_id"]) if row else None
        return f"{job['pipeline']}.{row['step']} {task}" if row and job else f"task {task}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a handler. `end`: None if the process died, or the handler raised or was stopped. `last`: the time of
    its last journal line. `claim`: None if its process had not claimed the task.
    """

    id: str
    task: str
    step: str
    process: str
    begin: float
    end: float | None
    last: float
    claim: Claim | None


def is_external(task: Row) -> bool:
    """Whether external workers do the task. They poll for due tasks, and get no hints."""
    return ":" in task["queue"]


def _is_claim(before: Row | None, after: Row) -> bool:
    """Whether the change is a claim. `before`: None if the statement that suspends a workflow made the row of a step
    and claimed it immediately.
    """
    if before is None:
        return bool(after["status"] == "running")
    has_new_owner = after["status"] == "running" and after["lease_owner"] != before["lease_owner"]
    return has_new_owner or bool(after["epoch"] != before["epoch"])
