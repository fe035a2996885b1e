"""/v1/webhooks: clients subscribe URLs to the ends of jobs. Workers sign the deliveries as Standard Webhooks defines.

The row of a webhook has its secrets, sealed (encrypted). The answers to a request that creates a webhook or rotates its
secret, and to repetitions of such a request, have the newest secret. No other answer has a secret.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, TypeAlias
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import WEBHOOKS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.idempotent import Answer, IdempotencyKey, is_repeated, key_has_expired, once
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.process import deadline
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, OneConnection
from leasehold.db.idempotency import fingerprint
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.ids import new_id
from leasehold.domain.json_values import Flag
from leasehold.limits.admission import queues_of
from leasehold.limits.bounds import check_room
from leasehold.security.egress import Egress, EgressRefused, shown_host
from leasehold.security.sealing import Sealing
from leasehold.security.signing import new_secret, secret_text
from leasehold.transitions import jobs, webhooks
from leasehold.transitions.jobs import NewJob

router = APIRouter(tags=["webhooks"], prefix="/v1/webhooks", route_class=AuthenticatedFirst)
#: A caller whose key has the scope `webhooks:write`.
Owner = Annotated[Caller, Depends(Require(WEBHOOKS_WRITE))]
Event: TypeAlias = Literal[
    "run.succeeded", "run.failed", "run.cancelled", "run.expired",
    "job.succeeded", "job.failed", "job.cancelled", "job.expired",
]  # fmt: skip

#: A list of deliveries searches the newest deliveries of the tenant, at most this many.
_MAX_SEARCHED = 10_000
_SECRETS = 2  # the new secret and, until the next rotation, the previous secret
#: Problems of several routes, for their documentation: status -> codes.
_MISSING = {HTTPStatus.NOT_FOUND: "`webhook_not_found`"}
_REFUSED = {HTTPStatus.UNPROCESSABLE_ENTITY: "`url_malformed`, `host_unknown`, `address_private`, `port_refused`"}


class NewWebhook(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: str = Field(max_length=2000)
    events: list[Event] = Field(
        ["run.succeeded", "run.failed", "run.cancelled", "run.expired"], min_length=1, max_length=8
    )


class Changes(BaseModel):
    """A member that is left out keeps its value. A disabled webhook stays disabled until `enabled` is sent as true."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    enabled: Flag = True
    url: str = Field("", max_length=2000)
    events: list[Event] = Field(default_factory=list, min_length=1, max_length=8)

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("name at least one of enabled, url and events")
        return self


def _answer(row: Row) -> dict[str, Any]:
    # The webhook as clients see it. The row's secrets are left out.
    return {name: row[name] for name in ("id", "url", "events", "enabled", "disabled_because", "created_at")}


async def _check_url(services: Services, tenant_id: str, url: str) -> None:
    """Check the URL by the rules for outgoing requests. Each delivery checks the URL again, but here the client gets
    the error immediately. Raises Invalid if the rules forbid the URL. Raises Unavailable `busy` if too many URLs of the
    tenant, or of all tenants, are being checked.
    """
    try:
        async with services.url_checks.turn(tenant_id), Egress.from_settings(services.settings) as egress:
            await egress.check(url)
    except EgressRefused as error:
        raise Invalid(error.code, str(error)) from None


