"""What a worker counts. Labels are bounded: pipelines, steps, queues and outcomes, never ids.

Children are looked up once (`lru_cache`): finding one by its labels costs four times what counting does, and an
attempt counts ten things.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter

from prometheus_client import Counter, Histogram

from leasehold.pipeline import MIB
from leasehold.telemetry.meters import QUICK, Bounded, counter, gauge, histogram
from leasehold.transitions.endings import JobEnded

HINTS = counter(
    "hints_total",
    "Hints that arrived. claimed: it led to a lease; duplicate: this worker has the task already; stale: finished, "
    "not due, or somebody else's",
    ["result"],
)
CLAIMS = counter("claims_total", "Tasks claimed, by how they were found", ["found_by"])
WAIT = histogram(
    "task_wait_seconds",
    "From when a task could run until it was claimed. new: first runs; retry: after an error; poll: parked before",
    ["queue", "kind"],
)
ATTEMPTS = counter("attempts_total", "Attempts ended", ["pipeline", "step", "outcome"])
SECONDS = histogram("attempt_duration_seconds", "Claim to settlement", ["pipeline", "step"])
RETRIES = counter("retries_total", "Attempts that failed and will be repeated", ["pipeline", "step", "code"])
DEAD = counter("dead_letters_total", "Tasks given up: they wait for somebody to replay", ["pipeline", "step", "code"])
JOBS = counter(
    "jobs_finished_total",
    "Jobs ended. rejected: an input that no attempt can help; failed: all attempts were in vain; expired: too late",
    ["pipeline", "outcome"],
)
JOB_SECONDS = histogram("job_duration_seconds", "From a job's submission to its success", ["pipeline"])
ADOPTED = counter("outputs_adopted_total", "Attempts that found their work already done", ["pipeline", "step"])
LEASES = gauge("leases_held", "Leases that this worker holds")
LOST = counter("leases_lost_total", "Leases that were lost before the attempt could settle")
TAKEN_OVER = counter("leases_taken_over_total", "Tasks claimed from an owner whose lease had passed or who was gone")
EXPIRED = counter("leases_expired_total", "Leases of lost workers that this worker's sweeper ended")
REFUSED = counter("zombie_writes_refused_total", "Settlements that changed nothing: the lease was somebody else's")
STATEMENTS = histogram(
    "statement_duration_seconds",
    "Round trip of a batched statement: claim, look, settle, renew",
    ["statement"],
    buckets=QUICK,
)
RELAYED = counter("outbox_relayed_total", "Hints that the relay sent because their committer did not")
SLOTS = gauge("worker_slots", "Attempts that can run here at once, and that do", ["state"])
DRAINING = gauge("worker_draining", "1 while this worker takes nothing new because it is stopping")
CRASHES = counter("child_crashes_total", "Child processes that died of a step", ["how"])
CHILD_PEAK = histogram(
    "child_memory_peak_bytes",
    "The most memory that a child held by the end of a run",
    ["pipeline", "step"],
    buckets=[size * MIB for size in (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)],
)

# Words that are known before: they are there from the start, so that their first increase is seen.
for _result in ("claimed", "duplicate", "stale"):
    HINTS.labels(_result)
for _how in ("hint", "look"):
    CLAIMS.labels(_how)
_code = Bounded()
_KINDS = {"pending": "new", "retry": "retry", "waiting": "poll"}


class StepMeters:
    """The children of one step."""

    def __init__(self, pipeline: str, step: str) -> None:
        self._names = (pipeline, step)
        self._seconds = SECONDS.labels(pipeline, step)
        self._outcomes: dict[str, Counter] = {}

    def ended(self, outcome: str, seconds: float, exemplar: dict[str, str] | None) -> None:
        if outcome not in self._outcomes:
            self._outcomes[outcome] = ATTEMPTS.labels(*self._names, outcome)
        self._outcomes[outcome].inc()
        self._seconds.observe(seconds, exemplar)

    def failed(self, outcome: str, code: str) -> None:
        """An attempt that failed: `retried`, or `failed` for good."""
        (RETRIES if outcome == "retried" else DEAD).labels(*self._names, _code(code)).inc()


@lru_cache(maxsize=1000)
def of_step(pipeline: str, step: str) -> StepMeters:
    return StepMeters(pipeline, step)


@lru_cache(maxsize=10)
def hinted(result: str) -> Counter:
    return HINTS.labels(result)


@lru_cache(maxsize=10)
def found_by(how: str) -> Counter:
    return CLAIMS.labels(how)


@lru_cache(maxsize=1000)
def _wait(queue: str, kind: str) -> Histogram:
    return WAIT.labels(queue, kind)


@lru_cache(maxsize=1000)
def _job_seconds(pipeline: str) -> Histogram:
    return JOB_SECONDS.labels(pipeline)


@lru_cache(maxsize=1000)
def _jobs(pipeline: str, outcome: str) -> Counter:
    return JOBS.labels(pipeline, outcome)


def claimed(queue: str, was: str, waited: float) -> None:
    """A task was claimed from the state `was`, `waited` seconds after it could have been."""
    if was == "running":
        TAKEN_OVER.inc()
    else:
        _wait(queue, _KINDS[was]).observe(max(waited, 0.0))


def jobs_ended(ended: Sequence[JobEnded]) -> None:
    for job in ended:
        _jobs(job.pipeline, job.outcome).inc()
        if job.outcome == "succeeded":
            _job_seconds(job.pipeline).observe(job.seconds)


@lru_cache(maxsize=16)
def _statement(name: str) -> Histogram:
    return STATEMENTS.labels(name)


@contextmanager
def timed(statement: str) -> Iterator[None]:
    """Measure a round trip that succeeds; one that fails is counted by what repeats it."""
    started = perf_counter()
    yield
    _statement(statement).observe(perf_counter() - started)
