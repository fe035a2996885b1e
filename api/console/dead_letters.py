"""The pages of dead letters: steps that failed for good, grouped by the fingerprint of their cause. A person can retry
a step, a whole group, or one job of a group as a trial (canary).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ, RUNS_READ, RUNS_WRITE
from leasehold.api.console.once import Outcome, act_once, new_form_token, with_refusals
from leasehold.api.console.rendering import content_of, page
from leasehold.api.console.routes import Fields
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import InstantCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.jobs import dead_letters as endpoints
from leasehold.api.jobs.schemas import BulkReplayRequest
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.domain.errors import Invalid
from leasehold.domain.sentences import counted, full_stop

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(JOBS_READ, or_scope=RUNS_READ))]
Writer = Annotated[Caller, Depends(SignedIn(JOBS_OPERATE, or_scope=RUNS_WRITE))]
Kind = Annotated[str, Query(max_length=63)]  # the kind of work whose groups a page shows; "": all kinds
#: A page shows at most _MAX_SHOWN groups, or dead letters of one group. Only the latest _MAX_GROUPED dead letters are
#: grouped. Both numbers are small, because a browser loads the page of groups again every few seconds.
_MAX_SHOWN, _MAX_GROUPED = 50, 1000
#: One press of the button retries at most this many dead letters of a group.
_MAX_RETRIED = 1000
#: The longest fingerprint, in characters. The endpoints have the same bound.
_MAX_FINGERPRINT = 64


@router.get("/dead-letters")
@may_read_standby
async def show_groups(request: Request, caller: Reader, kind: Kind = "") -> Response:
    groups = await endpoints.largest_groups(services_of(request), caller, kind or None, _MAX_SHOWN + 1, _MAX_GROUPED)
    address = f"{request.url.path}?{request.url.query}"
    return page(
        request,
        "dead_letters.html",
        groups=groups[:_MAX_SHOWN],
        has_more=len(groups) > _MAX_SHOWN,
        kind=kind,
        max_grouped=_MAX_GROUPED,
        refresh_seconds=10,
        refresh_url=address,
    )


@router.get("/dead-letters/{fingerprint}")
@may_read_standby
async def show_group(
    request: Request,
    caller: Reader,
    fingerprint: str,
    cursor: InstantCursor = None,
) -> Response:
    _check_fingerprint(fingerprint)
    answer = content_of(
        await endpoints.list_dead_letters(request, caller, fingerprint=fingerprint, cursor=cursor, limit=_MAX_SHOWN)
    )
    # `once`: the token by which `act_once` recognises a second press of the same button.
    return page(
        request,
        "dead_letter_group.html",
        letters=answer["dead_letters"],
        next_cursor=answer["next_cursor"],
        fingerprint=fingerprint,
        max_retried=_MAX_RETRIED,
        once=new_form_token(),
    )


def _check_fingerprint(fingerprint: str) -> None:
    if len(fingerprint) > _MAX_FINGERPRINT:
        raise Invalid("invalid_request", "The fingerprint is malformed.")


@router.post("/dead-letters/{fingerprint}/replay")
async def replay_group(request: Request, caller: Writer, fingerprint: str, form: Fields) -> Response:
    canary = form.get("canary") == "yes"
    _check_fingerprint(fingerprint)
    body = BulkReplayRequest(fingerprint=fingerprint, canary=canary, limit=_MAX_RETRIED)

    async def act() -> Outcome:
        answer = content_of(await endpoints.replay_many(request, body, caller))
        replayed_ids, refusals, left = answer["replayed"], answer["refused"], answer.get("left")
        if canary and replayed_ids:
            return Outcome(f"/jobs/{replayed_ids[0]}", "This job runs again, as a trial of its group.")
        sentence = with_refusals(f"{counted(len(replayed_ids), 'job runs', 'jobs run')} again.", refusals)
        if left is not None:  # some jobs are left; the next press of the button retries them
            sentence = f"{full_stop(sentence)} {counted(left['jobs'], 'is', 'are')} left: {left['detail']}"
        return Outcome("/dead-letters", sentence, good=not refusals and left is None, has_acted=bool(replayed_ids))

    return await act_once(request, caller, form, act)


@router.post("/dead-letters/letters/{task_id}/replay")
async def replay_one(request: Request, caller: Writer, task_id: UUID, form: Fields) -> Response:
    async def act() -> Outcome:
        response = await endpoints.replay_one(request, task_id, caller)
        assert response.status_code == HTTPStatus.ACCEPTED
        return Outcome(f"/jobs/{content_of(response)['job_id']}", "The job runs again.")

    return await act_once(request, caller, form, act)
