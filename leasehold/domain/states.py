"""The state diagram, as data: what a job and a task can be, and which verb moves which to which.

    job:   pending -> queued -> running -> succeeded | failed | cancelled | expired
                                running <-> waiting_worker,  running -> cancel_requested -> cancelled
    task:  blocked -> pending -> running -> succeeded | failed
                                 running -> retry | waiting -> running       (an attempt ended, the step did not)
                                 running -> pending                          (lease lost or given back)
                 running -> blocked                          (spread into parts, goes on when they succeeded)
                 blocked -> running                          (claimed by the commit of the step before it)
                 running -> cancelled                        (stopped because its job was asked to)
           anything unfinished -> skipped | cancelled                        (the job ended without it)

The verbs are the functions of `leasehold.transitions`; nothing else writes a status.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "pending"  # written; no hint of it was confirmed by the broker yet
    QUEUED = "queued"  # announced
    RUNNING = "running"  # a step was claimed
    WAITING_WORKER = "waiting_worker"  # the next step belongs to an external worker
    CANCEL_REQUESTED = "cancel_requested"  # the running step was asked to stop
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed


class TaskState(StrEnum):
    BLOCKED = "blocked"  # a step that it needs has not succeeded
    PENDING = "pending"  # runnable
    RUNNING = "running"  # leased
    RETRY = "retry"  # an attempt failed; runnable again at available_at
    WAITING = "waiting"  # gave its lease back until available_at, or waits for an external worker
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a dead letter: it can be replayed by hand
    SKIPPED = "skipped"  # not needed, or its job ended without it
    CANCELLED = "cancelled"


JOB_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
TASK_TERMINAL = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.SKIPPED, TaskState.CANCELLED})

#: States that a claim may take from, once `available_at` has come.
RUNNABLE = frozenset({TaskState.PENDING, TaskState.RETRY, TaskState.WAITING})

#: verb -> the states of the task it takes, and the states it may leave it in.
TASK_MOVES: dict[str, tuple[frozenset[TaskState], frozenset[TaskState]]] = {
    "claim": (RUNNABLE | {TaskState.RUNNING}, frozenset({TaskState.RUNNING})),
    "complete": (frozenset({TaskState.RUNNING}), frozenset({TaskState.SUCCEEDED})),
    # The step after it, by whoever completed this one.
    "go_on": (frozenset({TaskState.BLOCKED}), frozenset({TaskState.RUNNING})),
    "fail": (frozenset({TaskState.RUNNING}), frozenset({TaskState.RETRY, TaskState.FAILED})),
    "wait_until": (frozenset({TaskState.RUNNING}), frozenset({TaskState.WAITING})),
    "release": (frozenset({TaskState.RUNNING}), frozenset({TaskState.PENDING})),
    "fan_out": (frozenset({TaskState.RUNNING}), frozenset({TaskState.BLOCKED})),
    "acknowledge_cancel": (frozenset({TaskState.RUNNING}), frozenset({TaskState.CANCELLED})),
    "request_cancel": (
        frozenset({TaskState.BLOCKED}) | RUNNABLE,
        frozenset({TaskState.SKIPPED, TaskState.CANCELLED}),
    ),
    "admit": (frozenset({TaskState.BLOCKED}), frozenset({TaskState.PENDING, TaskState.WAITING})),
    "expire_lease": (frozenset({TaskState.RUNNING}), frozenset({TaskState.PENDING, TaskState.FAILED})),
    # Also what its job's failure skipped or stopped.
    "replay": (
        frozenset({TaskState.FAILED, TaskState.SKIPPED, TaskState.CANCELLED}),
        frozenset({TaskState.PENDING, TaskState.BLOCKED}),
    ),
    # A replay from an earlier step: done again, after a moment as skipped inside the same transaction.
    "rewind": (frozenset({TaskState.SUCCEEDED}), frozenset({TaskState.SKIPPED})),
}

#: verb -> the states of the job it takes, and the states it may leave it in.
_LIVE = frozenset(JobState) - JOB_TERMINAL
JOB_MOVES: dict[str, tuple[frozenset[JobState], frozenset[JobState]]] = {
    "announce": (frozenset({JobState.PENDING}), frozenset({JobState.QUEUED})),
    "claim": (
        frozenset({JobState.PENDING, JobState.QUEUED, JobState.RUNNING, JobState.WAITING_WORKER}),
        frozenset({JobState.RUNNING, JobState.WAITING_WORKER}),
    ),
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
        _LIVE - {JobState.CANCEL_REQUESTED},
        frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED}),
    ),
    "acknowledge_cancel": (
        frozenset({JobState.CANCEL_REQUESTED}),
        frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED}),
    ),
    "end_cancel": (frozenset({JobState.CANCEL_REQUESTED}), frozenset({JobState.CANCEL_REQUESTED, JobState.CANCELLED})),
    "admit": (frozenset({JobState.PENDING}), frozenset({JobState.PENDING, JobState.WAITING_WORKER})),
    "expire": (_LIVE, frozenset({JobState.EXPIRED})),
    "replay": (frozenset({JobState.FAILED}), frozenset({JobState.PENDING})),
}
