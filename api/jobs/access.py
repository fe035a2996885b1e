"""Decides which jobs a request may name, and which of them the caller may retry. The job must belong to the caller's
tenant, and to a kind of work (such as runs or media) for which the caller has a scope.

A caller with `fleet:operate` may name jobs of all tenants. Such a caller acts for the job's tenant, and the request is
charged to that tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import structlog

from leasehold.actions.context import Target
from leasehold.api.auth.security import JOBS_DELETE, OPERATE, tenant_of
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db import job_reads
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Forbidden, Gone, NotFound
from leasehold.domain.kind import RUN
from leasehold.domain.sentences import to_the_second
from leasehold.domain.states import JobState
from leasehold.kinds.job_kinds import JobKind, PermittedJobs
from leasehold.pipelines.operations.pipeline import bulk_operation


@dataclass(frozen=True, slots=True)
class JobAccess:
    """A job that the caller may name, with its kind. `acting_caller`: the caller of the request, who acts for the job's
    tenant. Its `tenant_id` is the job's tenant, and its `own_tenant` is the tenant of the caller's key.
    """

    row: Row
    kind: JobKind
    acting_caller: Caller

    @property
    def id(self) -> UUID:
        job_id: UUID = self.row["id"]
        return job_id

    @property
    def target(self) -> Target:
        """The job, for the functions of `leasehold.actions`."""
        steps = self.row["steps"]
        return Target(self.row, self.kind, steps[0]["queue"] if steps else "")  # the queue of the first step


def access_of(services: Services, caller: Caller, row: Row) -> JobAccess:
    """The caller's access to a job. `row`: the job. This function does not check the job's tenant, so the query that
    has read the job must be limited to `tenant_of(caller)`. Raises Forbidden for a bulk operation on jobs of other
    tenants (see `check_targets`).
    """
    if _is_operation(row):
        check_targets(caller, row["tenant_id"], row["params"])
    kind = services.job_kinds.of(row["pipeline"], is_run=row["is_run"])
    return JobAccess(
        row, kind, replace(caller, tenant_id=row["tenant_id"], own_tenant=caller.own_tenant or caller.tenant_id)
    )


def _is_operation(row: Row) -> bool:
    """Whether the job is a bulk operation. A run is no bulk operation, even if its template has the same name, because
    tenants could choose this name in releases that had no bulk operations.
    """
    return row["pipeline"] == bulk_operation.name and not row["is_run"]


def check_targets(caller: Caller, tenant_id: str, params: Mapping[str, Any]) -> None:
    """Raises Forbidden if a bulk operation (a job that acts on many jobs) acts on jobs of other tenants, and the caller
    is no operator. Without this check, the caller would see counts, logs and refusals about jobs of other tenants, and
    could act on these jobs by a retry.

    `tenant_id`: the tenant that submitted the operation. `params`: the operation's parameters. Their member `of_tenant`
    names the tenant on whose jobs the operation acts; None: all tenants.
    """
    if OPERATE not in caller.scopes and params.get("of_tenant") != tenant_id:
        raise Forbidden(
            "insufficient_scope", f"This operation acts on jobs of other tenants: it needs the scope {OPERATE}."
        )


def may_retry(services: Services, access: JobAccess) -> bool:
    """Whether the caller may retry the job. For a bulk operation, the caller needs the `:write` scope of each kind on
    whose jobs the operation acts. If the operation deletes, the caller also needs `jobs:delete`.
    """
    return not _missing_scopes(services, access)


def check_retry(services: Services, access: JobAccess) -> None:
    """Raises Forbidden if the caller may not retry the job (`may_retry`)."""
    if missing := _missing_scopes(services, access):
        noun = "scope" if len(missing) == 1 else "scopes"
        raise Forbidden("insufficient_scope", f"To retry this operation, you need the {noun} {', '.join(missing)}.")


def _missing_scopes(services: Services, access: JobAccess) -> list[str]:
    """The scopes that the caller lacks for a retry of the job. The scopes of the job's own kind do not count here,
    because `find` checks them. A retry of a bulk operation needs the same scopes as its submission, because the retried
    operation acts on further jobs.
    """
    if not _is_operation(access.row):
        return []
    params, kinds = access.row["params"], services.job_kinds
    target_kinds = [kinds.of(pipeline, is_run=False) for pipeline in params["pipelines"]]
    if params["runs"]:
        target_kinds.append(kinds.of(RUN, is_run=True))
    needed = {kind.scopes.write for kind in target_kinds if kind.scopes is not None}
    if params["action"] == "delete":
        needed.add(JOBS_DELETE)
    return sorted(needed - access.acting_caller.scopes)


def params_of_retry(access: JobAccess) -> dict[str, Any] | None:
    """The new parameters of a bulk operation that the caller retries. From now on the operation charges its retries to
    the caller, and acts in the name of the caller. Returns None if the job is no bulk operation.
    """
    if not _is_operation(access.row):
        return None
    caller = access.acting_caller
    return {**access.row["params"], "client_id": caller.client_id, "payer_key": caller.quota_key}


def permitted_jobs_of(
    services: Services, caller: Caller, *, write: bool = False, kind: str | None = None
) -> PermittedJobs:
    """The jobs that the caller may read or, with `write`, change. `kind`: only of this kind; None: of every kind."""
    return services.job_kinds.permitted_jobs(tenant_of(caller), caller.scopes, write=write, kind=kind)


def gone_error(tombstone: Row) -> Gone:
    """The error for a job that was deleted, or that has expired. `tombstone`: the row that remains of it for a day."""
    instant = to_the_second(tombstone["at"])
    if tombstone["because"] == "deleted":
        return Gone("job_deleted", f"The job was deleted at {instant}.")
    return Gone("job_expired", f"The job was kept until {instant}, and is deleted.")


async def state_now(connection: Connection, access: JobAccess) -> JobState:
    """The current state of a job that `find` has read. Other requests or workers may have changed the job since. Raises
    Gone or NotFound if the job does not exist any more.
    """
    row = await job_reads.find_job(connection, access.acting_caller.tenant_id, access.id)
    if row is not None:
        return JobState(row["status"])
    tombstone = await job_reads.find_tombstone(connection, access.acting_caller.tenant_id, access.id)
    raise gone_error(tombstone) if tombstone is not None else NotFound("job_not_found", "There is no such job.")


async def find(services: Services, caller: Caller, job_id: UUID, *, write: bool = False) -> JobAccess:
    """Read the job. `write`: the caller will change it.

    Raises NotFound `job_not_found`, also for a job of another tenant or of a kind for which the caller has no scope.
    Raises Gone `job_deleted`, `job_expired`. With `write` the caller needs the kind's write scope, and without `write`
    its read scope. Raises Forbidden if the caller has only the other of these two scopes. Also raises Forbidden for an
    operation on jobs of other tenants (`check_targets`).
    """
    tenant_id = tenant_of(caller)
    async with services.pool.acquire() as connection:
        row = await job_reads.find_job(connection, tenant_id, job_id)
        tombstone = None if row is not None else await job_reads.find_tombstone(connection, tenant_id, job_id)
    scopes = None
    job_or_tombstone = row if row is not None else tombstone
    if job_or_tombstone is not None:
        scopes = services.job_kinds.of(job_or_tombstone["pipeline"], is_run=job_or_tombstone["is_run"]).scopes
    if scopes is None or not {scopes.read, scopes.write} & caller.scopes:
        raise NotFound("job_not_found", "There is no such job.")
    if tombstone is not None:
        raise gone_error(tombstone)
    scope = scopes.write if write else scopes.read
    if scope not in caller.scopes:
        raise Forbidden("insufficient_scope", f"The API key lacks the scope {scope}.")
    assert row is not None
    structlog.contextvars.bind_contextvars(job_id=str(job_id))
    return access_of(services, caller, row)
