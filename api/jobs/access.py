"""Which job a request may name, and as whom: by the key's scopes for the job's kind, within the key's tenant.

A key with `fleet:operate` names jobs of all tenants; it then acts as the job's own tenant, which also pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from uuid import UUID

import structlog

from leasehold.actions.context import Target
from leasehold.api.auth.security import tenant_of
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db import job_reads
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Forbidden, Gone, NotFound
from leasehold.kinds.operations import JobKind, Sight


@dataclass(frozen=True, slots=True)
class Found:
    """A job, its kind, and the caller within the job's tenant."""

    row: Row
    kind: JobKind
    caller: Caller

    @property
    def id(self) -> UUID:
        job_id: UUID = self.row["id"]
        return job_id

    @property
    def target(self) -> Target:
        """The job as an action sees it."""
        steps = self.row["steps"]
        return Target(self.row, self.kind, steps[0]["queue"] if steps else "")


def found_of(services: Services, caller: Caller, row: Row) -> Found:
    """A job that a statement of the caller's tenant, or of an operator, has read."""
    kind = services.job_kinds.of(row["pipeline"], is_run=row["is_run"])
    return Found(
        row, kind, replace(caller, tenant_id=row["tenant_id"], own_tenant=caller.own_tenant or caller.tenant_id)
    )


def sight_of(services: Services, caller: Caller, *, write: bool = False, kind: str | None = None) -> Sight:
    return services.job_kinds.sight(tenant_of(caller), caller.scopes, write=write, kind=kind)


async def find(services: Services, caller: Caller, job_id: UUID, *, write: bool = False) -> Found:
    """Read the job. Raises NotFound `job_not_found`, also for another tenant's job and one of a kind that the key has
    no scope for; Gone `job_deleted`, `job_expired`; Forbidden if the key may read the job and `write` is asked.
    """
    tenant_id = tenant_of(caller)
    async with services.pool.acquire() as connection:
        row = await job_reads.find_job(connection, tenant_id, job_id)
        tombstone = None if row is not None else await job_reads.find_tombstone(connection, tenant_id, job_id)
    known = row if row is not None else tombstone
    kind = None if known is None else services.job_kinds.of(known["pipeline"], is_run=known["is_run"])
    if kind is None or kind.scopes is None or not {kind.scopes.read, kind.scopes.write} & caller.scopes:
        raise NotFound("job_not_found", "There is no such job.")
    if tombstone is not None:
        code = "job_deleted" if tombstone["because"] == "deleted" else "job_expired"
        raise Gone(code, f"The job was {tombstone['because']} at {tombstone['at'].isoformat()}.")
    scope = kind.scopes.write if write else kind.scopes.read
    if scope not in caller.scopes:
        raise Forbidden("insufficient_scope", f"The API key lacks the scope {scope}.")
    assert row is not None
    structlog.contextvars.bind_contextvars(job_id=str(job_id))
    return found_of(services, caller, row)
