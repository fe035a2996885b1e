"""/v1/external: workers in any language claim tasks over HTTP, and settle them (report how an attempt ended).

A worker names its lease by its own id and the task's epoch. A call with another epoch changes nothing, and its answer
is 409 `lease_lost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any, TypeAlias
from uuid import UUID, uuid5

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from leasehold.api.auth.security import EXTERNAL_WORK, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.leaving import while_present
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.domain.json_values import MAX_INTEGER, Flag, Integer, JsonNumber, Number
from leasehold.domain.lease import Lease
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.limits import external_files
from leasehold.limits.external_files import UploadedFile
from leasehold.runtime.pacing import paced
from leasehold.telemetry.redaction import redact
from leasehold.transitions import claims, external, progress, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.jobs import client_queue, external_queue
from leasehold.transitions.settlements import Completion, Failure, Settled, Verdict

router = APIRouter(tags=["external workers"], prefix="/v1/external", route_class=AuthenticatedFirst)
Worker = Annotated[Caller, Depends(Require(EXTERNAL_WORK))]

#: The UUID namespace for the owners of leases. An owner is computed from the tenant and the worker's id, so two tenants
#: may use the same worker id.
_OWNER_NAMESPACE = UUID("6f0c8a52-52de-4d2c-9a0e-0f4f4e0b7c11")
#: This number has no effect, because `claim_due` does not read the field `max_losses` of LeaseTerms.
#: LEASEHOLD_MAX_LOSSES bounds how many attempts of a task may be lost before the sweeper (a maintenance loop of the
#: workers) fails the task.
_MAX_LOSSES = 5
WorkerId: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=100, description="The id of one worker process, new at each of its starts.")
]
FileName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
# The problems that most endpoints about one task may answer.
_RESPONSES = problems(
    {HTTPStatus.CONFLICT: "`lease_lost`: another worker holds the task, its time limit has passed, or it has ended"}
)


class _WorkerRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    worker_id: WorkerId


class ClaimRequest(_WorkerRequest):
    queues: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]] = Field(min_length=1, max_length=50)
    limit: Integer = Field(1, ge=1, le=100)
    wait: Number = Field(0, ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for a task.")
    lease_seconds: Number = Field(60, ge=5, le=3600, description="Seconds until it expires, unless renewed.")


# A request about a task that the worker holds. The worker's id and the task's epoch name the lease.
class Held(_WorkerRequest):
    epoch: Integer = Field(ge=1, le=MAX_INTEGER)


class Beat(Held):
    lease_seconds: Number = Field(60, ge=5, le=3600)


class ProgressReport(Held):
    percent: Number = Field(ge=0, le=100, allow_inf_nan=False)
    summary: str = Field("", max_length=progress.MAX_SUMMARY)


class SentFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: FileName
    sha256: Annotated[
        str, Field(pattern="^[0-9a-f]{64}$", description="The SHA-256 of the file's bytes, which the API compares.")
    ]


class Result(Held):
    result: dict[str, JsonValue] | None = Field(None, description="Small JSON that is stored with the step.")
    files: list[SentFile] = Field(
        default_factory=list, max_length=1000, description="The files that were uploaded to the URLs of `/files`."
    )

    @field_validator("files")
    @classmethod
    def _one_sum_of_each_name(cls, files: list[SentFile]) -> list[SentFile]:
        if len({file.name for file in files}) < len({(file.name, file.sha256) for file in files}):
            raise ValueError("two files of one name have different sums")
        return files


class Failed(Held):
    code: str = Field("external_error", pattern=r"^[a-z][a-z0-9_.-]{0,99}$")
    message: str = Field("", max_length=2000)
    retryable: Flag = True
    retry_after: Annotated[float, Field(ge=0, le=7 * 86_400), JsonNumber] | None = Field(
        None, description="Seconds until the next attempt. If left out, the template's backoff."
    )


def _owner_of_lease(caller: Caller, worker_id: str) -> UUID:
    return uuid5(_OWNER_NAMESPACE, f"{caller.tenant_id}\n{worker_id}")


def lease_of(caller: Caller, task_id: UUID, body: Held) -> Lease:
    """The lease that the request names. Only PostgreSQL decides whether it is valid, so `attempt` and `trusted_until`
    have no meaning here.
    """
    owner = _owner_of_lease(caller, body.worker_id)
    return Lease(task_id, owner, body.epoch, attempt=0, trusted_until=monotonic())


@router.post(
    "/claim",
    operation_id="claimExternal",
    summary="Claim tasks of queues",
    description="Waits up to `wait` seconds for a task. Each task is leased: renew the lease by heartbeats, and "
    "settle the task with its epoch.",
    responses=problems({}),
)
async def claim(request: Request, body: ClaimRequest, caller: Worker) -> Response:
    services = services_of(request)
    # `margin` has no effect here, because only the platform's own workers stop trusting a lease before it expires.
    terms = LeaseTerms(
        _owner_of_lease(caller, body.worker_id), ttl=body.lease_seconds, margin=0.0, max_losses=_MAX_LOSSES
    )
    queues = [external_queue(caller.tenant_id, queue) for queue in body.queues]
    deadline = monotonic() + body.wait
    claimed_tasks, needed_steps = await _claim_tasks(services, terms, queues, body.limit)
    # `runnable` waits for a due task. If another worker claims that task first, this loop waits again. The loop ends
    # without tasks if the client disconnects, or when `wait` is over.
    while not claimed_tasks and (seconds := deadline - monotonic()) > 0:
        if not await while_present(request, services.queues.runnable(queues, seconds)):
            break
        claimed_tasks, needed_steps = await _claim_tasks(services, terms, queues, body.limit)
    urls = await _sign_files(services, needed_steps)
    tasks = [
        _task_answer(claimed, terms.ttl) | _inputs_of(needed_steps[claimed.lease.task_id], urls)
        for claimed in claimed_tasks
    ]
    # If the client has disconnected, the worker has probably died. Then release the tasks. Otherwise nobody would work
    # on them until their leases expire, and then the loss of this worker would count against each task.
    if tasks and await request.is_disconnected():
        async with services.pool.acquire() as connection:
            await settlements.release(connection, [claimed.lease for claimed in claimed_tasks])
    return json_response({"tasks": tasks})


async def _claim_tasks(
    services: Services, terms: LeaseTerms, queues: Sequence[str], limit: int
) -> tuple[list[Claimed], dict[UUID, list[Any]]]:
    """Claim due tasks. Returns the claimed tasks, and for each task's id the rows of the earlier steps that the task
    needs. Both statements run in one transaction, so if the second fails, PostgreSQL rolls back the claim.
    """
    async with services.pool.acquire() as connection, connection.transaction():
        claimed_tasks = await claims.claim_due(connection, terms, queues, limit)
        return claimed_tasks, await external.needed_steps(
            connection, [claimed.lease.task_id for claimed in claimed_tasks]
        )


async def _sign_files(services: Services, needed_steps: Mapping[UUID, Sequence[Any]]) -> dict[str, str]:
    """Sign one URL for each file of these steps, even if several tasks need the file. Returns the file's key in the
    store -> its URL. A signature takes a tenth of a millisecond, so `paced` lets other requests run between two
    signatures.
    """
    seconds = services.settings.download_url_seconds
    keys = {file["key"] for steps in needed_steps.values() for row in steps for file in row["files"] or ()}
    return {key: services.store.sign_get(key, seconds=seconds) async for key in paced(list(keys))}


def _inputs_of(steps: Sequence[Any], urls: Mapping[str, str]) -> dict[str, Any]:
    """The results of the steps that the task needs (by name), and the files of these steps, each with its URL."""
    files = [
        {name: file[name] for name in ("name", "size", "sha256", "content_type")}
        | {"step": row["step"], "url": urls[file["key"]]}
        for row in steps
        for file in row["files"] or ()
    ]
    return {"results": {row["step"]: row["value"] for row in steps}, "files": files}


def _task_answer(claimed: Claimed, lease_seconds: float) -> dict[str, Any]:
    return {
        "task_id": claimed.lease.task_id,
        "run_id": claimed.job_id,
        "template": claimed.pipeline,
        "version": claimed.pipeline_version,
        "step": claimed.step,
        "queue": client_queue(claimed.queue),
        "epoch": claimed.lease.epoch,
        "attempt": claimed.lease.attempt,
        "lease_seconds": lease_seconds,
        "timeout_seconds": claimed.timeout_seconds,
        "payload": claimed.params,
        "traceparent": (claimed.trace or {}).get("traceparent"),
    }


@router.post(
    "/tasks/{task_id}/heartbeat",
    operation_id="heartbeatExternal",
    summary="Renew a lease, and learn whether to stop",
    responses=_RESPONSES,
)
async def heartbeat(request: Request, task_id: UUID, body: Beat, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as is_in_time:
            if is_in_time:
                (renewal,) = await claims.renew(connection, lease.owner, [lease], body.lease_seconds)
        if not is_in_time or not renewal.is_valid:
            raise lease_lost()
    return json_response({"lease_seconds": body.lease_seconds, "cancel_requested": renewal.must_stop})


@asynccontextmanager
async def in_time(services: Services, connection: Connection, caller: Caller, lease: Lease) -> AsyncIterator[bool]:
    """Open the transaction for a worker's report about its step. Yields True if the step is within its time limit.
    Raises Conflict `lease_lost` if the task does not belong to the tenant.

    Yields False if the step is past its limit. Then this function has ended the attempt, although the worker held the
    lease. After a False, the caller must write nothing, and must raise no error inside the block, because an error
    would roll back the end of the attempt.
    """
    timed_out: Settled | None = None
    async with connection.transaction():
        if not await external.lock(connection, caller.tenant_id, lease):
            raise lease_lost()
        if await external.is_late(connection, lease):
            timed_out = await external.time_out(connection, services.templates, caller.tenant_id, lease)
        yield timed_out is None
    if timed_out is not None:
        count_ended_jobs(timed_out.ended)
        services.announcer.announce(timed_out.announcements)


def lease_lost() -> Conflict:
    """The error `lease_lost`."""
    return Conflict("lease_lost", "The lease of this epoch has ended: write nothing more, and stop.")


@router.post(
    "/tasks/{task_id}/progress",
    operation_id="progressExternal",
    summary="Report the progress of a task",
    responses=_RESPONSES,
)
async def report_progress(request: Request, task_id: UUID, body: ProgressReport, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    recorded_ids: Collection[UUID] = ()
    async with services.pool.acquire() as connection, in_time(services, connection, caller, lease) as is_in_time:
        if is_in_time:
            recorded_ids = await progress.report(connection, [progress.Progress(lease, body.percent, body.summary)])
    if task_id not in recorded_ids:
        raise lease_lost()
    return json_response({"percent": body.percent})


@router.post(
    "/tasks/{task_id}/complete",
    operation_id="completeExternal",
    summary="Complete a task",
    description="The API reads and compares the bytes of each of `files` before it writes anything.",
    responses=problems({
        HTTPStatus.CONFLICT: "`lease_lost`: another worker holds the task, its time limit has passed, or it has ended",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `file_not_announced`, `file_missing`, `file_mismatch`",
    }),
)  # fmt: skip
async def complete(request: Request, task_id: UUID, body: Result, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    files_by_name = {file.name: UploadedFile(file.name, file.sha256) for file in body.files}
    outputs = await services.files.check(caller.tenant_id, lease, list(files_by_name.values()))
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as is_in_time:
            if is_in_time:
                completion = Completion(lease, outputs, body.result)
                outcome = await external_files.complete(connection, caller.tenant_id, completion)
        if not is_in_time or outcome.verdicts[task_id] is Verdict.LOST:
            raise lease_lost()
    return _settled_response(services, outcome, task_id)


@router.post(
    "/tasks/{task_id}/fail",
    operation_id="failExternal",
    summary="Fail an attempt",
    description="The step is tried again by the template's retry policy, unless `retryable` is false.",
    responses=_RESPONSES,
)
async def fail(request: Request, task_id: UUID, body: Failed, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as is_in_time:
            if is_in_time:
                failure = await _failure_of(services, connection, caller, lease, body)
                outcome = await _settled_or_cancelled(connection, await settlements.fail(connection, [failure]), lease)
        if not is_in_time:
            raise lease_lost()
        if task_id not in outcome.states:  # the worker sent this report before, so `fail` wrote nothing
            status = await connection.fetchval(
                "SELECT status FROM task WHERE id = $1 AND tenant_id = $2", task_id, caller.tenant_id
            )
            outcome.states[task_id] = status
    return _settled_response(services, outcome, task_id)


async def _failure_of(
    services: Services, connection: Connection, caller: Caller, lease: Lease, body: Failed
) -> Failure:
    """The failure that the worker reports. If the worker names no delay, the delay is the template's backoff."""
    delay_seconds = body.retry_after
    if delay_seconds is None:
        backoff = await external.backoff(connection, services.templates, caller.tenant_id, lease.task_id)
        delay_seconds = backoff.total_seconds()
    message = redact(body.message.replace("\x00", ""))  # PostgreSQL stores no NUL character
    return Failure(lease, "error", body.code, message, body.retryable, delay_seconds)


