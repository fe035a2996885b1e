"""POST /v1/callbacks/secret: makes the secret that signs the messages to a tenant's `callback_url`s."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from fastapi import APIRouter, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.process import deadline
from leasehold.api.process.services import services_of
from leasehold.api.runs.webhooks import Owner
from leasehold.db.database import Connection, OneConnection
from leasehold.db.idempotency import fingerprint
from leasehold.security.sealing import Sealing
from leasehold.security.signing import new_secret, secret_text
from leasehold.transitions import callbacks

router = APIRouter(tags=["webhooks"], prefix="/v1/callbacks", route_class=AuthenticatedFirst)


@router.post(
    "/secret",
    operation_id="rotateCallbackSecret",
    summary="Get a new secret for callbacks",
    description="Callbacks (`callback_url` of a submission) are signed as webhooks are. Until the next rotation, they "
    "carry the signatures of both secrets.",
    responses=problems({}),
)
async def rotate_callback_secret(request: Request, caller: Owner, idempotency_key: IdempotencyKey = None) -> Response:
    services = services_of(request)
    sealing = Sealing(services.settings)
    sealed_secret = sealing.seal(new_secret())

    async def work(connection: Connection) -> Answer:
        row = await callbacks.rotate(connection, caller.tenant_id, sealed_secret)
        await record(connection, caller, "callback.rotated", caller.tenant_id)
        return Answer(HTTPStatus.OK, encoded({"created_at": row["created_at"]}))

    request_hash = fingerprint(b"POST /v1/callbacks/secret")
    # Use one connection to write and to read. After a failover, another connection may still lead to the old primary,
    # which does not have the new secret.
    async with services.pool.acquire() as connection:
        answer = await once(OneConnection(connection), caller.tenant_id, idempotency_key, request_hash, work)
        deadline.current().lift()  # no more time limit: the new secret is committed, so the client must get it
        # Read the secret from the row, because a stored answer has no secret.
        newest_secret = sealing.open((await callbacks.find(connection, caller.tenant_id))["secrets"][0])
    return json_response(orjson.loads(answer.body) | {"secret": secret_text(newest_secret)}, answer.status_code)
