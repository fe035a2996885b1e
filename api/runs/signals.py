"""POST /v1/runs/{run_id}/signals/{name}: a client sends a payload to a run, for a workflow that waits for it or will
wait for it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.idempotent import Answer, IdempotencyKey, key_has_expired, once, unless_repeated
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.runs.runs import find_listed_run
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.template import encoded_payload
from leasehold.transitions.workflows import signals

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]  # a caller whose key has the scope `runs:write`
Name = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]


class SignalRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"payload": {"by": "anna"}}]})

    payload: JsonValue = Field(
        None, description="What the workflow gets. It must fit the model of the workflow's `wait_for`."
    )


class SignalAccepted(BaseModel):
    id: UUID
    name: str


@router.post(
    "/{run_id}/signals/{name}",
    operation_id="signalRun",
    summary="Send a signal to a run",
    description="A workflow consumes each signal once, in the order in which the signals came. A signal may come "
    "before the workflow waits for it. While the run waits for it, the payload must fit the model of the "
    "workflow's `wait_for`.",
    status_code=202,
    response_model=SignalAccepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`run_ended`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_large`",
        HTTPStatus.TOO_MANY_REQUESTS: "`too_many_signals`",
    }),
)  # fmt: skip
async def signal_run(
    request: Request,
    run_id: UUID,
    name: Name,
    caller: Writer,
    body: SignalRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    services = services_of(request)
    # Read the run only to raise NotFound if the tenant has no such run. If an answer is stored for the idempotency key,
    # the run is not read, and `run` is None.
    run = await unless_repeated(
        services.pool, caller.tenant_id, idempotency_key, lambda: find_listed_run(services, caller, run_id)
    )
    payload = None if body is None else body.payload
    payload_json = encoded_payload({"payload": payload})  # raises Invalid if the payload is too large
    # The hints (messages to workers about due tasks) that `work` has written. The list stays empty if an earlier answer
    # is repeated.
    hints: list[Announcement] = []

    async def work(connection: Connection) -> Answer:
        if run is None:  # the stored answer has expired since then, so nobody has checked that the run exists
            raise key_has_expired()
        at_most = services.settings.run_signals
        hints.extend(await signals.send(connection, run_id, caller.tenant_id, name, payload, at_most=at_most))
        await record(connection, caller, "job.signalled", run_id, kind="run", name=name)
        return Answer(HTTPStatus.ACCEPTED, encoded({"id": run_id, "name": name}))

    request_hash = fingerprint(f"POST /v1/runs/{run_id}/signals/{name}".encode(), payload_json)
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    services.announcer.announce(hints)
    return json_response(answer.body, answer.status_code)
