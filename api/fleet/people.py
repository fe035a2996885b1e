"""/v1/people: admins list the people who sign in to the console by OpenID Connect, set their roles, disable them, and
end their sessions.

Nobody can give a scope that they lack. So an admin who sets a role or enables a person must have every scope that the
person then has. The access comes from the person's groups at the OpenID provider. If no group gives the person access
now, the change takes effect only at the person's next sign-in. In this case the admin must have every scope that the
next sign-in may give.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from leasehold.api.auth.security import OPERATE, PEOPLE_WRITE, Require, listed_tenant, tenant_of
from leasehold.api.fleet.keys import refuse_scopes_not_held
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import InstantCursor, cursor_of, instant_and_id_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.job_reads import Row
from leasehold.domain.json_values import Flag
from leasehold.limits import people
from leasehold.security.roles import NAMES, ROLE_PREFIX, role_and_scopes

router = APIRouter(tags=["people"], prefix="/v1/people", route_class=AuthenticatedFirst)
Admin = Annotated[Caller, Depends(Require(PEOPLE_WRITE))]  # a caller with the scope `people:write`
MAX_LISTED = 200
#: The scopes that cover all that a group can give (`Membership` in settings.py): the strongest role (a scope stands for
#: the role), and the only scope that a group can give besides a role.
ANY_GROUP = (f"{ROLE_PREFIX}{NAMES[-1]}", OPERATE)
_MISSING = {HTTPStatus.NOT_FOUND: "`person_not_found`"}


class Person(BaseModel):
    """A person within one tenant. `role`: the role in force; null: no group gives the person a role any more.
    `set_role`: the role that an admin has set; null: the provider's groups decide. `scopes`: what the person may do
    besides what the role allows. `seen_at`: the time of the last sign-in.
    """

    id: UUID
    tenant_id: str
    login: str
    name: str
    issuer: str
    subject: str
    role: Literal["viewer", "operator", "admin"] | None
    set_role: Literal["viewer", "operator", "admin"] | None
    scopes: list[str]
    created_at: datetime
    seen_at: datetime
    disabled_at: datetime | None


class People(BaseModel):
    people: list[Person]
    next_cursor: str | None


class PersonChange(BaseModel):
    """A member that is left out keeps its value."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["viewer", "operator", "admin", "provider"] | None = None
    disabled: Flag | None = None


def _json_of(row: Row) -> dict[str, Any]:
    """The JSON of a Person."""
    role, scopes = role_and_scopes(row["scopes"])
    fields = (
        "id", "tenant_id", "login", "name", "issuer", "subject", "set_role", "created_at", "seen_at", "disabled_at",
    )  # fmt: skip
    return {name: row[name] for name in fields} | {"role": role, "scopes": scopes}


@router.get(
    "",
    operation_id="listPeople",
    summary="List people, the latest sign-in first",
    response_model=People,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"}),
)
@may_read_standby
async def list_people(
    request: Request,
    caller: Admin,
    tenant: Annotated[
        str | None, Query(max_length=100, description="With `fleet:operate`: only people of this tenant.")
    ] = None,
    text: Annotated[str | None, Query(max_length=100, description="A part of the login or the name.")] = None,
    cursor: InstantCursor = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
) -> Response:
    tenant_id, before = listed_tenant(caller, tenant), instant_and_id_of_cursor(cursor)
    async with services_of(request).pool.acquire() as connection:
        rows = await people.search(connection, tenant_id, text, limit + 1, before)
    next_cursor = cursor_of(rows[limit - 1]["seen_at"], rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"people": [_json_of(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.patch(
    "/{person_id}",
    operation_id="changePerson",
    summary="Set a person's role, disable or enable the person",
    description="A role that an admin sets replaces the role that the provider's groups give; `provider`: the groups "
    "decide again. A person who is disabled loses all sessions immediately. Nobody changes their own role. The caller "
    "needs every scope that the person then has. To let the groups decide for a person to whom no group gives access "
    "now, the caller needs the scopes of an admin, and `fleet:operate`.",
    response_model=Person,
    responses=problems(
        _MISSING
        | {
            HTTPStatus.FORBIDDEN: "`insufficient_scope`, `scope_not_held`: the caller lacks a scope of the person",
            HTTPStatus.CONFLICT: "`own_person`",
        }
    ),
)
async def change_person(request: Request, person_id: UUID, body: PersonChange, caller: Admin) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection, connection.transaction():
        row = await people.find(connection, person_id, tenant_of(caller))
        people.refuse_own_person(caller.person_id, row)
        await people.change(connection, caller.actor, row, people.Change(body.role, body.disabled))
        changed_row = await people.find(connection, person_id, tenant_of(caller))
        if body.role is not None or body.disabled is False:  # if this refuses, the transaction rolls the change back
            refuse_scopes_not_held(services, caller, _scopes_given_by(changed_row))
    return json_response(_json_of(changed_row))


def _scopes_given_by(row: Row) -> Sequence[str]:
    """The scopes that the person has. If no group gives the person access now: the scopes that the next sign-in may
    give.
    """
    if row["scopes"]:
        return row["scopes"]  # type: ignore[no-any-return]
    return ANY_GROUP if row["set_role"] is None else [f"{ROLE_PREFIX}{row['set_role']}"]


@router.post(
    "/{person_id}/end-sessions",
    operation_id="endSessions",
    summary="End all sessions of a person",
    status_code=204,
    responses=problems(_MISSING),
)
async def end_sessions(request: Request, person_id: UUID, caller: Admin) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        row = await people.find(connection, person_id, tenant_of(caller))
        await people.end_sessions(connection, caller.actor, row)
    return Response(status_code=HTTPStatus.NO_CONTENT)
