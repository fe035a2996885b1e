"""The page To settle: cases that only a person can decide. For example, it is unknown whether a provider has received
an order, or the platform has paused a schedule. The form of this page settles orders. Other cases link to their own
pages.
"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ
from leasehold.api.console.once import Outcome, act_once, new_form_token, with_refusals
from leasehold.api.console.rendering import content_of, page
from leasehold.api.console.routes import Fields, Form
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import IdCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.jobs import unsettled as endpoints
from leasehold.api.jobs.schemas import BulkSettleRequest, SettleItem
from leasehold.api.process.keyring import Caller
from leasehold.domain.errors import Invalid
from leasehold.domain.sentences import full_stop

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(JOBS_READ))]
Operator = Annotated[Caller, Depends(SignedIn(JOBS_OPERATE))]
#: The page shows at most this many cases.
_PAGE = 50
#: An action on the picked orders -> its word in the sentence that the page shows after the action.
_ACTIONS_DONE = {"adopt": "adopted", "again": "ordered again", "give_up": "given up"}


@router.get("/to-settle")
@may_read_standby
async def show_unsettled(
    request: Request,
    caller: Reader,
    what: Annotated[endpoints.What, Query()] = "orders",
    cursor: IdCursor = None,
) -> Response:
    """Show the cases of one kind. `what`: the kind, for example orders or schedules."""
    answer = content_of(await endpoints.list_unsettled(request, caller, what, None, cursor, _PAGE))
    return page(
        request,
        "to_settle.html",
        what=what,
        items=answer["items"],
        next_cursor=answer["next_cursor"],
        cursor=cursor,
        once=new_form_token(),
    )


@router.post("/to-settle/settle")
async def settle(request: Request, caller: Operator, form: Fields) -> Response:
    """Settle the picked orders. With the action `adopt`, a job goes on with an order that the person has found at the
    provider. This action needs the id that the order has at the provider, in the field `ref-<job id>`.
    """
    action: Any = form.get("action", "")
    picked_ids = dict.fromkeys(form.picked("job"))
    if not picked_ids:
        raise Invalid("nothing_picked", "Pick the orders first.")
    items = [_settlement_of(form, job_id, action) for job_id in picked_ids]
    try:
        body = BulkSettleRequest(settlements=items)
    except ValidationError as error:
        raise Invalid("invalid_request", full_stop(f"Nothing was settled: {error.errors()[0]['msg']}")) from None

    async def act() -> Outcome:
        answer = content_of(await endpoints.settle_jobs(request, body, caller))
        settled_count, refusals = len(answer["settled"]), answer["refused"]
        sentence = f"{settled_count} of {len(picked_ids)} {_ACTIONS_DONE[action]}."
        return Outcome("/to-settle", with_refusals(sentence, refusals), good=not refusals, has_acted=settled_count > 0)

    return await act_once(request, caller, form, act)


def _settlement_of(form: Form, job_id: str, action: Any) -> SettleItem:
    """The settlement of this job's order, from the fields of the form. Raises Invalid, which names the job."""
    ref = form.get(f"ref-{job_id}", "").strip() or None
    if action == "adopt" and ref is None:
        sentence = "To adopt an order, write the id that it has at the provider into its row"
        raise Invalid("invalid_request", f"{sentence}: nothing was settled, because the row of {job_id} has no id.")
    try:
        return SettleItem(
            job_id=UUID(job_id),
            action=action,
            ref=ref if action == "adopt" else None,
            reason=form.get("reason", "")[:500],
        )
    except ValidationError as error:
        raise Invalid(
            "invalid_request", full_stop(f"Nothing was settled: {job_id}: {error.errors()[0]['msg']}")
        ) from None
    except ValueError:
        raise Invalid("invalid_request", "The form names a job by something that is not an id.") from None