@router.post(
    "",
    operation_id="createWebhook",
    summary="Subscribe a URL to the ends of jobs",
    description="`run.*` is sent for runs, `job.*` for jobs of every kind. The answer has the secret, "
    "which no later answer repeats.",
    status_code=201,
    responses=problems(
        _REFUSED
        | {
            HTTPStatus.NOT_FOUND: "`webhook_not_found`: the request is a repetition, and its webhook was deleted",
            HTTPStatus.CONFLICT: "`too_many_webhooks`",
        }
    ),
)
async def create_webhook(
    request: Request, body: NewWebhook, caller: Owner, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    sealed_secret = Sealing(services.settings).seal(new_secret())
    is_repeat = await is_repeated(services.pool, caller.tenant_id, idempotency_key)
    if not is_repeat:
        await _check_url(services, caller.tenant_id, body.url)

    async def work(connection: Connection) -> Answer:
        # `once` calls `work` only if no answer is stored for the idempotency key. If an answer was stored a moment ago
        # (`is_repeat`), it has expired since then. In this case nobody has checked the URL.
        if is_repeat:
            raise key_has_expired()
        await check_room(connection, "webhook", caller.tenant_id, services.settings.webhooks_per_tenant)
        row = await connection.fetchrow(
            "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES ($1, $2, $3, $4, $5) RETURNING *",
            new_id(),
            caller.tenant_id,
            body.url,
            [sealed_secret],
            sorted(set(body.events)),
        )
        assert row is not None
        await record(connection, caller, "webhook.created", row["id"], host=shown_host(body.url), events=row["events"])
        return Answer(HTTPStatus.CREATED, encoded(_answer(row)))

    request_hash = fingerprint(b"POST /v1/webhooks", body.model_dump_json().encode())
    reported_jobs = services.job_kinds.reported_jobs
    async with services.pool.acquire() as connection:
        # A job that is submitted after the webhook's commit reports its end to the webhook. `watch` makes the older
        # unfinished jobs of the tenant report their ends, too. Such jobs may be very many, or locked, so `watch` may
        # take all of the request's time. So the first call comes before the commit. If the time ends during this call,
        # there is no webhook. If the time ended after the commit, there would be a webhook whose secret nobody knows.
        if not is_repeat:
            await webhooks.watch(connection, caller.tenant_id, reported_jobs)
        # `OneConnection` makes `once` use this connection. `_with_secret` needs the same connection.
        answer = await once(OneConnection(connection), caller.tenant_id, idempotency_key, request_hash, work)
        deadline.current().lift()  # no time limit from here on: the client must get the secret of what is committed
        # The second call handles the few jobs that were submitted since the first call.
        await webhooks.watch(connection, caller.tenant_id, reported_jobs)
        return await _with_secret(services, connection, caller, answer)


async def _with_secret(services: Services, connection: Connection, caller: Caller, answer: Answer) -> Response:
    """The answer with the newest secret. The secret is read from the webhook's row, because a stored answer has no
    secret.

    `connection`: the connection on which the answer was written or read. After a failover, another connection may still
    lead to the old primary, which does not have the row.
    """
    webhook = orjson.loads(answer.body)
    row = _existing_row(await webhooks.find(connection, UUID(webhook["id"]), caller.tenant_id))
    secret = Sealing(services.settings).open(row["secrets"][0])
    return json_response(webhook | {"secret": secret_text(secret)}, answer.status_code)


@router.get("", operation_id="listWebhooks", summary="List webhooks", responses=problems({}))
async def list_webhooks(request: Request, caller: Owner) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await connection.fetch("SELECT * FROM webhook WHERE tenant_id = $1 ORDER BY id", caller.tenant_id)
    return json_response({"webhooks": [_answer(row) for row in rows]})


@router.patch(
    "/{webhook_id}",
    operation_id="changeWebhook",
    summary="Change the URL or the events of a webhook, enable or disable it",
    description="Deliveries that are not yet made go to the new URL.",
    responses=problems(_MISSING | _REFUSED),
)
async def change_webhook(request: Request, webhook_id: UUID, body: Changes, caller: Owner) -> Response:
    services = services_of(request)
    if "url" in body.model_fields_set:
        await _check_url(services, caller.tenant_id, body.url)
    async with services.pool.acquire() as connection:
        row = await _write_changes(connection, caller, webhook_id, body)
        if row["enabled"]:
            await webhooks.watch(connection, caller.tenant_id, services.job_kinds.reported_jobs)
    return json_response(_answer(row))


async def _write_changes(connection: Connection, caller: Caller, webhook_id: UUID, body: Changes) -> Row:
    changed_fields = body.model_fields_set
    async with connection.transaction():
        # $3 `enabled`, $4 `url`, $5 `events`: NULL if the client left out the field, which then keeps its value. If the
        # client sends `enabled`, clear `disabled_because` (why the platform disabled the webhook). If the client
        # disables the webhook, set `disabled_at`, for the following case. The client enables the webhook again, and a
        # delivery that began before `disabled_at` then gets the answer 410. This answer must not disable the webhook.
        row = _existing_row(
            await connection.fetchrow(
                "UPDATE webhook SET enabled = coalesce($3, enabled), url = coalesce($4, url),"
                " events = coalesce($5, events),"
                " disabled_because = CASE WHEN $3::bool IS NULL THEN disabled_because END,"
                " disabled_at = CASE WHEN NOT $3::bool THEN clock_timestamp() ELSE disabled_at END"
                " WHERE id = $1 AND tenant_id = $2 RETURNING *",
                webhook_id,
                caller.tenant_id,
                body.enabled if "enabled" in changed_fields else None,
                body.url if "url" in changed_fields else None,
                sorted(set(body.events)) if "events" in changed_fields else None,
            )
        )
        recorded_values = {"enabled": row["enabled"], "host": shown_host(row["url"]), "events": row["events"]}
        await record(
            connection, caller, "webhook.changed", webhook_id, changed=sorted(changed_fields), **recorded_values
        )
    return row


def _existing_row(row: Row | None) -> Row:
    """The row. Raises NotFound `webhook_not_found` if there is none."""
    if row is None:
        raise NotFound("webhook_not_found", "There is no such webhook.")
    return row


@router.post(
    "/{webhook_id}/rotate",
    operation_id="rotateWebhookSecret",
    summary="Get a new secret",
    description="Until the next rotation, deliveries carry the signatures of both secrets.",
    responses=problems(_MISSING),
)
async def rotate_secret(
    request: Request, webhook_id: UUID, caller: Owner, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    sealed_secret = Sealing(services.settings).seal(new_secret())

    async def work(connection: Connection) -> Answer:
        row = await connection.fetchrow(
            f"UPDATE webhook SET secrets = (array_prepend($3::bytea, secrets))[1:{_SECRETS}]"
            " WHERE id = $1 AND tenant_id = $2 RETURNING *",
            webhook_id,
            caller.tenant_id,
            sealed_secret,
        )
        answer = Answer(HTTPStatus.OK, encoded(_answer(_existing_row(row))))
        await record(connection, caller, "webhook.rotated", webhook_id)
        return answer

    request_hash = fingerprint(b"POST /v1/webhooks/rotate", webhook_id.bytes)
    async with services.pool.acquire() as connection:
        answer = await once(OneConnection(connection), caller.tenant_id, idempotency_key, request_hash, work)
        deadline.current().lift()  # no time limit from here on: the client must get the secret of what is committed
        return await _with_secret(services, connection, caller, answer)


@router.delete(
    "/{webhook_id}",
    operation_id="deleteWebhook",
    summary="Delete a webhook",
    status_code=204,
    responses=problems(_MISSING),
)
async def delete_webhook(request: Request, webhook_id: UUID, caller: Owner) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        row = await connection.fetchrow(
            "DELETE FROM webhook WHERE id = $1 AND tenant_id = $2 RETURNING *", webhook_id, caller.tenant_id
        )
        await record(connection, caller, "webhook.deleted", webhook_id, host=shown_host(_existing_row(row)["url"]))
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.get(
    "/{webhook_id}/deliveries",
    operation_id="listDeliveries",
    summary="List the latest deliveries",
    description="They are searched among the newest 10,000 deliveries of all webhooks and callbacks of the tenant.",
    responses=problems(_MISSING),
)
@may_read_standby
async def list_deliveries(
    request: Request, webhook_id: UUID, caller: Owner, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        _existing_row(await webhooks.find(connection, webhook_id, caller.tenant_id))
        # `run_id` is the older name of `job_id`, from the time when webhooks reported only runs.
        rows = await connection.fetch(
            "SELECT j.id, j.status, j.created_at, j.finished_at, j.error, j.params->'event'->>'type' AS event,"
            " j.params->'event'->'data'->>'id' AS run_id,"
            " j.params->'event'->'data'->>'id' AS job_id, t.attempt, t.available_at AS next_try_at"
            # No index finds the deliveries of one webhook, so this searches the newest deliveries of the tenant.
            " FROM (SELECT * FROM job WHERE tenant_id = $1 AND pipeline = 'webhook' ORDER BY id DESC LIMIT $4) AS j"
            " JOIN task t ON t.job_id = j.id WHERE j.params->>'webhook_id' = $2 ORDER BY j.id DESC LIMIT $3",
            caller.tenant_id,
            str(webhook_id),
            limit,
            _MAX_SEARCHED,
        )
    return json_response({"deliveries": [dict(row) for row in rows]})


#: The common parts of the two routes that send a message.
_SENDING = {
    "status_code": 202,
    "responses": problems({
        HTTPStatus.NOT_FOUND: "`webhook_not_found`, `delivery_not_found`",
        HTTPStatus.CONFLICT: "`webhook_disabled`: enable it first, if the installation sends webhooks",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
}  # fmt: skip


@router.post("/{webhook_id}/test", operation_id="testWebhook", summary="Send a message to try a webhook", **_SENDING)  # type: ignore[arg-type]  # values of several types
async def send_test(
    request: Request, webhook_id: UUID, caller: Owner, idempotency_key: IdempotencyKey = None
) -> Response:
    """The message has the type `webhook.test`. It is signed, tried again and listed like every delivery."""

    async def read_params(_connection: Connection) -> dict[str, Any]:
        return {"event": webhooks.message("webhook.test", datetime.now(UTC), {"id": str(webhook_id)})}

    return await _send(services_of(request), caller, webhook_id, b"test", idempotency_key, read_params)


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/redeliver",
    operation_id="redeliverWebhook",
    summary="Deliver a message again",
    **_SENDING,  # type: ignore[arg-type]  # as above
)
async def redeliver(
    request: Request, webhook_id: UUID, delivery_id: UUID, caller: Owner, idempotency_key: IdempotencyKey = None
) -> Response:
    """The same message, with the same id (the header `webhook-id`), goes to the URL that the webhook has now."""

    async def read_params(connection: Connection) -> dict[str, Any]:
        sent_params = await connection.fetchval(
            "SELECT params FROM job WHERE id = $1 AND tenant_id = $2 AND pipeline = 'webhook'"
            " AND params ->> 'webhook_id' = $3",
            delivery_id,
            caller.tenant_id,
            str(webhook_id),
        )
        if sent_params is None:
            raise NotFound("delivery_not_found", "There is no such delivery.")
        # `message`: the id of the message. The id of its first delivery is the message's id.
        return {"event": sent_params["event"], "message": sent_params.get("message") or str(delivery_id)}

    return await _send(services_of(request), caller, webhook_id, delivery_id.bytes, idempotency_key, read_params)


async def _send(
    services: Services,
    caller: Caller,
    webhook_id: UUID,
    purpose: bytes,
    idempotency_key: str | None,
    read_params: Callable[[Connection], Awaitable[dict[str, Any]]],
) -> Response:
    """Submit a job that delivers a message to the webhook. The caller pays for the job as for any submission, so that
    clients cannot flood a URL.

    `purpose`: `test`, or the id of the delivery to repeat. It is a part of the request's fingerprint. `read_params`:
    reads the message, as parameters of the job: `event` and, for a repetition, the id `message`.
    """
    pipeline = services.templates.pipelines.find("webhook")  # None if this installation sends no webhooks
    hints: list[Announcement] = []  # messages that tell workers of due tasks; empty if the answer is repeated
    limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        row = _existing_row(await webhooks.find(connection, webhook_id, caller.tenant_id))
        if pipeline is None:
            raise Conflict("webhook_disabled", "This installation sends no webhooks.")
        if not row["enabled"]:
            raise Conflict("webhook_disabled", "The webhook is disabled.")
        event_params = await read_params(connection)
        new_job = NewJob(
            pipeline,
            caller.tenant_id,
            params={"webhook_id": str(webhook_id)} | event_params,
            keep_seconds=services.settings.retention_days * 86_400,
        )
        queues = queues_of(caller.tenant_id, pipeline)
        async with services.admission.submitting(connection, caller.payer, queues) as charge:
            hints.extend(await jobs.submit(connection, [new_job]))
            action = "webhook.tested" if purpose == b"test" else "webhook.redelivered"
            await record(
                connection, caller, action, webhook_id, delivery=new_job.id, message=event_params.get("message")
            )
        limit_headers.update(charge.fields)  # the RateLimit headers
        return Answer(HTTPStatus.ACCEPTED, encoded({"id": new_job.id}))

    request_hash = fingerprint(b"POST /v1/webhooks/send", webhook_id.bytes, purpose)
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    if hints:
        services.announcer.announce(hints)
        SUBMITTED.labels("webhook").inc()
    return json_response(answer.body, answer.status_code, limit_headers)
