"""Makes a failed job run again. The endpoints of `/v1/jobs`, `/v1/runs` and dead letters call `retry` or `revive`.

A retry is charged as a submission. The job waits as a new job does: at its own limits and at the declared limits. A run
also waits for the other runs of its scope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import asyncpg

from leasehold.api.http.early import refuse_early
from leasehold.api.http.responses import follow_up_run
from leasehold.api.jobs.access import Found
from leasehold.api.jobs.deliveries import dispatch_of
from leasehold.api.jobs.ending import invalid_state, record
from leasehold.api.jobs.schemas import RetryRequest
from leasehold.api.process.services import Services
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid
from leasehold.evaluation.templates import TemplateVersion
from leasehold.kinds.operations import RUN, FailedJob, SecondLife
from leasehold.limits.admission import queues_waited_in
from leasehold.transitions import jobs, limits, runs
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.runs import CreatedRun, NewRun


async def retry(services: Services, found: Found, body: RetryRequest) -> dict[str, str]:
    """Retry the job and return the RateLimit fields. Raises the problems of `retryJob`."""
    caller, params = found.caller, None
    if body.payload is not None:
        if not found.row["is_run"]:
            raise Invalid("payload_fixed", "Only a run can be retried with another payload.")
        await refuse_early(services, caller, {})
    async with services.pool.acquire() as connection:
        template_version = await template_of(services, connection, found)
    if body.payload is not None:
        assert template_version is not None
        params = await services.templates.params(caller.tenant_id, template_version, body.payload)
    async with (
        services.pool.acquire() as connection,
        connection.transaction(),
        services.admission.submitting(connection, caller.payer, {}) as paid,
    ):
        effects = await revive(services, connection, found, template_version, params, body.from_step)
        if effects is None:
            raise invalid_state(found.row["status"])
        paid.queues |= await queues_waited_in(connection, found.id)
    await follow_up_run(services, effects)
    return paid.fields


async def template_of(services: Services, connection: Connection, found: Found) -> TemplateVersion | None:
    """The template of a run. None: the job is of another kind. Raises NotFound `template_not_found`."""
    row = found.row
    if not row["is_run"]:
        return None
    return await services.templates.of_run(connection, found.caller.tenant_id, row["template"], row["version"])


async def revive(
    services: Services,
    connection: Connection,
    found: Found,
    template_version: TemplateVersion | None,
    params: dict[str, Any] | None = None,
    from_step: str | None = None,
) -> CreatedRun | None:
    """Make the failed job pending again, inside the caller's transaction. None: the job is not failed any more.

    It first writes the webhook deliveries of the failure, because afterwards the job's row no longer shows the failure.
    Raises as `runs.revive`, and Conflict `pipeline_not_served`, `same_key_running`.
    """
    hints = await dispatch_of(services, connection, found.id)
    if template_version is not None:
        effects = await runs.revive(connection, _new_run(found, template_version, params), params, from_step)
    else:
        effects = await _revive_other(services, connection, found, from_step)
    if effects is None:
        return None
    await record(connection, found, "job.retried", from_step=from_step, other_payload=None if params is None else True)
    return replace(effects, hints=[*hints, *effects.hints])


def _new_run(found: Found, template_version: TemplateVersion, params: dict[str, Any] | None) -> NewRun:
    row = found.row
    return NewRun(
        template_version=template_version,
        tenant_id=found.caller.tenant_id,
        params=row["params"] if params is None else params,
        scope=row["scope"],
        scope_id=row["scope_id"],
        priority=row["priority"],
        id=found.id,
    )


async def _revive_other(
    services: Services, connection: Connection, found: Found, from_step: str | None
) -> CreatedRun | None:
    """As `revive`, for a job that is no run."""
    row, tenant_id = found.row, found.caller.tenant_id
    pipeline = services.job_kinds.pipeline(row["pipeline"])
    if pipeline is None:
        raise Conflict("pipeline_not_served", "This installation no longer has the job's pipeline.")
    retry_terms = _terms_of_retry(services, found)
    params = row["params"] if retry_terms.params is None else retry_terms.params
    all_limits = [*retry_terms.limits, *await limits.declared(connection, tenant_id, pipeline, params)]
    terms = AdmissionTerms(all_limits, row["exclusive_key"])
    try:
        async with connection.transaction():  # a savepoint
            hints = await jobs.replay(connection, found.id, tenant_id, retry_terms.params, from_step, terms)
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name not in runs.KEYS:
            raise
        raise Conflict("same_key_running", "Another job with the same key is unfinished.") from None
    names = [(limit.tenant_id, limit.key) for limit in all_limits]
    return None if hints is None else CreatedRun(found.id, hints, names)


def _terms_of_retry(services: Services, found: Found) -> SecondLife:
    before_retry = found.kind.operations.before_retry
    if before_retry is None or found.kind.name == RUN:
        return SecondLife()
    queue: str = found.row["steps"][0]["queue"]
    job = FailedJob(found.caller.tenant_id, found.row["params"], queue.partition("@")[2] or None)
    return before_retry(services.settings, services.opened.get(found.kind.name), job)
