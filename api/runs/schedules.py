"""/v1/schedules: a schedule starts runs by a cron expression. A tick is one time at which it fires. A client may also
start a run immediately, or the runs of past ticks (backfill).

The workers fire the schedules at their ticks (leasehold/schedules). Of these endpoints, only run-now and backfill start
runs; the others only read and write schedules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.callback_urls import REFUSED_URL, CallbackUrl, check_callback_url
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.idempotent import Answer, IdempotencyKey, is_repeated, key_has_expired, once, unless_repeated
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.responses import encoded, json_response, publish_submitted_run
from leasehold.api.http.tags import Tags, json_of_request
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.schemas import Instant, Priority, Scope, ScopeId
from leasehold.broker.base import BANDS
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.db.idempotency import check_key, fingerprint
from leasehold.db.job_reads import Row
from leasehold.domain import cron
from leasehold.domain.errors import Conflict, Invalid, NotFound, RequestError, TooMany, Unavailable
from leasehold.domain.ids import new_id
from leasehold.domain.json_values import MAX_SMALLINT, Flag, Integer, JsonNumber
from leasehold.limits.admission import queues_of
from leasehold.limits.bounds import check_room
from leasehold.schedules import firing as schedules
from leasehold.security.egress import shown_host
from leasehold.transitions import quarantine
from leasehold.transitions.runs import CreatedRun

router = APIRouter(tags=["schedules"], prefix="/v1/schedules", route_class=AuthenticatedFirst)
#: The caller of an endpoint that writes, or that reads. The caller's API key must have this scope.
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]
#: How many future ticks the answer about a schedule lists.
_NEXT_RUNS = 5
#: For the API's description: the error of an endpoint whose schedule does not exist.
_MISSING = {HTTPStatus.NOT_FOUND: "`schedule_not_found`"}
#: The audit does not record the values of these members, because they may be long or contain a secret.
_UNRECORDED = ("payload_template", "callback_url")
#: The members that a change may set to null. The schedule then no longer has them.
_NULLABLE = ("pause_after_failures", "callback_url")


def _without_null(schema: dict[str, Any]) -> None:
    """Remove null from the JSON schema of each field, because a client may leave a field out, but may not send null.
    Exception: `version` and the fields of _NULLABLE may be null.
    """
    for name, field in schema["properties"].items():
        choices = [choice for choice in field.get("anyOf", []) if choice != {"type": "null"}]
        if choices and name not in (*_NULLABLE, "version"):
            field.pop("anyOf")
            field.update(choices[0])
            field.pop("default", None)


class Changes(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_null)

    enabled: Flag | None = None
    cron: str | None = Field(None, max_length=200)
    timezone: str | None = Field(None, max_length=100)
    payload_template: dict[str, JsonValue] | None = None
    tags: Tags | None = None
    callback_url: CallbackUrl = None
    overlap: Literal["skip", "buffer_one", "cancel_other", "allow_all"] | None = None
    catch_up: Literal["skip", "one", "all"] | None = None
    catch_up_seconds: Annotated[int, Field(ge=60, le=31 * 86_400), JsonNumber] | None = None
    pause_after_failures: Annotated[int, Field(ge=1, le=100), JsonNumber] | None = None


class NewSchedule(Changes):
    """`overlap`: what a tick does while the schedule's previous run is unfinished. `catch_up`: which missed ticks (more
    than a minute late) of the last `catch_up_seconds` still start runs. `tags` and `callback_url` are given to its
    runs.
    """

    template: str = Field(max_length=63)
    version: Annotated[int, Field(ge=1, le=MAX_SMALLINT), JsonNumber] | None = None
    cron: str = Field(max_length=200)
    timezone: str = Field("UTC", max_length=100)
    payload_template: dict[str, JsonValue] = Field(default_factory=dict)
    tags: Tags = Field(default_factory=dict)
    scope: Scope = "tenant"
    scope_id: ScopeId = ""
    priority: Priority = "normal"
    enabled: Flag = True
    overlap: Literal["skip", "buffer_one", "cancel_other", "allow_all"] = "skip"
    catch_up: Literal["skip", "one", "all"] = "skip"
    catch_up_seconds: Integer = Field(86_400, ge=60, le=31 * 86_400)


class Backfill(BaseModel):
    """The ticks after `start`, up to and including `end`. A tick that already has a run keeps it."""

    model_config = ConfigDict(extra="forbid")

    start: Instant
    end: Instant
    dry_run: Flag = Field(False, description="Start nothing: the answer is 200 with the ticks that have no run.")


def _answer(row: Row) -> dict[str, Any]:
    """The schedule as JSON. It has only the host of the callback's URL, because the rest of the URL may contain a
    secret.
    """
    hidden_columns = ("tenant_id", "buffered_at", "now", "callback_url")
    shown_values = {name: value for name, value in row.items() if name not in hidden_columns}
    url = row["callback_url"]
    return shown_values | {
        "priority": BANDS[row["priority"]],
        "callback_host": None if url is None else shown_host(url),
        "next_runs": _next_runs(row),
    }


def _next_runs(row: Row) -> list[datetime]:
    """The next ticks. The list is empty if the schedule is disabled, or if its cron expression is no longer valid. For
    an invalid expression, a worker writes the reason to `last_error`.
    """
    if row["next_run_at"] is None:
        return []
    try:
        later_ticks = cron.ticks(row["cron"], row["timezone"], row["next_run_at"])
        return [row["next_run_at"], *islice(later_ticks, _NEXT_RUNS - 1)]
    except Invalid:
        return []


async def _find(connection: Connection, tenant_id: str, schedule_id: UUID, lock_clause: str = "") -> Row:
    """Read the schedule. `lock_clause`: a clause such as FOR UPDATE. Raises NotFound."""
    row = await connection.fetchrow(
        f"SELECT *, clock_timestamp() AS now FROM schedule WHERE id = $1 AND tenant_id = $2 {lock_clause}",
        schedule_id,
        tenant_id,
    )
    if row is None:
        raise NotFound("schedule_not_found", "There is no such schedule.")
    return row


async def _check_payload(services: Services, tenant_id: str, schedule: dict[str, Any]) -> None:
    """Check the template and the payload of a schedule. Raises NotFound, Conflict, Invalid and TooMany.

    No connection is held while the payload is checked, because the check may wait for other payloads of the tenant.
    """
    async with services.pool.acquire() as connection:
        template_version = await services.templates.find(
            connection, tenant_id, schedule["template"], schedule["version"]
        )
    if not template_version.template.schedulable:
        raise Conflict("not_schedulable", "The template does not allow schedules.")
    await services.templates.params(tenant_id, template_version, schedule["payload_template"])


@router.post(
    "",
    operation_id="createSchedule",
    summary="Run a template by the clock",
    status_code=201,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`not_schedulable`, `too_many_schedules`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cron`, `invalid_timezone`, `invalid_payload`, "
        f"`two_workflows`, `invalid_request`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: TOO_MANY_CHECKS,
    }),
)  # fmt: skip
async def create_schedule(
    request: Request, body: NewSchedule, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    cron.check(body.cron, body.timezone)
    check_callback_url(services.settings, body.callback_url)
    is_repeat = await is_repeated(services.pool, caller.tenant_id, idempotency_key)
    if not is_repeat:
        await _check_payload(services, caller.tenant_id, body.model_dump(mode="json"))

    async def work(connection: Connection) -> Answer:
        # `once` calls `work` only if the key has no stored answer. If `is_repeated` found an answer above, the answer
        # has expired since then, and nobody has checked the payload.
        if is_repeat:
            raise key_has_expired()
        await check_room(connection, "schedule", caller.tenant_id, services.settings.schedules_per_tenant)
        # Read the version again, because it may have been deleted since the check. From here on, a deletion waits for
        # this transaction, because `check_room` has taken a lock that `delete_template` also takes.
        await services.templates.find(connection, caller.tenant_id, body.template, body.version)
        row = await connection.fetchrow(
            "INSERT INTO schedule (id, tenant_id, template, version, cron, timezone, payload_template, scope, scope_id,"
            " priority, enabled, overlap, catch_up, catch_up_seconds, pause_after_failures, next_run_at, tags,"
            " callback_url)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)"
            " RETURNING *, clock_timestamp() AS now",
            new_id(), caller.tenant_id, body.template, body.version, body.cron, body.timezone,
            body.payload_template, body.scope, body.scope_id, BANDS.index(body.priority), body.enabled,
            body.overlap, body.catch_up, body.catch_up_seconds, body.pause_after_failures,
            await _next_tick(connection, body.cron, body.timezone) if body.enabled else None, body.tags,
            body.callback_url,
        )  # fmt: skip
        assert row is not None
        await record(
            connection, caller, "schedule.created", row["id"], template=body.template, cron=body.cron,
            timezone=body.timezone, enabled=body.enabled,
        )  # fmt: skip
        return Answer(HTTPStatus.CREATED, encoded(_answer(row)))

    request_hash = fingerprint(b"POST /v1/schedules", json_of_request(body))
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    location = {"Location": f"/v1/schedules/{orjson.loads(answer.body)['id']}"}
    return json_response(answer.body, answer.status_code, location)


async def _prepare(services: Services, row: Row) -> schedules.Prepared:
    """Read the template of a schedule, and check the payload. `row`: the schedule. Returns the template version and the
    parameters of the schedule's runs, or the error because of which no run may start. Raises TooMany or Unavailable if
    the payload cannot be checked now.

    Holds no connection while the payload is checked.
    """
    try:
        async with services.pool.acquire() as connection:
            template_version = await services.templates.find_schedulable(
                connection, row["tenant_id"], row["template"], row["version"]
            )
        return template_version, await services.templates.params(
            row["tenant_id"], template_version, row["payload_template"]
        )
    except (TooMany, Unavailable):
        raise
    except RequestError as error:
        return error


async def _next_tick(connection: Connection, expression: str, timezone: str) -> datetime | None:
    """The first tick after now, by the database's clock. None if the expression has no further tick."""
    return cron.next_after(expression, timezone, await database_time(connection))


