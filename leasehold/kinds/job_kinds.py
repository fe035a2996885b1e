"""The kinds of jobs for `/v1/jobs`, with the scopes that a key needs to read and to change their jobs.

The module also has the hook `Kind.operations`. With this hook a kind of work adds its own part to cancels and retries,
and lets people settle jobs whose outcome at another system is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import RUN, Kind, Scopes
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.registry import Pipelines
from leasehold.kinds.loading import load
from leasehold.settings import Settings
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.webhooks import ReportedJobs

#: The scopes that a key needs to read and to change runs.
RUN_SCOPES = Scopes(read="runs:read", write="runs:write")


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A failed job that is to run again. `pin`: only workers with this label run the job; None: any worker.
    `retried_at`: the time of the retry, by the database's clock.
    """

    tenant_id: str
    params: Mapping[str, Any]
    pin: str | None
    retried_at: datetime


@dataclass(frozen=True, slots=True)
class RetryTerms:
    """How a failed job runs again. `params`: the new parameters; None: the job keeps its parameters. `limits`: limits
    of the job in addition to the declared limits.
    """

    params: Mapping[str, Any] | None = None
    limits: Sequence[ConcurrencyLimit] = ()


#: Called with (connection, settings, job id, tenant) in the transaction of a cancel. Returns the hints (messages about
#: due tasks) to publish after the commit.
AfterCancel: TypeAlias = Callable[[Connection, Settings, UUID, str], Awaitable[Sequence[Announcement]]]
#: Called with the arguments of `AfterCancel`, in the transaction in which a cancelled or expired job adopts its order
#: (see UnknownOrders). The hook withdraws the order, because a job that has ended in this way needs the order no more.
#: The hook raises Conflict if the job may not adopt the order now.
AfterAdoption: TypeAlias = AfterCancel
#: Called with (connection, job id, system, order id). Returns the parameters of the other jobs, of all tenants, to
#: which the system itself gave this order id, when their step ordered. The hook may search only the latest jobs.
OrderHolders: TypeAlias = Callable[[Connection, UUID, str, str], Awaitable[Sequence[Mapping[str, Any]]]]
#: Called with (settings, the object that `Kind.opens` has opened, the job) before a retry. The hook must do no input or
#: output, because it runs inside the transaction of the retry.
BeforeRetry: TypeAlias = Callable[[Settings, Any, FailedJob], RetryTerms]
#: Called with (connection, job id, tenant, step) in the transaction of a retry, after the retry has made the job
#: pending. `step`: the step from which the job runs again; None: the failed step. Returns the other jobs that the hook
#: has ended. Raises Conflict if the job may not run again now.
AfterRetry: TypeAlias = Callable[[Connection, UUID, str, str | None], Awaitable[Sequence[JobEnded]]]


