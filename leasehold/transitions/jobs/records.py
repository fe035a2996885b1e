"""Makes the records that `submit` (submissions.py) writes for a new job (`NewJob`): one record for the job, and one for
each task. Also computes a new job's first state and first steps, and the names of external workers' queues. This module
itself writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import ceil
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import TENANT
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, Step, pinned_queue
from leasehold.domain.states import JobState, TaskState
from leasehold.domain.tags import check_tags

#: The names of external workers' queues begin with this. Such a queue belongs to one tenant, and its tasks get no hints
#: (messages that tell workers of due tasks).
EXTERNAL = "ext:"


def external_queue(tenant_id: str, queue: str) -> str:
    """The name of a queue of external workers, as rows have it. The name contains the tenant, so no other tenant can
    claim from the queue.
    """
    return f"{EXTERNAL}{tenant_id}:{queue}"


def client_queue(queue: str) -> str:
    """The queue's name as clients know it. For `ext:TENANT:NAME` it is NAME; any other name stays the same. TENANT may
    contain colons, and NAME contains none.
    """
    return queue.rpartition(":")[2] if queue.startswith(EXTERNAL) else queue


@dataclass(frozen=True, slots=True)
class RunOf:
    """What a run has besides its job. `template` and `version`: what runs. `scope` and `scope_id`: the client's names
    for what the run is about. `schedule_id` and `tick`: the schedule that made the run, and the instant at which the
    run was due. `rerun_of`: the run that this run repeats.
    """

    template: str
    version: int
    scope: str
    scope_id: str
    schedule_id: UUID | None = None
    tick: datetime | None = None
    rerun_of: UUID | None = None

    def record(self) -> dict[str, Any]:
        return {
            "template": self.template,
            "version": self.version,
            "scope": self.scope,
            "scope_id": self.scope_id,
            "schedule_id": self.schedule_id,
            "tick": self.tick,
            "rerun_of": self.rerun_of,
        }


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be written. The caller has validated `params` against the pipeline's params model."""

    pipeline: Pipeline
    tenant_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)  # input name -> key of the object in the store
    output_prefix: str | None = None  # default: jobs/{id}/output
    priority: int = 1  # 0 high, 1 normal, 2 low
    step_priority: Mapping[str, int] = field(default_factory=dict)  # by step name, if it differs from `priority`
    keep_seconds: int | None = None  # how long the ended job and its objects stay; None: for ever
    # None: PostgreSQL computes the deadline. While the job is held (waits at its concurrency limits), the deadline
    # comes from the pipeline's `start_within`; once the job is admitted, from the pipeline's timeout.
    deadline_at: datetime | None = None
    trace: Mapping[str, str] | None = None  # ids of the request that submits the job
    id: UUID = field(default_factory=new_id)
    not_before: datetime | None = None  # no step starts earlier
    limits: Sequence[ConcurrencyLimit] = ()  # the job waits until all of them admit it (transitions.concurrency)
    exclusive_key: str | None = None  # a second unfinished job with this key raises asyncpg.UniqueViolationError
    dedupe_key: str | None = None  # as `exclusive_key`, but a client has chosen this key for its run
    start_within: timedelta | None = None  # replaces the pipeline's `start_within`
    notify: bool = False  # a webhook subscribes to the end of the job
    pin: str | None = None  # only workers with this label (LEASEHOLD_WORKER_LABELS) run the job
    run: RunOf | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # by name, at most 8 (domain/tags.py)
    callback_url: str | None = None  # the platform sends a message about each end of the job to this URL