@router.get("", operation_id="listSchedules", summary="List schedules, newest first", responses=problems({}))
@may_read_standby
async def list_schedules(
    request: Request,
    caller: Reader,
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await connection.fetch(
            "SELECT * FROM schedule WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id < $2) ORDER BY id DESC LIMIT $3",
            caller.tenant_id,
            id_of_cursor(cursor),
            limit + 1,
        )
    next_cursor = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    answers = []
    for row in rows[:limit]:
        answers.append(_answer(row))
        # Let other requests run, because it takes milliseconds to compute the next ticks of a rare schedule.
        await asyncio.sleep(0)
    return json_response({"schedules": answers, "next_cursor": next_cursor})


@router.get("/{schedule_id}", operation_id="getSchedule", summary="See a schedule", responses=problems(_MISSING))
async def get_schedule(request: Request, schedule_id: UUID, caller: Reader) -> Response:
    async with services_of(request).pool.acquire() as connection:
        return json_response(_answer(await _find(connection, caller.tenant_id, schedule_id)))


@router.patch(
    "/{schedule_id}",
    operation_id="changeSchedule",
    summary="Change, pause or resume a schedule",
    description="Ticks that a disabled schedule missed are not caught up.",
    responses=problems({
        HTTPStatus.NOT_FOUND: "`schedule_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`not_schedulable`",
        HTTPStatus.UNPROCESSABLE_ENTITY: f"`invalid_cron`, `invalid_timezone`, `invalid_payload`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: TOO_MANY_CHECKS,
    }),
)  # fmt: skip
async def change_schedule(request: Request, schedule_id: UUID, body: Changes, caller: Writer) -> Response:
    services = services_of(request)
    changes = body.model_dump(exclude_unset=True)
    if empty := [name for name, value in changes.items() if value is None and name not in _NULLABLE]:
        raise Invalid("invalid_request", f"{', '.join(empty)} cannot be null.")
    check_callback_url(services.settings, body.callback_url)
    async with services.pool.acquire() as connection:
        row = dict(await _find(connection, caller.tenant_id, schedule_id))
    # Disabling must always be possible, even if the template does not exist any more.
    if body.enabled or body.payload_template is not None:
        await _check_payload(services, caller.tenant_id, row | changes)
    async with services.pool.acquire() as connection, connection.transaction():
        # A worker quarantines (sets aside) a schedule that it cannot fire. After a change, the worker may be able to
        # fire it, so end the quarantine. Lock the row of the quarantine first, and then the row of the schedule, as the
        # worker does. Another order could deadlock.
        await quarantine.release(connection, schedules.DUTY, schedule_id)
        changed_row = await _write_changes(connection, caller.tenant_id, schedule_id, changes)
        recorded_values = {name: value for name, value in changes.items() if name not in _UNRECORDED}
        await record(connection, caller, "schedule.changed", schedule_id, changed=sorted(changes), **recorded_values)
    return json_response(_answer(changed_row))


async def _write_changes(connection: Connection, tenant_id: str, schedule_id: UUID, changes: dict[str, Any]) -> Row:
    """Write the changed members of the schedule. Returns the new row. Raises NotFound, and Invalid for a wrong cron
    expression or time zone.

    A new value of `cron`, `timezone` or `enabled` moves the next tick. Any other change leaves the next tick as it is,
    even if the tick is due already, because clients may send the whole schedule each time. A buffered tick
    (`buffered_at`) waits for the end of the schedule's previous run. A change drops the buffered tick if the schedule
    is disabled after the change, or does not have the policy `buffer_one`.
    """
    row_before = await _find(connection, tenant_id, schedule_id, "FOR UPDATE")
    schedule = dict(row_before) | changes
    if {"cron", "timezone"} & changes.keys() or changes.get("enabled"):
        cron.check(schedule["cron"], schedule["timezone"])
    next_run_at = schedule["next_run_at"]
    if any(schedule[name] != row_before[name] for name in ("cron", "timezone", "enabled")):
        next_run_at = None
        if schedule["enabled"]:
            next_run_at = await _next_tick(connection, schedule["cron"], schedule["timezone"])
    row = await connection.fetchrow(
        "UPDATE schedule SET enabled = $2, cron = $3, timezone = $4, payload_template = $5, overlap = $6,"
        " catch_up = $7, catch_up_seconds = $8, pause_after_failures = $9, next_run_at = $10, tags = $11,"
        " callback_url = $13, buffered_at = CASE WHEN $2 AND $6 = 'buffer_one' THEN buffered_at END,"
        " paused_because = CASE WHEN $2 THEN NULL ELSE paused_because END, failures = 0,"
        " updated_at = clock_timestamp()"
        " WHERE id = $1 AND tenant_id = $12 RETURNING *, clock_timestamp() AS now",
        schedule_id, schedule["enabled"], schedule["cron"], schedule["timezone"], schedule["payload_template"],
        schedule["overlap"], schedule["catch_up"], schedule["catch_up_seconds"], schedule["pause_after_failures"],
        next_run_at, schedule["tags"], tenant_id, schedule["callback_url"],
    )  # fmt: skip
    assert row is not None
    return row


@router.delete(
    "/{schedule_id}",
    operation_id="deleteSchedule",
    summary="Delete a schedule",
    description="Runs that it started are not deleted.",
    status_code=204,
    responses=problems(_MISSING),
)
async def delete_schedule(request: Request, schedule_id: UUID, caller: Writer) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        row = await _find(connection, caller.tenant_id, schedule_id, "FOR UPDATE")
        await connection.execute("DELETE FROM schedule WHERE id = $1 AND tenant_id = $2", schedule_id, caller.tenant_id)
        await record(connection, caller, "schedule.deleted", schedule_id, template=row["template"], cron=row["cron"])
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.post(
    "/{schedule_id}/run-now",
    operation_id="runScheduleNow",
    summary="Start a run of a schedule now, whatever its cron expression and state",
    status_code=202,
    responses=problems(_MISSING | {
        HTTPStatus.CONFLICT: "`not_started`: the schedule's `last_error` gives the reason",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def run_now(
    request: Request, schedule_id: UUID, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    keep_seconds = services.settings.retention_days * 86_400

    async def prepare() -> tuple[schedules.Prepared, str]:
        async with services.pool.acquire() as connection:
            row = await _find(connection, caller.tenant_id, schedule_id)
        return await _prepare(services, row), row["template"]

    prepared = await unless_repeated(services.pool, caller.tenant_id, idempotency_key, prepare)
    limit_headers: dict[str, str] = {}
    created_runs: list[tuple[CreatedRun, str]] = []  # the new run and its template

    async def work(connection: Connection) -> Answer:
        # `prepared` is None if the key had a stored answer. Here this answer has just expired, or `once` would not have
        # called `work`.
        if prepared is None:
            raise key_has_expired()
        prepared_run, template = prepared
        # First lock the schedule, then the rows of the tenant's rates, which `submitting` locks. Another order could
        # deadlock.
        row = await _find(connection, caller.tenant_id, schedule_id, "FOR UPDATE")
        async with services.admission.submitting(connection, caller.payer, _queues_of(caller, prepared_run)) as charge:
            # The run belongs to no tick, so `tick` is None.
            created_run = await schedules.submit_now(connection, prepared_run, row, None, keep_seconds)
            if created_run is None:  # the run was refused
                await services.admission.refund(connection, caller.payer)
                # Raise nothing here, because the transaction must commit: it has written the reason of the refusal to
                # the schedule's `last_error`. The endpoint raises Conflict after the commit. The answer is not stored,
                # so a repeated request tries again.
                return Answer(HTTPStatus.CONFLICT, b"", is_stored=False)
            await record(connection, caller, "schedule.run_now", schedule_id, job_id=created_run.id)
        created_runs.append((created_run, template))
        limit_headers.update(charge.fields)
        return Answer(HTTPStatus.ACCEPTED, encoded({"id": created_run.id}))

    request_hash = fingerprint(b"POST /v1/schedules/run-now", schedule_id.bytes)
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    if answer.status_code == HTTPStatus.CONFLICT:
        raise Conflict("not_started", "The run was refused: the schedule's last_error gives the reason.")
    for created_run, template in created_runs:
        await publish_submitted_run(services, created_run, template)
    return json_response(answer.body, answer.status_code, limit_headers)


@router.post(
    "/{schedule_id}/backfill",
    operation_id="backfillSchedule",
    summary="Start the runs of a past range",
    description=f"At most {schedules.MAX_TICKS} ticks at once. Each tick without a run counts as a submission. If a"
    " limit of the tenant refuses them, no run starts. A tick that the template refuses is left out of `runs`, and the"
    " schedule's `last_error` gives the reason: with the policy `reject_same_scope`, for example, only the first tick"
    " gets a run. The overlap policy does not apply. `dry_run` starts nothing: the answer is 200 with the number of"
    " `ticks`, and those that are `without_run`.",
    status_code=202,
    responses=problems(_MISSING | {
        HTTPStatus.UNPROCESSABLE_ENTITY: "`range_reversed`, `range_not_past`, `range_too_long`, `batch_too_large`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`, {TOO_MANY_CHECKS}",
    }) | {200: {"description": "What a `dry_run` found."}},
)  # fmt: skip
async def backfill(
    request: Request, schedule_id: UUID, body: Backfill, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    keep_seconds = services.settings.retention_days * 86_400
    if body.dry_run:
        async with services.pool.acquire() as connection:
            ticks = _ticks_of_range(services, await _find(connection, caller.tenant_id, schedule_id), body)
            check_key(idempotency_key)  # refuse an invalid key, although a dry run does not use it
            ticks_without_run = await schedules.without_run(connection, schedule_id, ticks)
        return json_response({"ticks": len(ticks), "without_run": ticks_without_run})

    async def prepare() -> tuple[schedules.Prepared, str, list[datetime]]:
        async with services.pool.acquire() as connection:
            row = await _find(connection, caller.tenant_id, schedule_id)
        ticks = _ticks_of_range(services, row, body)
        return await _prepare(services, row), row["template"], ticks

    prepared = await unless_repeated(services.pool, caller.tenant_id, idempotency_key, prepare)
    limit_headers: dict[str, str] = {}
    created_runs: list[tuple[CreatedRun, str]] = []  # the new runs, each with its template

    async def work(connection: Connection) -> Answer:
        if prepared is None:  # as in `run_now`
            raise key_has_expired()
        prepared_run, template, ticks = prepared
        # The order of the locks is that of `run_now`.
        row = await _find(connection, caller.tenant_id, schedule_id, "FOR UPDATE")
        ticks_without_run = await schedules.without_run(connection, schedule_id, ticks)
        # If `prepared_run` is an error, no tick gets a run. Then submit only the last tick, so that `submit_now` writes
        # the error to the schedule.
        is_refused = isinstance(prepared_run, RequestError)
        ticks_to_submit = ticks_without_run[-1:] if is_refused else ticks_without_run
        charged_runs = len(ticks_without_run)
        # The empty dictionary means that `submitting` checks no depth of a queue before the write, because the number
        # of runs is not known yet. `add_queues_of` names the queues whose depths `submitting` checks after the block.
        async with services.admission.submitting(connection, caller.payer, {}, charged_runs) as charge:
            for tick in ticks_to_submit:
                created_run = await schedules.submit_now(connection, prepared_run, row, tick, keep_seconds)
                if created_run is not None:
                    created_runs.append((created_run, template))
            await services.admission.add_queues_of(connection, charge, *(run.id for run, _ in created_runs))
            services.admission.check_added(charge)
            await services.admission.refund(connection, caller.payer, charged_runs - len(created_runs))
        limit_headers.update(charge.fields)
        span: dict[str, Any] = {"start": body.start, "end": body.end, "ticks": len(ticks)}
        await record(connection, caller, "schedule.backfilled", schedule_id, **span, runs=len(created_runs))
        ids = [created_run.id for created_run, _ in created_runs]
        return Answer(HTTPStatus.ACCEPTED, encoded({"ticks": len(ticks), "runs": ids}))

    request_hash = fingerprint(b"POST /v1/schedules/backfill", schedule_id.bytes, json_of_request(body))
    async with services.bulk.turn(caller.tenant_id):  # wait, because a process runs few bulk writes at once
        answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    for created_run, template in created_runs:
        await publish_submitted_run(services, created_run, template)
    return json_response(answer.body, answer.status_code, limit_headers)


def _queues_of(caller: Caller, prepared_run: schedules.Prepared) -> Mapping[str, int]:
    """Queue -> the number of tasks that one run puts into it. The result is empty if the run is refused. `submit_now`
    then writes the reason to the schedule.
    """
    with suppress(Invalid):
        if not isinstance(prepared_run, RequestError):
            template_version, params = prepared_run
            return queues_of(caller.tenant_id, template_version.pipeline, params=params)
    return {}


def _ticks_of_range(services: Services, row: Row, body: Backfill) -> list[datetime]:
    """The ticks of the range. Raises Invalid `range_reversed`, `range_not_past` or `range_too_long`."""
    if body.start > body.end:
        raise Invalid("range_reversed", "The range ends before it starts.")
    if body.end > row["now"]:
        raise Invalid("range_not_past", "The range must lie in the past: later ticks start their runs themselves.")
    if body.start < row["now"] - timedelta(days=services.settings.backfill_max_days):
        message = f"A range begins at most {services.settings.backfill_max_days} days ago."
        raise Invalid("range_too_long", message)
    ticks = cron.between(row["cron"], row["timezone"], body.start, body.end, schedules.MAX_TICKS + 1)
    if len(ticks) > schedules.MAX_TICKS:
        raise Invalid(
            "range_too_long", f"The range has more than {schedules.MAX_TICKS} ticks: send several shorter ranges."
        )
    return ticks
