"""Adds to the actions on jobs (cancel, retry, adopt an order) what generations need. A generation is an order of images
or videos at an outside provider.

A cancel also submits a withdrawal, which is a job that cancels the order at the provider. A retry also gives the
generation a new deadline, and cancels its withdrawal, if the withdrawal has not reached the provider yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.errors import Conflict
from leasehold.domain.states import JOB_TERMINAL
from leasehold.kinds.job_kinds import FailedJob, KindOperations, RetryTerms, SentOrder, UnknownOrders
from leasehold.pipelines.generation.pipeline import (
    BACKSTOP,
    OUTCOME_UNKNOWN_CODE,
    STORE_TIME,
    GenerationParams,
    withdrawal,
)
from leasehold.pipelines.generation.provider import Kind
from leasehold.pipelines.generation.providers import Catalogue, ProviderTerms
from leasehold.pipelines.generation.rows import forget_consumption, holders, orders_under_way, retried_order
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.jobs.deadlines import extend_deadline, set_deadline

#: The step that sends the order.
_ORDERING_STEP = "submit"
#: The Retry-After, in seconds, for a client whose retry or adoption is refused because of a withdrawal.
_WITHDRAWAL_SECONDS = 5


def operations() -> KindOperations:
    """What the actions on jobs (cancel, retry, adopt an order) do for generations. To adopt an order is to give the job
    the id of its order, which a person has found at the provider.
    """
    orders = UnknownOrders(
        step=_ORDERING_STEP,
        intent="asked_at",
        sent=sent_order,
        adopted=adopted_order,
        adoptable=is_adoptable,
        is_of_installation=is_of_installation,
        holders=holders,
        codes=(OUTCOME_UNKNOWN_CODE, "worker_lost", "step_timeout"),
    )
    return KindOperations(
        orders,
        after_cancel=withdraw,
        after_adoption=withdraw_adopted,
        before_retry=retry_terms,
        after_retry=after_retry,
    )


#: The parameters of a generation that are shown to people as its order.
_SHOWN = ("kind", "model", "prompt", "negative_prompt", "width", "height", "duration", "ratio", "is_pro", "images")


def sent_order(params: Mapping[str, Any], note: Mapping[str, Any], job_id: UUID) -> SentOrder:
    """The order of a generation as the step `submit` sent it. The job's id is the idempotency token. `note`: the note
    of the step `submit`, which records when the step sent the order.
    """
    shown = {name: params[name] for name in _SHOWN if params.get(name) not in (None, [], False)}
    return SentOrder(params["provider"], note.get("asked_at"), {"token": str(job_id), **shown})


def adopted_order(ref: str, note: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value of the step `submit`, after a person has found its order at the provider. `ref`: the order's id at the
    provider. A submit that succeeds writes a value of the same form.
    """
    return {"ref": ref, "at": note.get("asked_at") or datetime.now(UTC).isoformat()}


def is_adoptable(catalogue: Catalogue, params: Mapping[str, Any]) -> bool:
    """Whether a person may give the job the id of its order. It is True if the provider can be polled for an order by
    its id. Other providers answer a submit with links to the files, so their orders have no id.
    """
    return catalogue.has_poll(params["provider"], params["kind"])


def is_of_installation(params: Mapping[str, Any]) -> bool:
    """Whether the order was sent with the installation's own credential, and not with a credential of the client."""
    return params.get("credential") is None


async def withdraw(connection: Connection, settings: Settings, job_id: UUID, tenant_id: str) -> Sequence[Announcement]:
    """Write a withdrawal of the order of the job `job_id`. Call this in the transaction that cancels the job, or that
    locks it. This function writes nothing in two cases: the job is not a generation but itself a withdrawal, or the
    generation has an unfinished withdrawal already.
    """
    if not await connection.fetchval(
        "SELECT EXISTS (SELECT FROM generation WHERE job_id = $1 AND tenant_id = $2) AND NOT EXISTS ("
        "SELECT FROM job WHERE tenant_id = $2 AND pipeline = $3 AND exclusive_key = $1::text AND finished_at IS NULL)",
        job_id,
        tenant_id,
        withdrawal.name,
    ):
        return []
    job = NewJob(
        pipeline=withdrawal,
        tenant_id=tenant_id,
        params={"job_id": str(job_id)},
        keep_seconds=settings.generation_keep_seconds,
        exclusive_key=str(job_id),  # by which `transitions.withdrawals` finds the withdrawal
    )
    return await jobs.submit(connection, [job])


async def withdraw_adopted(
    connection: Connection, settings: Settings, job_id: UUID, tenant_id: str
) -> Sequence[Announcement]:
    """Withdraw the order that an ended generation adopts. Call this in the transaction of the adoption. There are three
    cases:
    - The generation has no unfinished withdrawal. Then write one, as `withdraw` does.
    - It has an unfinished withdrawal that no worker runs now. This withdrawal will cancel the adopted order. The lock
      of its row keeps workers from running it until the adoption is committed.
    - A worker may be running the withdrawal just now. It may have read the generation before the adoption, and would
      then end without having cancelled anything. So raise Conflict `order_being_withdrawn`.
    """
    withdrawal_id = await _unfinished_withdrawal(connection, job_id, tenant_id)
    if withdrawal_id is None:
        return await withdraw(connection, settings, job_id, tenant_id)
    # SKIP LOCKED avoids the deadlock that `keep_order` explains. `leased`: how many steps of the job have a lease now.
    is_idle = await connection.fetchval(
        "SELECT leased = 0 FROM job WHERE id = $1 AND finished_at IS NULL FOR UPDATE SKIP LOCKED", withdrawal_id
    )
    if not is_idle:
        raise _being_withdrawn(withdrawal_id)
    return []


