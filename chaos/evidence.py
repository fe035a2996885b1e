"""The evidence of a run, as its clients, providers and workers recorded it. Times are in seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: A row of the database by column, with its ids as text.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client, with all its tries. `answer`: accepted, refused or unknown. An accepted request has a
    `job`. The answer to a cancel is `accepted` if the job was cancelled at once, and `stopping` if a step runs: the
    step must stop first, or may still succeed.

    `endpoint`: of a request over HTTP, such as "POST /v1/runs"; then `key` is the Idempotency-Key. Every job that the
    request may make also has the key: a run as its `scope_id`, a conversion as its `exclusive_key`, a generation in its
    prompt. `answers`: for each try with a 2xx answer, in order, the ids of the jobs in the answer. `jobs_requested`:
    how many jobs the request asks for.
    """

    kind: str
    tenant: str
    key: str  # the Idempotency-Key, for a picture also the file's name; without one, the job's id
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
    """A declared limit, in force from `since` to `until`."""

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
    """The settings and declarations of the run's workers that the checks compare with."""

    lease_seconds: float
    sweep_seconds: float
    max_losses: int
    max_crashes: int
    max_attempts: Mapping[tuple[str, str], int]  # by pipeline and step
    needs: Mapping[tuple[str, str], tuple[str, ...]]
    inline: frozenset[tuple[str, str]]  # steps whose handlers keep a journal
    writes: Mapping[tuple[str, str], str]  # the output that a success of the step must have
    trust_margin_seconds: float = 1.0  # a worker must stop trusting its lease this long before the lease passes
