"""The evidence of a chaos run: what its clients, providers and external workers recorded, and the objects that it left.

`chaos.collect` gathers it, and the checks read it from `chaos.history.History`. Times are in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: A row of the database by column, with its ids as text.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client, with all its tries.

    `kind`: the kind of job that the client asked for, such as "short" or "conversion", or an action, such as "cancel"
    or "errand".
    `answer`: accepted, refused or unknown. The answer to a cancel is `accepted` if the job was cancelled immediately,
    and `stopping` if a step runs: the step must stop first, or may still succeed. `job`: the job that the request made
    or acted on. Empty: the client knows of none.

    `endpoint`: such as "POST /v1/runs". Empty: the request went to PostgreSQL or to the object store instead.
    `answers`: for each try with a 2xx answer, in order, the ids in the answer. `jobs_requested`: how many jobs the
    request asks for.

    The jobs of a request can be found by its `key`: a run has the key as its `scope_id`, a conversion as its
    `exclusive_key`, a generation in its prompt.
    """

    kind: str
    tenant: str
    #: The Idempotency-Key; for a picture also the file's name. A request without this header has another name here,
    #: such as "cancel" and the id of a job.
    key: str
    asked_at: float
    answered_at: float
    answer: str
    job: str = ""
    tries: int = 1
    endpoint: str = ""
    answers: tuple[tuple[str, ...], ...] = ()
    jobs_requested: int = 1


@dataclass
class Bound:
    """A declared limit, in force from `since` to `until`. `key`: what it limits, such as "template:short"."""

    tenant: str
    key: str
    at_most: int | None
    per_minute: int | None
    since: float
    until: float = float("inf")


@dataclass(frozen=True, slots=True)
class ExternalLease:
    """One lease, as its external worker recorded it. `end`: completed | failed | stopped | lost | died | unknown."""

    tenant: str
    worker: str
    task: str
    epoch: int
    claimed_at: float
    ended_at: float
    end: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk operation, requested with the Idempotency-Key `key`, on the runs that have this key as a tag. `targets`:
    the runs that the client knew before the request; for a retry, only those that had failed by then.
    """

    tenant: str
    action: Literal["retry", "cancel"]
    key: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order at a provider. `key`: the client's name of the generation. `id`: the provider's name of the order."""

    provider: str
    key: str
    id: str
    at: float
    last_polled_at: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Terms:
    """What the checks must know about the run's workers: their settings, and the steps of their pipelines. In the
    mappings and the set, (pipeline, step) names a step.
    """

    lease_seconds: float
    sweep_seconds: float
    max_losses: int
    max_crashes: int
    max_attempts: Mapping[tuple[str, str], int]
    needs: Mapping[tuple[str, str], tuple[str, ...]]  # the steps that must succeed before the step begins
    inline_steps: frozenset[tuple[str, str]]  # run in the worker's own process; their handlers write the journal
    writes: Mapping[tuple[str, str], str]  # the output that a success of the step must have
    trust_margin_seconds: float = 1.0  # a worker must stop trusting its lease this long before the lease passes
