"""The pages of bulk operations: a person previews an operation, submits it, and follows its progress.

Workers carry out a submitted operation: they retry, cancel or delete every job that its filter finds.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_DELETE, JOBS_OPERATE, JOBS_READ
from leasehold.api.console.rendering import content_of, form_idempotency_key, go_to, page
from leasehold.api.console.routes import Fields, form_error, whole_number
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import IdCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.jobs import operations as endpoints
from leasehold.api.jobs.schemas import NewOperation
from leasehold.api.process.keyring import Caller
from leasehold.domain.job_filter import MAX_CHARACTERS
from leasehold.domain.states import JOB_TERMINAL

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(JOBS_READ))]
Operator = Annotated[Caller, Depends(SignedIn(JOBS_OPERATE, or_scope=JOBS_DELETE))]
#: The number of operations on a page, or of an operation's refusals (jobs on which the operation could not act).
_PAGE = 50


@router.get("/operations")
@may_read_standby
async def show_operations(request: Request, caller: Reader, cursor: IdCursor = None) -> Response:
    answer = content_of(await endpoints.list_operations(request, caller, cursor, _PAGE))
    return page(
        request,
        "operations.html",
        refresh_seconds=5,
        refresh_url=f"{request.url.path}?{request.url.query}",
        operations=answer["operations"],
        next_cursor=answer["next_cursor"],
    )


@router.get("/operations/new")
async def preview(
    request: Request,
    caller: Operator,
    action: Annotated[str, Query(max_length=20)] = "retry",
    q: Annotated[str, Query(max_length=MAX_CHARACTERS)] = "",
) -> Response:
    """Show the jobs that the operation would act on. This changes nothing."""
    body = _body_of({"action": action, "filter": q}, dry_run=True)
    preview_answer = content_of(await endpoints.create_operation(request, body, caller))
    # `once`: the idempotency key that the form of this page sends to `create`.
    return page(
        request,
        "operation_new.html",
        preview=preview_answer,
        once=form_idempotency_key(request, "operation", action, q),
    )


@router.post("/operations/new")
async def create(request: Request, caller: Operator, form: Fields) -> Response:
    """Submit the operation. A form submits only one operation, however often its button is pressed."""
    fields: dict[str, Any] = {name: form.get(name, "") for name in ("action", "filter", "reason")}
    fields["canary"] = whole_number(form, "canary") or 0  # how many jobs are tried before all others
    fields["rate"] = whole_number(form, "rate")  # jobs a second
    response = await endpoints.create_operation(request, _body_of(fields), caller, form.get("once") or None)
    assert response.status_code == HTTPStatus.ACCEPTED
    # The page of the operation needs the scope `jobs:read`, which this caller may lack.
    path = f"/operations/{content_of(response)['id']}" if JOBS_READ in caller.scopes else "/"
    return go_to(request, path, "Workers have the operation.")


def _body_of(fields: dict[str, Any], *, dry_run: bool = False) -> NewOperation:
    try:
        return NewOperation(**fields, dry_run=dry_run)
    except ValidationError as error:
        raise form_error(error, "The operation") from None


@router.get("/operations/{operation_id}")
async def show_operation(request: Request, operation_id: UUID, caller: Reader, cursor: IdCursor = None) -> Response:
    operation = content_of(await endpoints.get_operation(request, operation_id, caller))
    refusals = content_of(await endpoints.list_refusals(request, operation_id, caller, cursor, _PAGE))
    has_ended = operation["status"] in JOB_TERMINAL
    return page(
        request,
        "operation.html",
        refresh_seconds=None if has_ended else 1,
        refresh_url=f"{request.url.path}?{request.url.query}",
        operation=operation,
        ended=has_ended,
        refusals=refusals["refusals"],
        next_cursor=refusals["next_cursor"],
    )
