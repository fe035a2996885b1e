"""Retries one failed job. The caller is charged for a retry as for a submission. The endpoints that retry a job, a run
or a dead letter call `retry`.
"""

from __future__ import annotations

from leasehold.actions.retrying import revive, template_of
from leasehold.api.http.early import refuse_early
from leasehold.api.http.responses import publish_run_effects
from leasehold.api.jobs.access import JobAccess, check_retry, params_of_retry, state_now
from leasehold.api.jobs.ending import invalid_state, record
from leasehold.api.jobs.schemas import RetryRequest
from leasehold.api.process.services import Services
from leasehold.domain.errors import Invalid
from leasehold.transitions import jobs


async def retry(services: Services, access: JobAccess, body: RetryRequest) -> tuple[str, dict[str, str]]:
    """Retry the job. Returns the job's new status and the RateLimit headers. `access` has the job's row and kind, and
    the caller. Raises the problems that the endpoint `retryJob` documents.
    """
    check_retry(services, access)
    caller = access.acting_caller
    params = params_of_retry(access)  # None: the job keeps its parameters
    if body.payload is not None:
        if not access.row["is_run"]:
            raise Invalid("payload_fixed", "Only a run can be retried with another payload.")
        # If the request is over a limit, refuse it now, before the expensive check of its payload. The argument
        # `queues` is empty, because the queues are not known yet.
        await refuse_early(services, caller, {})
    async with services.pool.acquire() as connection:
        template_version = await template_of(services.actions, connection, access.target)  # None: the job is no run
    if body.payload is not None:
        assert template_version is not None
        # The check of the payload may take long, so it holds no database connection.
        params = await services.templates.params(caller.tenant_id, template_version, body.payload)
    async with (
        services.pool.acquire() as connection,
        connection.transaction(),
        services.admission.submitting(connection, caller.payer, {}) as charge,
    ):
        effects = await revive(services.actions, connection, access.target, template_version, params, body.from_step)
        if effects is None:
            raise invalid_state(await state_now(connection, access))  # only a failed job can be revived
        has_other_payload = None if body.payload is None else True  # None is left out of the audit's row
        await record(connection, access, "job.retried", from_step=body.from_step, other_payload=has_other_payload)
        # A retry may begin at any step, so only now are the queues of its tasks known.
        await services.admission.add_queues_of(connection, charge, access.id)
        status = await jobs.state_of(connection, access.id)
    await publish_run_effects(services, effects)
    return status, charge.fields
