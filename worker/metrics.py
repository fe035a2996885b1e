"""The metrics of a worker. Labels are bounded: pipelines, steps, queues and outcomes, never ids.

Metrics that every attempt updates are fast metrics (`fast_counter`, `fast_histogram`). They have no lock, so only one
thread may update a time series: the main loop's thread or the heartbeat's thread. All other metrics are objects of the
Prometheus client library, which have locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter

from leasehold.domain.pipeline import MIB
from leasehold.telemetry.dead_letters import bounded_code
from leasehold.telemetry.meters import QUICK, counter, fast_counter, fast_histogram, gauge, histogram

HINTS = fast_counter(
    "hints_total",
    "Hints that arrived. claimed: this worker got a lease; duplicate: it held the task already; stale: the task is "
    "finished, not due, or another worker's",
    ["result"],
)
CLAIMS = fast_counter(
    "claims_total",
    "Tasks that this worker claimed. found_by: hint; look (a poll); next (the completion of the step before)",
    ["found_by"],
)
WAIT = fast_histogram(
    "task_wait_seconds",
    "Time from when a task became due until its claim. new: first runs; retry: after an error; poll: after a snooze",
    ["queue", "kind"],
    words=["kind"],
)
ATTEMPTS = fast_counter("attempts_total", "Attempts that ended", ["pipeline", "step", "outcome"], words=["outcome"])
SECONDS = fast_histogram("attempt_duration_seconds", "Claim to settlement", ["pipeline", "step"])
RETRIES = fast_counter("retries_total", "Attempts that failed and will be repeated", ["pipeline", "step", "code"])
ADOPTED = fast_counter("outputs_adopted_total", "Attempts that found their work already done", ["pipeline", "step"])
LEASES = gauge("leases_held", "Leases that this worker holds")
LOST = counter("leases_lost_total", "Leases that were lost before the attempt could settle")
TAKEN_OVER = counter("leases_taken_over_total", "Tasks claimed from an owner whose lease had expired or who was dead")
EXPIRED = counter("leases_expired_total", "Leases of lost workers that this worker's sweeper ended")
REFUSED = counter(
    "zombie_writes_refused_total", "Settlements that changed nothing, because the lease was another worker's"
)
#: The last argument, QUICK, is a list of buckets for operations that take milliseconds.
STATEMENTS = fast_histogram(
    "statement_duration_seconds", "Round trip of a batched statement: claim, look, settle, renew", ["statement"], QUICK
)
RELAYED = counter("outbox_relayed_total", "Hints that the relay sent because their committer did not")
SLOTS = gauge(
    "worker_slots",
    "Slots of this worker. all: for any tenant; reserve: further slots, for tenants that run nothing else here; busy: "
    "attempts that run now",
    ["state"],
)
BLOCKED = histogram(
    "event_loop_blocked_seconds",
    "How long a handler blocked the event loop, if longer than LEASEHOLD_LOOP_BLOCKED_SECONDS",
    ["pipeline", "step"],
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
STUCK_THREADS = gauge(
    "worker_stuck_threads",
    "Threads of this worker in which a handler runs on 10 seconds after its attempt has ended; if they are over half "
    "of LEASEHOLD_WORKER_THREADS, the worker drains",
    ["pipeline", "step"],
)
LOST_ITEMS = counter(
    "attempt_items_lost_total",
    "Items of attempts that are not stored, because PostgreSQL refused them or the worker ended. kind: logs (lines), "
    "streams (chunks)",
    ["kind"],
)
DRAINING = gauge("worker_draining", "1 while this worker claims no new tasks, because it is stopping")
CRASHES = counter(
    "child_crashes_total",
    "Child processes that ended early. how: the signal, out_of_memory, exit, other (another signal)",
    ["how"],
)
NONE_FORKED = counter(
    "attempts_without_child_total",
    "Attempts at isolated steps, and at tasks with process=True, that were put off, because no child process could be "
    "started or forked for them, or it ended before it began with them",
    ["pipeline"],
)
CHILD_PEAK = histogram(
    "child_memory_peak_bytes",
    "The most memory that a child held by the end of a run",
    ["pipeline", "step"],
    buckets=[size * MIB for size in (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)],
)

#: The values of the label `how` of CRASHES. A signal that is not among them counts as `other`.
HOW_CHILDREN_CRASH = frozenset(
    {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSYS", "SIGTERM", "SIGTRAP", "SIGXCPU",
     "SIGXFSZ", "out_of_memory", "exit", "other"}
)  # fmt: skip

# The lines below create the time series of these label values at the start. If a counter appeared only with its first
# event, PromQL's `increase()` would not count that event.
for _result in ("claimed", "duplicate", "stale"):
    HINTS.labels(_result)
HINTS_CLAIMED = HINTS.labels("claimed")
for _found_by in ("hint", "look", "next"):
    CLAIMS.labels(_found_by)
for _how in sorted(HOW_CHILDREN_CRASH):
    CRASHES.labels(_how)
#: A task's state before its claim -> the label `kind` of its time in WAIT.
_KINDS = {"pending": "new", "retry": "retry", "waiting": "poll"}


def declare_queues(queues: Iterable[str]) -> None:
    """Create the time series for the waits of new tasks in these queues, at 0. Otherwise an alert would not count the
    first tasks that start late.
    """
    for queue in sorted(queues):
        WAIT.labels(queue, "new")


def count_claim(queue: str, previous_state: str, waited: float) -> None:
    """Count a claim of a task, `waited` seconds after the task became due. `previous_state`: the task's state before
    the claim. If it was `running`, this worker has taken the task over from another owner, and TAKEN_OVER counts it.
    Otherwise WAIT observes `waited`.
    """
    if previous_state == "running":
        TAKEN_OVER.inc()
    else:
        WAIT.labels(queue, _KINDS.get(previous_state, "new")).observe(max(waited, 0.0))


def count_end(pipeline: str, step: str, outcome: str, seconds: float, exemplar: Mapping[str, str] | None) -> None:
    """Count the end of an attempt. `exemplar`: the labels that lead from the metric to the attempt's trace."""
    ATTEMPTS.labels(pipeline, step, outcome).inc()
    SECONDS.labels(pipeline, step).observe(seconds, exemplar)


def count_retry(pipeline: str, step: str, code: str) -> None:
    """Count a failed attempt after which another attempt may follow."""
    RETRIES.labels(pipeline, step, bounded_code(code)).inc()


def observe_duration(statement: str, began: float) -> None:
    """Observe a round trip that began at `began` (perf_counter). All round trips of one `statement` must be observed in
    one thread.
    """
    STATEMENTS.labels(statement).observe(perf_counter() - began)