async def withdraw_expired(settings: Settings, connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Write a withdrawal for each of these expired jobs whose order the provider may still work on. Usually a poll ends
    a generation at its deadline, and cancels the order. But these jobs expired because no worker polled at the
    deadline. This function drops the hints that `withdraw` returns, because the relay publishes them.
    """
    for job_id, tenant_id in await orders_under_way(connection, job_ids):
        await withdraw(connection, settings, job_id, tenant_id)


async def after_retry(
    connection: Connection, job_id: UUID, tenant_id: str, from_step: str | None
) -> Sequence[JobEnded]:
    """Complete the retry of a generation: let clients find its next result, give its job as much time as the settings
    now define, and cancel its unfinished withdrawal. Returns the withdrawal, if there was one. Raises Conflict
    `order_being_withdrawn`.
    """
    await forget_consumption(connection, job_id)
    await _renew_deadline(connection, job_id)
    return await keep_order(connection, job_id, tenant_id, from_step)


async def _renew_deadline(connection: Connection, job_id: UUID) -> None:
    """Set the job's deadline to BACKSTOP after the order's new deadline (`retry_terms`), as at its submission. The
    common part of a retry (`jobs.replay`) has only given the job as much time as it had before. That time depends on
    earlier settings, and on the polls that moved the deadline. If the provider has made the files already, the retry
    only stores them, and the job gets at least STORE_TIME.
    """
    retried = await retried_order(connection, job_id)
    if retried is None:  # a withdrawal, the job that cancels an order
        return
    await set_deadline(connection, job_id, retried.deadline_at + BACKSTOP)
    if retried.is_made:
        await extend_deadline(connection, job_id, STORE_TIME)


async def keep_order(connection: Connection, job_id: UUID, tenant_id: str, from_step: str | None) -> Sequence[JobEnded]:
    """Cancel the unfinished withdrawal of a generation that is retried, because the generation needs the order again.
    Returns the withdrawal, if there was one.

    Raises Conflict `order_being_withdrawn` if a worker may be cancelling the order at the provider just now. Raises the
    same error if the retry begins at `submit`, because the id of the new order would replace the id of the first order.
    Then nobody could withdraw the first order.
    """
    withdrawal_id = await _unfinished_withdrawal(connection, job_id, tenant_id)
    if withdrawal_id is None:
        return []
    # SKIP LOCKED avoids a deadlock, because another transaction may hold the lock of the withdrawal, and wait for the
    # lock of the generation, which this transaction holds.
    is_locked = await connection.fetchval("SELECT true FROM job WHERE id = $1 FOR UPDATE SKIP LOCKED", withdrawal_id)
    if is_locked and from_step != _ORDERING_STEP:
        cancellation = await jobs.request_cancel(
            connection, [withdrawal_id], tenant_id, reason="the generation was retried", by="leasehold", forced=True
        )
        if cancellation.states.get(withdrawal_id) in JOB_TERMINAL:
            return cancellation.ended
    raise _being_withdrawn(withdrawal_id)


async def _unfinished_withdrawal(connection: Connection, job_id: UUID, tenant_id: str) -> UUID | None:
    """The unfinished withdrawal of this generation's order. There is at most one."""
    withdrawal_id: UUID | None = await connection.fetchval(
        "SELECT id FROM job WHERE tenant_id = $1 AND pipeline = $2 AND exclusive_key = $3 AND finished_at IS NULL",
        tenant_id,
        withdrawal.name,
        str(job_id),
    )
    return withdrawal_id


def _being_withdrawn(withdrawal_id: UUID) -> Conflict:
    return Conflict(
        "order_being_withdrawn",
        f"The order is being withdrawn at its provider: try again once job {withdrawal_id} has ended.",
        retry_after=_WITHDRAWAL_SECONDS,
    )


def retry_terms(settings: Settings, catalogue: Catalogue, job: FailedJob) -> RetryTerms:
    """The terms of a retried job. A generation gets a new deadline and the limits that the settings now define. A
    withdrawal keeps its parameters, and gets no further limits.
    """
    if "provider" not in job.params:  # a withdrawal, the job that cancels an order
        return RetryTerms()
    params = GenerationParams.model_validate(job.params)
    terms = catalogue.find(params.provider)
    deadline = job.retried_at + timedelta(seconds=seconds_of(settings, params.kind))
    retry_params: dict[str, Any] = params.model_copy(update={"deadline_at": deadline}).model_dump(mode="json")
    return RetryTerms(retry_params, own_limits(settings, job.tenant_id, job.pin, terms))


def seconds_of(settings: Settings, kind: Kind) -> int:
    """The most seconds that an order of this kind may take."""
    return settings.generation_image_seconds if kind == "image" else settings.generation_video_seconds


def own_limits(
    settings: Settings, tenant_id: str, server: str | None, terms: ProviderTerms | None
) -> list[ConcurrencyLimit]:
    """The concurrency limits of an order. `server`: the server that the client named, or None. `terms`: those of the
    provider; None: the installation no longer has the provider.

    The limit of a provider holds for all tenants together. So does the limit of a server that a client names, because
    such a server is one machine. If the client names no server, the order counts under the name of the default server,
    and each tenant has a limit of its own there.
    """
    limits = []
    if settings.generation_per_server:
        limited_tenant = tenant_id if server is None else EVERYBODY
        name = server or settings.generation_default_server
        limits.append(ConcurrencyLimit(limited_tenant, f"server:{name}", at_most=settings.generation_per_server))
    if terms is not None and terms.at_most is not None:
        limits.append(ConcurrencyLimit(EVERYBODY, f"provider:{terms.name}", at_most=terms.at_most))
    return limits
