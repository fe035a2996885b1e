"""The states of jobs and tasks, and the moves between them, as data.

    job:   pending -> queued -> running -> succeeded | failed | cancelled | expired
                                running <-> waiting_worker,  running -> cancel_requested -> cancelled
    task:  blocked -> pending -> running -> succeeded | failed
                                 running -> retry | waiting -> running       (an attempt ended, the step did not)
                                 running -> pending                          (lease lost or released)
                 running -> blocked                          (fanned out; runs again when the parts succeeded)
                 blocked -> running                          (claimed by the commit of the step before it)
                 running -> cancelled                        (stopped by a cancel of its job)
           anything unfinished -> skipped | cancelled                        (the job ended first)

Each verb (a key of TASK_MOVES or JOB_MOVES) is a move that a statement of `leasehold.transitions` makes. Only these
statements write a status.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "pending"  # its time has not come, or it waits at its concurrency limits
    QUEUED = "queued"  # a worker may claim a step
    RUNNING = "running"  # a step was claimed
    WAITING_WORKER = "waiting_worker"  # an external worker must do the next step
    # A cancel was requested. A running step has not stopped yet, or a workflow has not seen the cancel yet.
    CANCEL_REQUESTED = "cancel_requested"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed


class TaskState(StrEnum):
    BLOCKED = "blocked"  # a step that it needs has not succeeded
    PENDING = "pending"  # runnable
    RUNNING = "running"  # leased
    RETRY = "retry"  # an attempt failed; runnable again at available_at
    WAITING = "waiting"  # runnable at available_at; the task has snoozed, is a waiting workflow, or starts later
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # failed for good; a dead letter, which can be replayed, unless a workflow started the step
    SKIPPED = "skipped"  # not needed, or its job ended before it could run
    CANCELLED = "cancelled"


#: The states in which a job, or a task, has ended.
JOB_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
TASK_TERMINAL = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.SKIPPED, TaskState.CANCELLED})

#: States of tasks that a worker may claim once `available_at` has passed.
RUNNABLE = frozenset({TaskState.PENDING, TaskState.RETRY, TaskState.WAITING})

#: verb -> (states of a task that the verb accepts, states that it may leave the task in).
TASK_MOVES: dict[str, tuple[frozenset[TaskState], frozenset[TaskState]]] = {
    # A worker claims a task in RUNNING if the lease has expired, or the lease's owner is dead.
    "claim": (RUNNABLE | {TaskState.RUNNING}, frozenset({TaskState.RUNNING})),
    "complete": (frozenset({TaskState.RUNNING}), frozenset({TaskState.SUCCEEDED})),
    # The worker that completes a step claims, in the same commit, the next step or the workflow that waits for the
    # step.
    "go_on": (frozenset({TaskState.BLOCKED, TaskState.WAITING}), frozenset({TaskState.RUNNING})),
    "fail": (frozenset({TaskState.RUNNING}), frozenset({TaskState.RETRY, TaskState.FAILED})),
    "snooze": (frozenset({TaskState.RUNNING}), frozenset({TaskState.WAITING})),
    # A workflow waits for its steps, a signal or a time.
    "suspend": (frozenset({TaskState.RUNNING}), frozenset({TaskState.WAITING})),
    "release": (frozenset({TaskState.RUNNING}), frozenset({TaskState.PENDING})),
    "fan_out": (frozenset({TaskState.RUNNING}), frozenset({TaskState.BLOCKED})),
    "acknowledge_cancel": (frozenset({TaskState.RUNNING}), frozenset({TaskState.CANCELLED})),
    "request_cancel": (
        frozenset({TaskState.BLOCKED}) | RUNNABLE,
        frozenset({TaskState.SKIPPED, TaskState.CANCELLED}),
    ),
    # The concurrency limits let the job begin.
    "admit": (frozenset({TaskState.BLOCKED}), frozenset({TaskState.PENDING, TaskState.WAITING})),
    "expire_lease": (frozenset({TaskState.RUNNING}), frozenset({TaskState.PENDING, TaskState.FAILED})),
    # A client asks to try the failed job again. SKIPPED and CANCELLED: the failure skipped or stopped these tasks.
    "replay": (
        frozenset({TaskState.FAILED, TaskState.SKIPPED, TaskState.CANCELLED}),
        frozenset({TaskState.PENDING, TaskState.BLOCKED}),
    ),
    # A person knows that the step succeeded after all; a replay follows in the same transaction.
    "resolve": (frozenset({TaskState.FAILED}), frozenset({TaskState.SUCCEEDED})),
    # A replay from an earlier step runs this step again. `replay` does not accept SUCCEEDED, so `rewind` precedes
    # `replay` in the same transaction.
    "rewind": (frozenset({TaskState.SUCCEEDED}), frozenset({TaskState.SKIPPED})),
}

_UNFINISHED = frozenset(JobState) - JOB_TERMINAL
#: verb -> (states of a job that the verb accepts, states that it may leave the job in).
JOB_MOVES: dict[str, tuple[frozenset[JobState], frozenset[JobState]]] = {
    "claim": (
        frozenset({JobState.PENDING, JobState.QUEUED, JobState.RUNNING, JobState.WAITING_WORKER}),
        frozenset({JobState.RUNNING, JobState.WAITING_WORKER}),
    ),
    # After the request for a cancel, a worker claims a workflow that has made a call, because the workflow's code must
    # see the cancel.
    "claim_to_see_cancel": (frozenset({JobState.CANCEL_REQUESTED}), frozenset({JobState.CANCEL_REQUESTED})),
    "complete": (
        frozenset({JobState.RUNNING, JobState.WAITING_WORKER, JobState.CANCEL_REQUESTED}),
        frozenset(
            {
                JobState.RUNNING,
                JobState.WAITING_WORKER,
                JobState.CANCEL_REQUESTED,
                JobState.SUCCEEDED,
                JobState.CANCELLED,
            }
        ),
    ),
    "fail": (
        frozenset({JobState.RUNNING, JobState.WAITING_WORKER}),
        frozenset({JobState.RUNNING, JobState.WAITING_WORKER, JobState.FAILED}),
    ),
    "request_cancel": (
        _UNFINISHED - {JobState.CANCEL_REQUESTED},
        frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED}),
    ),
    "acknowledge_cancel": (
        frozenset({JobState.CANCEL_REQUESTED}),
        frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED}),
    ),
    # The leader (the worker that is elected for maintenance) ends a cancel that no worker acknowledges. It does
    # so when the grace time is over, or when the worker that should acknowledge it is lost.
    "end_cancel": (frozenset({JobState.CANCEL_REQUESTED}), frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED})),
    "admit": (
        frozenset({JobState.PENDING}),
        frozenset({JobState.PENDING, JobState.QUEUED, JobState.WAITING_WORKER}),
    ),
    "expire": (_UNFINISHED, frozenset({JobState.EXPIRED})),
    "replay": (
        frozenset({JobState.FAILED}),
        frozenset({JobState.PENDING, JobState.QUEUED, JobState.WAITING_WORKER}),
    ),
}
