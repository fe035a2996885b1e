"""Submits bulk operations (`cancel`, `retry` or `delete` of all jobs that a filter finds), and previews them. The
endpoints and the console call `submit` and `preview`.

An operation acts only on jobs that exist at its submission, and only on kinds of jobs that the scopes of the API key
allow at that time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from leasehold.api.auth import audit
from leasehold.api.auth.security import JOBS_DELETE, JOBS_OPERATE
from leasehold.api.http.idempotent import Answer, once
from leasehold.api.http.responses import encoded
from leasehold.api.jobs.access import permitted_jobs_of
from leasehold.api.jobs.schemas import NewOperation
from leasehold.api.jobs.view import summary
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services
from leasehold.broker.outbox import Announcement
from leasehold.db import job_lists, operation_reads
from leasehold.db.clock import database_time
from leasehold.db.database import Connection, lock_name
from leasehold.db.idempotency import fingerprint
from leasehold.db.job_lists import Bound, Listing, Scope
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Conflict, Forbidden
from leasehold.domain.job_filter import InvalidFilter, JobFilter, parse
from leasehold.domain.states import JobState
from leasehold.limits.admission import queues_of
from leasehold.pipelines.operations.pace import rate_of
from leasehold.pipelines.operations.pipeline import OPERATION, Action, Operation, bound_of, bulk_operation
from leasehold.pipelines.operations.progress import progress_of
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob

#: A preview shows at most this many jobs.
EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class SubmittedOperation:
    """The answer with the operation's JSON, and the RateLimit headers. The headers are empty if the answer repeats an
    earlier answer, or if no rate limit applies.
    """

    answer: Answer
    limit_headers: dict[str, str]


def _filter_and_scope(
    services: Services, caller: Caller, request: NewOperation, now: datetime
) -> tuple[JobFilter, Scope]:
    """The filter, and the scope. The scope has the tenant and the kinds of the jobs on which the operation may act. An
    operation never acts on operations. Raises Forbidden and InvalidFilter.
    """
    scope = JOBS_DELETE if request.action == "delete" else JOBS_OPERATE
    if scope not in caller.scopes:
        raise Forbidden("insufficient_scope", f"The API key lacks the scope {scope}.")
    try:
        job_filter = parse(request.filter, now)
        _check_terms(services, job_filter, request.action)
    except InvalidFilter as error:
        error.pointer = "#/filter"
        raise
    permitted_jobs = permitted_jobs_of(services, caller, write=True, kind=job_filter.kind)
    operation_pipelines = {pipeline.name for pipeline in OPERATION.pipelines}
    pipelines = tuple(name for name in permitted_jobs.pipelines if name not in operation_pipelines)
    if not permitted_jobs.runs and not pipelines:
        raise Forbidden("insufficient_scope", "The API key lacks the scopes of the kinds of these jobs.")
    of_tenant = permitted_jobs.tenant_id if permitted_jobs.tenant_id is not None else job_filter.tenant
    kinds = services.job_kinds
    return job_filter, Scope(of_tenant, pipelines, permitted_jobs.runs, kinds.unowned, kinds.owned)


def _check_terms(services: Services, job_filter: JobFilter, action: Action) -> None:
    """Raises InvalidFilter if an operation with this action may not use the filter."""
    if not job_filter.positions:
        raise job_filter.refused("", "Name at least one term: `created:>0s` finds every job.")
    if job_filter.kind is not None and services.job_kinds.find(job_filter.kind) is None:
        raise job_filter.refused("kind", f"There is no kind {job_filter.kind}.")
    if job_filter.kind == OPERATION.name:
        raise job_filter.refused("kind", "An operation does not act on operations: cancel them one by one.")
    if action == "retry" and job_filter.status not in (None, JobState.FAILED):
        raise job_filter.refused("status", "Only failed jobs can be retried.")


async def preview(services: Services, caller: Caller, request: NewOperation) -> dict[str, Any]:
    """Count the jobs on which the operation would act now, and read the newest of those that the caller may read.
    Raises Forbidden and InvalidFilter.
    """
    rows: list[Row] = []
    async with services.pool.acquire() as connection:
        now = await database_time(connection)
        job_filter, scope = _filter_and_scope(services, caller, request, now)
        bound = Bound(now, bound_of(request.action))  # the jobs that exist now, in the state that the action needs
        n, exact = await job_lists.count(connection, Listing(scope, job_filter, bound=bound))
        readable = _readable(services, caller, scope)
        if n and (readable.runs or readable.pipelines):
            page = await job_lists.page(connection, Listing(readable, job_filter, bound=bound), EXAMPLES)
            rows = list(page.rows)
    examples = [summary(row, services.job_kinds.of(row["pipeline"], is_run=row["is_run"])) for row in rows]
    return {
        "dry_run": True,
        "action": request.action,
        "filter": request.filter,
        "total": {"n": n, "exact": exact},
        "rate": rate_of(request.action, request.rate, services.settings),
        "examples": examples,
    }


def _readable(services: Services, caller: Caller, scope: Scope) -> Scope:
    """The jobs in `scope` of those kinds that the caller may also read. Some kinds may be left out, because an API key
    may have only the write scope of a kind.
    """
    permitted = permitted_jobs_of(services, caller)
    pipelines = tuple(name for name in scope.pipelines if name in permitted.pipelines)
    return replace(scope, pipelines=pipelines, runs=scope.runs and permitted.runs)


async def submit(
    services: Services, caller: Caller, request: NewOperation, idempotency_key: str | None = None, trace: Any = None
) -> SubmittedOperation:
    """Write the operation. `trace`: ids of the request, for the operation's log lines. Raises Forbidden
    `insufficient_scope`, InvalidFilter, Conflict `too_many_operations`, and the errors of every submission.
    """
    # `hints` and `limit_headers` stay empty if an earlier request with the same idempotency key has submitted the
    # operation.
    hints: list[Announcement] = []
    limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        now = await database_time(connection)
        _, scope = _filter_and_scope(services, caller, request, now)
        at_most = services.settings.operations_per_tenant
        await lock_name(connection, f"operations of {caller.tenant_id}")
        if await operation_reads.count_unfinished(connection, caller.tenant_id) >= at_most:
            raise Conflict(
                "too_many_operations", f"A tenant has at most {at_most} unfinished operations: cancel one, or wait."
            )
        new_job = NewJob(
            bulk_operation,
            caller.tenant_id,
            params=_operation_of(services, caller, request, scope, now).model_dump(mode="json"),
            priority=0,
            keep_seconds=services.settings.retention_days * 86_400,
            trace=trace,
        )
        queues = queues_of(caller.tenant_id, bulk_operation)
        async with services.admission.submitting(connection, caller.payer, queues) as charge:
            hints.extend(await jobs.submit(connection, [new_job]))
        limit_headers.update(charge.fields)
        await audit.record(
            connection, caller, "operation.submitted", new_job.id, does=request.action, filter=request.filter
        )
        row = await operation_reads.find(connection, caller.tenant_id, new_job.id)
        assert row is not None
        return Answer(202, encoded(view(row)))

    request_hash = fingerprint(b"POST /v1/operations", request.model_dump_json().encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    if hints:
        services.announcer.announce(hints)
        SUBMITTED.labels(bulk_operation.name).inc()
    return SubmittedOperation(answer, limit_headers)


def _operation_of(services: Services, caller: Caller, request: NewOperation, scope: Scope, now: datetime) -> Operation:
    return Operation(
        action=request.action,
        filter=request.filter,
        at=now,
        of_tenant=scope.tenant_id,
        pipelines=tuple(scope.pipelines),
        runs=scope.runs,
        client_id=caller.client_id,
        payer_key=caller.quota_key,  # retries are charged to the quota of this key
        canary=request.canary,  # the operation acts on this many jobs first, as a trial
        rate=rate_of(request.action, request.rate, services.settings),
        reason=request.reason,
    )


def view(row: Row) -> dict[str, Any]:
    """The JSON of an operation."""
    operation = Operation.model_validate(row["params"])
    progress = progress_of(row["note"] or {})  # the note in which the worker stores its progress
    has_succeeded = row["status"] == JobState.SUCCEEDED
    members = {
        "id": row["id"],
        "action": operation.action,
        "filter": operation.filter,
        "status": row["status"],
        "tenant_id": row["tenant_id"],
        "by": f"client {operation.client_id}",
        "reason": operation.reason,
        "rate": operation.rate,
        "canary": {"jobs": operation.canary, "passed": progress.canary.passed} if operation.canary else None,
        "total": progress.total and progress.total.model_dump(),
        "acted": progress.acted,
        "refused": progress.refused,
        "refused_by_code": progress.codes,
        "percent": 100.0 if has_succeeded else round(progress.percent, 1),
        "error": row["error"],
        "created_at": row["created_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
    }
    return {name: value for name, value in members.items() if value is not None}
