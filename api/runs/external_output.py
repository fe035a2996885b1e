"""POST /v1/external/tasks/{task_id}/logs and /stream: stores the log lines and chunks of an external worker with the
run. The lines and chunks have the same bounds as those of the platform's own workers.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.process.services import services_of
from leasehold.api.runs.external import Held, Worker, in_time, lease_lost, lease_of
from leasehold.api.runs.schemas import Instant
from leasehold.domain.errors import Invalid
from leasehold.domain.json_values import MAX_INTEGER, Integer
from leasehold.limits import external_output
from leasehold.limits.external_output import Line, StoredItems
from leasehold.telemetry.attempt_logs import MAX_FIELDS, MAX_NAME

router = APIRouter(tags=["external workers"], prefix="/v1/external", route_class=AuthenticatedFirst)

#: The most items of one request, and the most characters of one text. telemetry/attempt_logs.py has smaller bounds. The
#: API cuts each text to these smaller bounds before it stores the text.
MAX_ITEMS, MAX_TEXT = 1000, 65_536
#: The description of the field `first`.
_FIRST = (
    "The number of the first item among those of this attempt, from 1. If two requests have the same number, only the "
    "first is stored."
)
_RESPONSES = problems({
    HTTPStatus.CONFLICT: "`lease_lost`: another worker holds the task, its time limit has passed, or it has ended",
    HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
})  # fmt: skip


class NewLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str = Field(max_length=MAX_TEXT)
    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    logger: str = Field("external", max_length=MAX_NAME)
    fields: dict[str, JsonValue] = Field(default_factory=dict, max_length=MAX_FIELDS)
    traceback: str = Field("", max_length=MAX_TEXT)
    at: Instant | None = Field(None, description="If left out, now.")


class NewLines(Held):
    first: Integer = Field(ge=1, le=MAX_INTEGER, description=_FIRST)
    lines: list[NewLine] = Field(min_length=1, max_length=MAX_ITEMS)


class NewChunks(Held):
    first: Integer = Field(ge=1, le=MAX_INTEGER, description=_FIRST)
    chunks: list[JsonValue] = Field(min_length=1, max_length=MAX_ITEMS)


class KeptItems(BaseModel):
    """`kept`: how many of the request's items are kept. `cut`: the attempt is over its bounds, and no more is kept."""

    kept: int
    cut: bool


@router.post(
    "/tasks/{task_id}/logs",
    operation_id="logExternal",
    summary="Add lines to the log of a task's run",
    description="Secrets are redacted, and long texts are cut, as in the lines of the fleet's own attempts.",
    response_model=KeptItems,
    responses=_RESPONSES,
)
async def add_lines(request: Request, task_id: UUID, body: NewLines, caller: Worker) -> KeptItems:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    lines = [
        Line(**line.model_dump(exclude={"at"}), at=None if line.at is None else line.at.timestamp())
        for line in body.lines
    ]
    stored_items: StoredItems | None = None
    async with services.pool.acquire() as connection, in_time(services, connection, caller, lease) as is_in_time:
        if is_in_time:
            stored_items = await external_output.log(connection, services.settings, lease, body.first, lines)
    return _answer(stored_items)


@router.post(
    "/tasks/{task_id}/stream",
    operation_id="emitExternal",
    summary="Add chunks to the stream of a task's run",
    description="A chunk is a text or another JSON value. Clients that follow the run's stream get it immediately. The "
    "first chunk of a later attempt voids those of the attempts before it.",
    response_model=KeptItems,
    responses=_RESPONSES,
)
async def add_chunks(request: Request, task_id: UUID, body: NewChunks, caller: Worker) -> KeptItems:
    services = services_of(request)
    lease = lease_of(caller, task_id, body)
    stored_items: StoredItems | None = None
    async with services.pool.acquire() as connection, in_time(services, connection, caller, lease) as is_in_time:
        if is_in_time:
            try:
                stored_items = await external_output.emit(connection, services.settings, lease, body.first, body.chunks)
            except ValueError:
                raise Invalid("text_not_storable", "A text contains a NUL character, which cannot be stored.") from None
    return _answer(stored_items)


def _answer(stored_items: StoredItems | None) -> KeptItems:
    """The answer of the endpoint. Raises Conflict `lease_lost` if `stored_items` is None, because then the step is past
    its time limit, or the lease has ended.
    """
    if stored_items is None:
        raise lease_lost()
    return KeptItems(kept=stored_items.items, cut=stored_items.cut)