@dataclass(frozen=True, slots=True)
class SentOrder:
    """An order that a step sent to `system`. `at`: when, in ISO 8601, if known. `what`: the order without secrets."""

    system: str
    at: str | None
    what: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnknownOrders:
    """How people settle jobs with an unknown order. Such a job has ended without success, and nobody knows whether the
    other system accepted its order. A person who finds the order in the other system lets the job adopt the order by
    its id.

    `step`: the step that sends the order. It should need no other step. Otherwise a retry from an earlier step would
    delete the note of `step` (what its attempts store for later attempts), and `step` could order twice.

    `intent`: the member of that note with which `step` records that it is about to order. The member must stay until an
    attempt knows that nothing was ordered. The reason: if a job has ended without success and the note has this member,
    the platform treats the job's order as unknown, whatever the job's error is.

    `codes`: error codes that such jobs may have, and that few other jobs have. The console's Overview searches for jobs
    with these codes separately, so that many other failures do not hide them.

    `sent(parameters, note, job_id)` returns the order. `adopted(order_id, note)` returns the value with which `step`
    succeeds. Another step must need `step`, and goes on with this value. (In a cancelled or expired job no step goes
    on. There, `after_adoption` withdraws the order.) `adoptable(opened, parameters)` returns whether the other system
    can find an order by its id. `opened` is the object that `Kind.opens` has opened.

    `is_of_installation(parameters)` returns whether the job ordered with the installation's own account. Jobs of all
    tenants may use this account, so at most one job among those of all tenants may have a given order. `holders` finds
    the jobs that have the order already, without an adoption.
    """

    step: str
    intent: str
    sent: Callable[[Mapping[str, Any], Mapping[str, Any], UUID], SentOrder]
    adopted: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
    adoptable: Callable[[Any, Mapping[str, Any]], bool]
    is_of_installation: Callable[[Mapping[str, Any]], bool] = lambda _parameters: False
    holders: OrderHolders | None = None
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindOperations:
    """What the hook `Kind.operations` returns. None: the kind has no such part."""

    unknown_orders: UnknownOrders | None = None
    after_cancel: AfterCancel | None = None
    after_adoption: AfterAdoption | None = None
    before_retry: BeforeRetry | None = None
    after_retry: AfterRetry | None = None


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of job as /v1/jobs uses it. `pipelines`: the pipelines by their names. `scopes`: as in `Kind`; None:
    /v1/jobs does not show the jobs of this kind. `operations`: the loaded hook. The other fields are as in `Kind`.
    """

    name: str
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    scopes: Scopes | None = None
    redacted: frozenset[str] = frozenset()
    parents: Mapping[str, str] = field(default_factory=dict)
    signed_links: bool = True
    operations: KindOperations = KindOperations()

    def __post_init__(self) -> None:
        """Raises DeclarationError for a kind whose jobs could stay pending for ever. When somebody adopts a failed
        job's order, the step that ordered succeeds, and the job becomes pending. Then a later step must run, because a
        job without a step to run never ends. So a step that no parameter can skip must need the step that orders.
        """
        orders = self.operations.unknown_orders
        if orders is None:
            return
        # The pipelines with the step that orders.
        ordering = [pipeline for pipeline in self.pipelines.values() if orders.step in pipeline.by_name]
        if not ordering:
            raise DeclarationError(f"kind {self.name}: no pipeline has the step {orders.step!r} of its UnknownOrders")
        for pipeline in ordering:
            if not any(orders.step in step.needs and step.skip_if is None for step in pipeline.steps):
                raise DeclarationError(
                    f"kind {self.name}: no step of {pipeline.name} always goes on with the order of {orders.step!r}"
                )


@dataclass(frozen=True, slots=True)
class PermittedJobs:
    """Which jobs a request may name. `tenant_id`: only jobs of this tenant; None: of all tenants. `pipelines`: jobs of
    these pipelines, which belong to kinds. `runs`: also runs, and jobs of pipelines that belong to no kind.
    """

    tenant_id: str | None
    runs: bool
    pipelines: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not self.runs and not self.pipelines


def reported_jobs_of(kinds: Iterable[Kind]) -> ReportedJobs:
    """Which jobs webhooks report: those of the pipelines of `kinds`, under the names of the kinds. Exception: webhooks
    send nothing about the jobs of the platform's own pipelines (`own`).
    """
    named_pipelines = [(kind.name, pipeline) for kind in kinds for pipeline in kind.pipelines]
    # `unlimited`: exempt from declared concurrency limits, because the pipeline does the platform's own work.
    own = frozenset(pipeline.name for _, pipeline in named_pipelines if pipeline.terms.unlimited)
    return ReportedJobs({pipeline.name: name for name, pipeline in named_pipelines}, own)


class JobKinds:
    """All kinds of jobs of an installation. `runs`: the scopes for runs. `unowned`: the pipelines of the registry that
    belong to no kind.
    """

    def __init__(self, kinds: Sequence[Kind], pipelines: Pipelines, runs: Scopes) -> None:
        self._by_name = {RUN: JobKind(RUN, scopes=runs)}
        for kind in kinds:
            self._by_name[kind.name] = JobKind(
                kind.name,
                {pipeline.name: pipeline for pipeline in kind.pipelines},
                kind.scopes,
                kind.redacted,
                kind.parents,
                kind.signed_links,
                KindOperations() if kind.operations is None else load(kind.operations)(),
            )
        self._by_pipeline = {name: kind for kind in self._by_name.values() for name in kind.pipelines}
        #: The pipelines that belong to kinds.
        self.owned = tuple(sorted(self._by_pipeline))
        self._registry = pipelines
        self.reported_jobs = reported_jobs_of(kinds)
        self.unowned = tuple(sorted(pipeline.name for pipeline in pipelines if pipeline.name not in self._by_pipeline))

    def of(self, pipeline: str, *, is_run: bool) -> JobKind:
        """The kind of a job. A job of a pipeline that belongs to no kind counts as a run."""
        return self._by_name[RUN] if is_run else self._by_pipeline.get(pipeline, self._by_name[RUN])

    def find(self, name: str) -> JobKind | None:
        """The kind with this name, or None."""
        return self._by_name.get(name)

    def pipeline(self, name: str) -> Pipeline | None:
        """The pipeline with this name, of a kind or of the registry. None: there is no such pipeline."""
        kind = self._by_pipeline.get(name)
        return self._registry.find(name) if kind is None else kind.pipelines[name]

    def permitted_jobs(
        self, tenant_id: str | None, scopes: frozenset[str], *, write: bool, kind: str | None = None
    ) -> PermittedJobs:
        """The jobs that an API key with `scopes` may read, or, with `write`, may change. `kind`: only jobs of this
        kind; None: of every kind.
        """
        allowed_kinds = [
            job_kind
            for job_kind in self._by_name.values()
            if job_kind.scopes is not None
            and (job_kind.scopes.write if write else job_kind.scopes.read) in scopes
            and kind in (None, job_kind.name)
        ]
        pipelines = tuple(sorted(name for job_kind in allowed_kinds for name in job_kind.pipelines))
        return PermittedJobs(tenant_id, any(job_kind.name == RUN for job_kind in allowed_kinds), pipelines)