async def _settled_or_cancelled(connection: Connection, outcome: Settled, lease: Lease) -> Settled:
    """If the run is being cancelled, acknowledge the cancel. `outcome`: what `fail` or `release` returned.

    A verdict LOST in `outcome` has one of two reasons: the lease is lost, or the run is being cancelled. So after a
    LOST, the function tries to acknowledge the cancel. If the verdict of this try is LOST as well, the lease is lost,
    and the function raises Conflict `lease_lost`.
    """
    if outcome.verdicts[lease.task_id] is Verdict.LOST:
        outcome = await settlements.acknowledge_cancel(connection, [lease])
    if outcome.verdicts[lease.task_id] is Verdict.LOST:
        raise lease_lost()
    return outcome


def _settled_response(services: Services, outcome: Settled, task_id: UUID) -> Response:
    """Count the jobs that have ended, publish the hints of due tasks, and build the response with the task's new
    status.
    """
    count_ended_jobs(outcome.ended)
    services.announcer.announce(outcome.announcements)
    return json_response({"status": outcome.states[task_id]})


@router.post(
    "/tasks/{task_id}/acknowledge-cancel",
    operation_id="acknowledgeCancelExternal",
    summary="Report that a task stopped as requested",
    responses=_RESPONSES,
)
async def acknowledge_cancel(request: Request, task_id: UUID, body: Held, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    async with services.pool.acquire() as connection:
        if not await external.is_of_tenant(connection, caller.tenant_id, task_id):
            raise lease_lost()
        outcome = await settlements.acknowledge_cancel(connection, [lease])
    if outcome.verdicts[task_id] is Verdict.LOST:
        raise lease_lost()
    return _settled_response(services, outcome, task_id)


@router.post(
    "/tasks/{task_id}/release",
    operation_id="releaseExternal",
    summary="Release a task unfinished",
    description="For a worker that stops. The task is due immediately, for any worker, and the attempt does not count. "
    "In a run that is to be cancelled the report acknowledges the cancel.",
    responses=_RESPONSES,
)
async def release(request: Request, task_id: UUID, body: Held, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as is_in_time:
            if is_in_time:
                release_outcome = await settlements.release(connection, [lease])
                outcome = await _settled_or_cancelled(connection, release_outcome, lease)
        if not is_in_time:
            raise lease_lost()
    return _settled_response(services, outcome, task_id)
