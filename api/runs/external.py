"""External workers, in any language, over HTTP: claim, heartbeat, progress, complete, fail, acknowledge-cancel.

A lease is the worker's id and the task's epoch; a call with another epoch changes nothing and answers 409 `lease_lost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any, TypeAlias
from uuid import UUID, uuid5

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from leasehold.api.auth.security import EXTERNAL_WORK, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.domain.json_values import MOST_INTEGER, Flag, Integer, JsonNumber, Number
from leasehold.domain.lease import Lease
from leasehold.exporter.jobs import jobs_ended
from leasehold.limits import external_files
from leasehold.limits.external_files import HandedIn
from leasehold.transitions import claims, external, progress, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.jobs import external_queue
from leasehold.transitions.settlements import Completion, Failure, Settled, Verdict

router = APIRouter(tags=["external workers"], prefix="/v1/external", route_class=CallerFirst)
Worker = Annotated[Caller, Depends(Require(EXTERNAL_WORK))]

#: Makes owners of leases out of worker ids: two tenants' workers of one name are two.
_NAMESPACE = UUID("6f0c8a52-52de-4d2c-9a0e-0f4f4e0b7c11")
_MOST_LOSSES = 5
WorkerId: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=100, description="Of one process: fresh for every start of it.")
]
FileName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_RESPONSES = problems({HTTPStatus.CONFLICT: "`lease_lost`: the task is another's, or has ended"})


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    worker_id: WorkerId


class ClaimRequest(_Asked):
    queues: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]] = Field(min_length=1, max_length=50)
    limit: Integer = Field(1, ge=1, le=100)
    wait: Number = Field(0, ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for a task.")
    lease_seconds: Number = Field(60, ge=5, le=3600, description="The lease's life unless a heartbeat renews it.")


class Held(_Asked):
    epoch: Integer = Field(ge=1, le=MOST_INTEGER)


class Beat(Held):
    lease_seconds: Number = Field(60, ge=5, le=3600)


class ProgressReport(Held):
    percent: Number = Field(ge=0, le=100, allow_inf_nan=False)
    summary: str = Field("", max_length=progress.MAX_SUMMARY)


class SentFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: FileName
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="Of its bytes, which are compared.")]


class Result(Held):
    result: dict[str, JsonValue] | None = Field(None, description="Small JSON, kept with the step.")
    files: list[SentFile] = Field(
        default_factory=list, max_length=1000, description="What was sent to the URLs of `/files`."
    )


class Failed(Held):
    code: str = Field("external_error", pattern=r"^[a-z][a-z0-9_.-]{0,99}$")
    message: str = Field("", max_length=2000)
    retryable: Flag = True
    retry_after: Annotated[float, Field(ge=0, le=7 * 86_400), JsonNumber] | None = Field(
        None, description="Seconds; else the template's backoff."
    )


def _owner(caller: Caller, worker_id: str) -> UUID:
    return uuid5(_NAMESPACE, f"{caller.tenant_id}\n{worker_id}")


def lease_of(caller: Caller, task_id: UUID, held: Held) -> Lease:
    return Lease(task_id, _owner(caller, held.worker_id), held.epoch, 0, monotonic())


@router.post(
    "/claim",
    operation_id="claimExternal",
    summary="Take tasks of some queues",
    description="Waits up to `wait` seconds. Each task is leased: renew by heartbeats, and settle with its epoch.",
    responses=problems({}),
)
async def claim(request: Request, asked: ClaimRequest, caller: Worker) -> Response:
    services = services_of(request)
    terms = LeaseTerms(_owner(caller, asked.worker_id), asked.lease_seconds, 0.0, _MOST_LOSSES)
    queues = [external_queue(caller.tenant_id, queue) for queue in asked.queues]
    until = monotonic() + asked.wait
    while True:
        async with services.pool.acquire() as connection:
            found = await claims.claim_due(connection, terms, queues, asked.limit)
            needed = await external.needed(connection, [claimed.lease.task_id for claimed in found])
        if found or not await services.queues.runnable(queues, max(0.0, until - monotonic())):
            tasks = [
                _task(claimed, asked.lease_seconds) | await _given(services, needed[claimed.lease.task_id])
                for claimed in found
            ]
            return json_response({"tasks": tasks})


async def _given(services: Services, needed: Sequence[Any]) -> dict[str, Any]:
    """What the steps before it said, by their names, and the files that they made, each behind a signed URL."""
    seconds = services.settings.download_url_seconds
    files = [
        {name: file[name] for name in ("name", "size", "sha256", "content_type")}
        | {"step": row["step"], "url": await services.store.sign_get(file["key"], seconds=seconds)}
        for row in needed
        for file in row["files"] or ()
    ]
    return {"results": {row["step"]: row["value"] for row in needed}, "files": files}


def _task(claimed: Claimed, lease_seconds: float) -> dict[str, Any]:
    return {
        "task_id": claimed.lease.task_id,
        "run_id": claimed.job_id,
        "template": claimed.pipeline,
        "version": claimed.pipeline_version,
        "step": claimed.step,
        "queue": claimed.queue.split(":", 2)[2],
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
    summary="Keep a lease, and hear whether to stop",
    responses=_RESPONSES,
)
async def heartbeat(request: Request, task_id: UUID, beat: Beat, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, beat)
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as still:
            if still:
                (renewal,) = await claims.renew(connection, lease.owner, [lease], beat.lease_seconds)
        if not still or not renewal.still_ours:
            raise lost()
    return json_response({"lease_seconds": beat.lease_seconds, "cancel_requested": renewal.cancel})


@asynccontextmanager
async def in_time(services: Services, connection: Connection, caller: Caller, lease: Lease) -> AsyncIterator[bool]:
    """Around what a worker says of its step, in a transaction: False where the step is past its time limit, which ends
    the attempt whatever its lease says. Then nothing else may be written.
    """
    ended: Settled | None = None
    async with connection.transaction():
        if await external.is_late(connection, lease):
            ended = await external.time_out(connection, services.templates, caller.tenant_id, lease)
        yield ended is None
    if ended is not None:
        jobs_ended(ended.ended)
        services.announcer.announce(ended.announcements)


def lost() -> Conflict:
    return Conflict("lease_lost", "The lease of this epoch is not the task's any more: write nothing, and stop.")


@router.post(
    "/tasks/{task_id}/progress", operation_id="progressExternal", summary="Say how far a task is", responses=_RESPONSES
)
async def say_progress(request: Request, task_id: UUID, said: ProgressReport, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, said)
    kept: Collection[UUID] = ()
    async with services.pool.acquire() as connection, in_time(services, connection, caller, lease) as still:
        if still:
            kept = await progress.report(connection, [progress.Progress(lease, said.percent, said.summary)])
    if task_id not in kept:
        raise lost()
    return json_response({"percent": said.percent})


@router.post(
    "/tasks/{task_id}/complete",
    operation_id="completeExternal",
    summary="The task is done",
    description="The bytes of each of its `files` are read and compared before anything is written.",
    responses=problems({
        HTTPStatus.CONFLICT: "`lease_lost`: the task is another's, or has ended",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `file_not_announced`, `file_missing`, `file_mismatch`",
    }),
)  # fmt: skip
async def complete(request: Request, task_id: UUID, done: Result, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, done)
    sent = {file.name: HandedIn(file.name, file.sha256) for file in done.files}
    outputs = await services.files.check(caller.tenant_id, lease, list(sent.values()))
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as still:
            if still:
                ending = Completion(lease, outputs, done.result)
                outcome = await external_files.complete(connection, caller.tenant_id, ending)
        if not still or outcome.verdicts[task_id] is Verdict.LOST:
            raise lost()
    return await _told(services, outcome, task_id, "succeeded")


@router.post(
    "/tasks/{task_id}/fail",
    operation_id="failExternal",
    summary="The attempt failed",
    description="It is tried again by the template's retry policy, unless `retryable` is false.",
    responses=_RESPONSES,
)
async def fail(request: Request, task_id: UUID, failed: Failed, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, failed)
    async with services.pool.acquire() as connection:
        async with in_time(services, connection, caller, lease) as still:
            if still:
                delay = failed.retry_after
                if delay is None:
                    waits = await external.backoff(connection, services.templates, caller.tenant_id, task_id)
                    delay = waits.total_seconds()
                message = failed.message.replace("\x00", "")
                said = Failure(lease, "error", failed.code, message, failed.retryable, delay)
                outcome = await _settled(connection, await settlements.fail(connection, [said]), lease)
        if not still:
            raise lost()
        if task_id not in outcome.states:  # it stopped, as it was asked to; or it says again what it said before
            status = await connection.fetchval(
                "SELECT status FROM task WHERE id = $1 AND tenant_id = $2", task_id, caller.tenant_id
            )
            outcome.states[task_id] = status
    return await _told(services, outcome, task_id, "cancelled")


async def _settled(connection: Connection, outcome: Settled, lease: Lease) -> Settled:
    """An attempt that ends in a run that was asked to stop has stopped. Raises Conflict `lease_lost`."""
    if outcome.verdicts[lease.task_id] is Verdict.LOST:
        outcome = await settlements.acknowledge_cancel(connection, [lease])
    if outcome.verdicts[lease.task_id] is Verdict.LOST:
        raise lost()
    return outcome


async def _told(services: Services, outcome: Settled, task_id: UUID, otherwise: str) -> Response:
    jobs_ended(outcome.ended)
    services.announcer.announce(outcome.announcements)
    return json_response({"status": outcome.states.get(task_id, otherwise)})


@router.post(
    "/tasks/{task_id}/acknowledge-cancel",
    operation_id="acknowledgeCancelExternal",
    summary="The task stopped, as it was asked to",
    responses=_RESPONSES,
)
async def acknowledge_cancel(request: Request, task_id: UUID, held: Held, caller: Worker) -> Response:
    services = services_of(request)
    lease = lease_of(caller, task_id, held)
    async with services.pool.acquire() as connection:
        outcome = await settlements.acknowledge_cancel(connection, [lease])
    if outcome.verdicts[task_id] is Verdict.LOST:
        raise lost()
    return await _told(services, outcome, task_id, "cancelled")
