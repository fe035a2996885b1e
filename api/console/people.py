"""The page of people who sign in by OpenID Connect. An admin sets their roles, disables and enables them, and ends
their sessions.
"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import OPERATE, PEOPLE_WRITE
from leasehold.api.console.rendering import content_of, go_to, page
from leasehold.api.console.routes import Fields
from leasehold.api.console.session import SignedIn
from leasehold.api.fleet import people as endpoints
from leasehold.api.http.cursors import InstantCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.domain.errors import Invalid
from leasehold.security.roles import NAMES

router = APIRouter()
Admin = Annotated[Caller, Depends(SignedIn(PEOPLE_WRITE))]  # the person who is signed in, with this scope
#: The number of people on the page. It is small, because each row has several forms.
_SHOWN = 25
#: The values that an admin may set: a role, or `provider`, with which the OpenID provider's groups decide the role
#: again.
_ROLES = (*NAMES, "provider")


@router.get("/people")
@may_read_standby
async def show_people(
    request: Request,
    caller: Admin,
    tenant: Annotated[str, Query(max_length=100)] = "",
    text: Annotated[str, Query(max_length=100)] = "",
    cursor: InstantCursor = None,
) -> Response:
    """`text`: only people whose login or name contains this text."""
    answer = content_of(
        await endpoints.list_people(request, caller, tenant or None, text.strip() or None, cursor, _SHOWN)
    )
    return page(
        request,
        "people.html",
        people=answer["people"],
        cursor=cursor,
        next_cursor=answer["next_cursor"],
        tenant=tenant if OPERATE in caller.scopes else "",
        text=text,
        roles=NAMES,
        is_open=services_of(request).openid is not None,  # whether people can sign in
    )


@router.post("/people/{person_id}/role")
async def set_role(request: Request, person_id: UUID, caller: Admin, form: Fields) -> Response:
    role: Any = form.get("role", "")
    if role not in _ROLES:
        raise Invalid("invalid_request", f"A role is one of {', '.join(NAMES)}, or what the provider says.")
    response = await endpoints.change_person(request, person_id, endpoints.PersonChange(role=role), caller)
    person = content_of(response)
    sentence = f"{person['login']} is {person['role'] or 'without a role'} now."
    return go_to(request, "/people", sentence)


@router.post("/people/{person_id}/disable")
async def disable(request: Request, person_id: UUID, caller: Admin, form: Fields) -> Response:
    disabled = form.get("disabled", "true") == "true"
    response = await endpoints.change_person(request, person_id, endpoints.PersonChange(disabled=disabled), caller)
    login = content_of(response)["login"]
    sentence = f"{login} is disabled, and has no session any more." if disabled else f"{login} may sign in again."
    return go_to(request, "/people", sentence)


@router.post("/people/{person_id}/end-sessions")
async def end_sessions(request: Request, person_id: UUID, caller: Admin) -> Response:
    await endpoints.end_sessions(request, person_id, caller)
    return go_to(request, "/people", "All sessions of the person have ended.")