def job_record(new: NewJob, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The job as a record of the statement SUBMIT (submissions.py). `tasks`: the records of its tasks, which
    `task_records` returned.
    """
    terms = new.pipeline.terms
    is_computed = new.deadline_at is None  # PostgreSQL computes the deadline
    status = _first_job_state([(task["status"], task["queue"].startswith(EXTERNAL)) for task in tasks])
    return (
        {
            "id": new.id,
            "tenant_id": new.tenant_id,
            "pipeline": new.pipeline.name,
            "pipeline_version": new.pipeline.version,
            "status": status,
            "priority": new.priority,
            "steps": sum(task["status"] != "skipped" for task in tasks),
            "keep_seconds": new.keep_seconds,
            "params": new.params,
            "inputs": new.inputs,
            "output_prefix": new.output_prefix or f"jobs/{new.id}/output",
            "trace": _hint_headers(new),
            "deadline_at": new.deadline_at,
            "not_before": new.not_before,
            "timeout_seconds": _whole_seconds(terms.timeout) if is_computed else None,
            "start_within_seconds": _whole_seconds(new.start_within or terms.start_within) if is_computed else None,
            "external": sum(step.external for step in new.pipeline.steps),  # how many steps external workers do
            "gated": bool(new.limits),  # the job counts at concurrency limits
            "notify": new.notify or new.callback_url is not None,
            "exclusive_key": new.exclusive_key,
            "dedupe_key": new.dedupe_key,
            "cancelable": terms.cancelable,
            "grace_seconds": ceil(terms.grace.total_seconds()),
            # For a job with a single task, the view `history` derives some events from the rows of the job and of this
            # task. So the platform writes no rows for these events.
            "single_task": tasks[0]["id"] if len(tasks) == 1 and status is JobState.QUEUED else None,
        }
        | (new.run.record() if new.run is not None else {})
        | ({"tags": check_tags(new.tags)} if new.tags else {})
        | ({"callback_url": new.callback_url} if new.callback_url is not None else {})
    )


def first_state(new: NewJob) -> JobState:
    """The state in which `submit` writes the job. Raises Invalid `nothing_to_do`."""
    steps, skipped = _steps_of(new.pipeline, new.params)
    needs = _needs_of(steps, skipped)
    states = [_first_task_state(step, *_waits_of(new, needs[step.name]), skipped) for step in steps]
    return _first_job_state([(state, step.external) for state, step in zip(states, steps, strict=True)])


def _first_job_state(tasks: Sequence[tuple[str, bool]]) -> JobState:
    """The job's first state. `tasks`: for each task, its first state and whether it is for an external worker.

    WAITING_WORKER: some tasks are not blocked, and all of these are for external workers. QUEUED: a worker may claim a
    task now. PENDING: all tasks are blocked, or wait for their start time.
    """
    first_tasks = [task for task in tasks if task[0] in ("pending", "waiting")]
    states_for_workers = [state for state, is_external in first_tasks if not is_external]
    if first_tasks and not states_for_workers:
        return JobState.WAITING_WORKER
    return JobState.QUEUED if "pending" in states_for_workers else JobState.PENDING


def _whole_seconds(duration: timedelta | None) -> int | None:
    return None if duration is None else max(round(duration.total_seconds()), 1)


def _hint_headers(new: NewJob) -> dict[str, str]:
    """The headers of the job's hints. The job's row has them, and each statement that writes a hint copies them."""
    return {**(new.trace or {}), TENANT: new.tenant_id}


def task_records(new: NewJob) -> list[dict[str, Any]]:
    """The job's tasks as records of SUBMIT: one for each step. Parts are left out, because a step makes their tasks
    when it fans out. Raises Invalid `nothing_to_do`.
    """
    steps, skipped = _steps_of(new.pipeline, new.params)
    ids, needs = {step.name: new_id() for step in steps}, _needs_of(steps, skipped)
    return [_task_record(new, step, position, ids, needs, skipped) for position, step in enumerate(steps)]


def first_steps(pipeline: Pipeline, params: Mapping[str, Any]) -> list[Step]:
    """The steps that wait for no other step in a new job with these parameters. Raises Invalid `nothing_to_do`."""
    steps, skipped = _steps_of(pipeline, params)
    needs = _needs_of(steps, skipped)
    return [step for step in steps if step.name not in skipped and not needs[step.name]]


def queue_of(step: Step, tenant_id: str, pin: str | None) -> str:
    """The queue in which the step's task waits. `pin`: as in NewJob."""
    return external_queue(tenant_id, step.queue) if step.external else pinned_queue(step.queue, pin)


def _steps_of(pipeline: Pipeline, params: Mapping[str, Any]) -> tuple[list[Step], frozenset[str]]:
    """The steps that get a task immediately (all steps except parts), and the names of those that the parameters skip.
    A skipped step gets a task in the state SKIPPED. Raises Invalid `nothing_to_do` if all steps are skipped.
    """
    steps = [step for step in pipeline.steps if not step.part]
    skipped = pipeline.skipped(params) & {step.name for step in steps}
    if len(skipped) == len(steps):
        raise Invalid("nothing_to_do", "The parameters skip every step.")
    return steps, skipped


def _needs_of(steps: Sequence[Step], skipped: Collection[str]) -> dict[str, set[str]]:
    """Name of a step -> the steps for which it waits. A step waits for the steps that it needs. In place of a skipped
    step, it waits for the steps that the skipped step needs, so the order of the other steps stays the same.
    """
    needs: dict[str, set[str]] = {}
    for step in steps:  # each step comes after those that it needs
        needs[step.name] = set().union(*(needs[name] if name in skipped else {name} for name in step.needs))
    return needs


def _waits_of(new: NewJob, needs: set[str]) -> tuple[int, datetime | None]:
    """For one step: for how many other steps it waits, and the time before which it must not start (None: no such
    time). `needs`: the names of the steps for which it waits. Only a step without `needs` gets the time, because all
    other steps start later anyway.
    """
    waiting_on = len(needs)
    not_before = new.not_before if waiting_on == 0 else None
    if new.limits and waiting_on == 0:
        waiting_on = 1  # all concurrency limits together count as one more step that the task needs
    return waiting_on, not_before


def _task_record(
    new: NewJob,
    step: Step,
    position: int,
    ids: Mapping[str, UUID],
    needs: Mapping[str, set[str]],
    skipped: Collection[str],
) -> dict[str, Any]:
    # `ids`: the name of a step -> the id of its task. `needs`: from `_needs_of`. `skipped`: from `_steps_of`.
    waiting_on, not_before = _waits_of(new, needs[step.name])
    return {
        "id": ids[step.name],
        "job_id": new.id,
        "tenant_id": new.tenant_id,
        "priority": new.step_priority.get(step.name, new.priority),
        "trace": _hint_headers(new),
        "step": step.name,
        "position": position,
        "queue": queue_of(step, new.tenant_id, new.pin),
        "status": _first_task_state(step, waiting_on, not_before, skipped),
        "waiting_on": waiting_on,
        # The tasks that wait for this task.
        "unblocks": [ids[other] for other, needed in needs.items() if step.name in needed],
        "max_attempts": step.max_attempts,
        "handler": step.handler,
        "timeout_seconds": _task_timeout(step),
        "cancelable": step.cancelable,
        "not_before": not_before,
    }


def _task_timeout(step: Step) -> int | None:
    """Seconds that one attempt may take, if the template sets them. None: the worker uses the limit in the step's code.
    An external worker has no such code, so its task gets the step's default here.
    """
    if step.timeout_seconds is None and step.external:
        return max(int(step.timeout.total_seconds()), 1)
    return step.timeout_seconds


def _first_task_state(step: Step, waiting_on: int, not_before: datetime | None, skipped: Collection[str]) -> TaskState:
    if step.name in skipped:
        return TaskState.SKIPPED
    if waiting_on:
        return TaskState.BLOCKED
    return TaskState.PENDING if not_before is None else TaskState.WAITING
