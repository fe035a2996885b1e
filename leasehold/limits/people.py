"""The rows of people who sign in by OpenID Connect. Each sign-in writes the rows of the person. An admin can change a
row, and each such change is also written to the audit.

A person has a row in each tenant to which one of the person's groups has given access. The groups come from the OpenID
provider. When no group gives access to the tenant any more, the row stays, but has no scopes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

import structlog

from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Connection, lock_name, row_count
from leasehold.db.job_reads import Row
from leasehold.domain.audit import Actor
from leasehold.domain.errors import Conflict, NotFound
from leasehold.domain.ids import new_id
from leasehold.limits.bounds import check_room
from leasehold.security.openid import Identity
from leasehold.security.roles import ROLE_PREFIX

log = structlog.get_logger(__name__)

Role: TypeAlias = Literal["viewer", "operator", "admin"]
#: SQL: the scopes of the person in row `p`. A role that an admin has set replaces the scopes that the groups give.
#: Such a role gives nothing to a person to whom no group gives access.
_SCOPES = (
    f"CASE WHEN p.set_role IS NULL OR p.scopes = '{{}}' THEN p.scopes ELSE ARRAY['{ROLE_PREFIX}' || p.set_role] END"
)
# `generation`: sessions of a lower generation have ended. `sessions_ended_at`: when the generation last rose.
_COLUMNS = f"""p.id, p.tenant_id, p.issuer, p.subject, p.login, p.name, {_SCOPES} AS scopes,
       p.set_role, p.generation, p.created_at, p.seen_at, p.disabled_at, p.sessions_ended_at"""

_OF_SESSION = f"""
-- person_of_session
SELECT {_COLUMNS} FROM person p WHERE p.id = $1
"""

_FIND = f"""
-- person_find
SELECT {_COLUMNS} FROM person p WHERE p.id = $1 AND ($2::text IS NULL OR p.tenant_id = $2) FOR UPDATE
"""

# The latest sign-ins come first, because an admin mostly changes people who signed in lately. $1: the tenant. $2: a
# part of the login or the name. $3: the most rows. $4 and $5: `seen_at` and id of the last person of the previous page.
_LIST = f"""
-- person_list
SELECT {_COLUMNS} FROM person p
WHERE ($1::text IS NULL OR p.tenant_id = $1)
  AND ($2::text IS NULL OR strpos(lower(p.login), lower($2)) > 0 OR strpos(lower(p.name), lower($2)) > 0)
  AND ($4::timestamptz IS NULL OR (p.seen_at, p.id) < ($4, $5::uuid))
ORDER BY p.seen_at DESC, p.id DESC LIMIT $3
"""

_OF_SUBJECT = f"""
-- person_of_subject
SELECT {_COLUMNS} FROM person p WHERE p.issuer = $1 AND p.subject = $2 ORDER BY p.tenant_id
"""

# $1 to $7: the id, tenant, issuer, subject, login, name and scopes of the row. Two people of a tenant may have the same
# login, because an OpenID provider may give an old address to a new person. Then the login of the person who signs in
# later gets a suffix, which is the end of the row's id. In a new row this id is $1. An existing row keeps its id, so
# the UPDATE makes the suffix of that id, and not of $1, which is new at each sign-in. `excluded.login`: the login that
# the INSERT would have written. It differs from $5 only if another person of the tenant has the login $5.
_SIGN_IN = f"""
-- person_enter
INSERT INTO person AS p (id, tenant_id, issuer, subject, login, name, scopes)
SELECT $1::uuid, $2, $3, $4, CASE WHEN EXISTS (
           SELECT FROM person other
           WHERE other.tenant_id = $2 AND other.login = $5 AND (other.issuer, other.subject) <> ($3, $4)
       ) THEN $5 || '#' || right($1::uuid::text, 8) ELSE $5 END, $6, $7
ON CONFLICT (issuer, subject, tenant_id) DO UPDATE
SET login = CASE WHEN excluded.login = $5 THEN $5 ELSE $5 || '#' || right(p.id::text, 8) END,
    name = excluded.name, scopes = excluded.scopes, seen_at = clock_timestamp()
RETURNING {_COLUMNS}
"""

# $3: the tenants to which the person's groups give access now. The person loses the access to all other tenants.
_LOSE_ACCESS = """
-- person_leave
UPDATE person SET scopes = '{}', generation = generation + 1, sessions_ended_at = clock_timestamp()
WHERE issuer = $1 AND subject = $2 AND tenant_id <> ALL ($3::text[]) AND scopes <> '{}'
"""

# $1: the row's id. $2: the role that an admin has set, or NULL. $3: 1 ends all sessions in the tenant of this row, 0
# ends none. $4: whether the person is disabled.
_CHANGE = """
-- person_change
UPDATE person SET set_role = $2, generation = generation + $3,
       sessions_ended_at = CASE WHEN $3 > 0 THEN clock_timestamp() ELSE sessions_ended_at END,
       disabled_at = CASE WHEN $4 THEN coalesce(disabled_at, clock_timestamp()) END
WHERE id = $1
"""

_END_SESSIONS = """
-- person_end_sessions
UPDATE person SET generation = generation + 1, sessions_ended_at = clock_timestamp() WHERE id = $1
"""

# Rows that an admin has changed stay. Without such a row, the next sign-in would write an enabled row with the scopes
# of the groups, and the admin's change would be lost.
_FORGET = """
-- person_forget
DELETE FROM person WHERE id IN (
    SELECT id FROM person WHERE seen_at < clock_timestamp() - make_interval(days => $1)
      AND disabled_at IS NULL AND set_role IS NULL
    ORDER BY seen_at LIMIT $2 FOR UPDATE SKIP LOCKED)
"""


@dataclass(frozen=True, slots=True)
class Change:
    """A change by an admin. A field that is None changes nothing. `role`: the role to set. "provider" removes the role
    that an admin has set, so that the scopes of the groups count again.
    """

    role: Role | Literal["provider"] | None = None
    disabled: bool | None = None


async def find_for_session(connection: Connection, person_id: UUID) -> Row | None:
    """The person's row, or None. Its column `scopes` has the scopes that count now."""
    return await connection.fetchrow(_OF_SESSION, person_id)


async def rows_of_subject(connection: Connection, issuer: str, subject: str) -> list[Row]:
    """The rows of a person, one for each tenant."""
    return await connection.fetch(_OF_SUBJECT, issuer, subject)


def has_ended(row: Row, began: int) -> bool:
    """Whether a session of the person, in the tenant of this row, has been ended. `began`: the time of the session's
    sign-in, in seconds since 1970. A session that began in the second in which sessions were ended counts as ended.
    """
    ended_at: datetime | None = row["sessions_ended_at"]
    return ended_at is not None and ended_at.timestamp() >= began


async def record_sign_in(
    connection: Connection, identity: Identity, scopes: Mapping[str, Sequence[str]], max_people: int
) -> list[Row]:
    """Write the rows of a person who has signed in. `scopes`: tenant -> the scopes that the groups give now. In all
    other tenants the person loses the scopes, and the person's sessions end. `max_people`: a tenant may have at most
    this many people.

    If a tenant has no room, a new person gets no row there, but gets the rows of the other tenants. Raises Conflict
    `too_many_people`, after the commit, if this sign-in has written no row.
    """
    issuer, subject = identity.issuer, identity.subject
    rows: list[Row] = []
    refusal: Conflict | None = None
    async with connection.transaction():
        # Another sign-in of the same person may write rows of other tenants. Without this lock, each of the two
        # sign-ins could wait for a row that the other has locked.
        await lock_name(connection, f"person {subject} of {issuer}")
        for tenant_id in sorted(scopes):  # all sign-ins take these locks in the same order, so that none deadlock
            await lock_name(connection, f"person of {tenant_id}")
            try:
                await _check_room_for(connection, identity, tenant_id, max_people)
            except Conflict as error:
                refusal = error
                log.warning("a tenant has no room for a person who signs in", tenant_id=tenant_id, code=error.code)
                continue
            row = await connection.fetchrow(
                _SIGN_IN, new_id(), tenant_id, issuer, subject, identity.login, identity.name, sorted(scopes[tenant_id])
            )
            assert row is not None
            rows.append(row)
        await connection.execute(_LOSE_ACCESS, issuer, subject, sorted(scopes))
    if refusal is not None and not rows:
        raise refusal
    return rows


async def _check_room_for(connection: Connection, identity: Identity, tenant_id: str, max_people: int) -> None:
    """Raises Conflict `too_many_people` if a new person signs in, and the tenant has no room for another row."""
    has_row = await connection.fetchval(
        "SELECT true FROM person WHERE issuer = $1 AND subject = $2 AND tenant_id = $3",
        identity.issuer, identity.subject, tenant_id,
    )  # fmt: skip
    if not has_row:
        await check_room(connection, "person", tenant_id, max_people)


async def search(
    connection: Connection,
    tenant_id: str | None,
    text: str | None,
    at_most: int,
    before: tuple[datetime, UUID] | None = None,
) -> list[Row]:
    """People of the tenant (None: of all tenants), the latest sign-ins first. `text`: only people whose login or name
    contains this text. `before`: the sign-in and the id of the last person of the previous page.
    """
    return await connection.fetch(_LIST, tenant_id, text or None, at_most, *(before or (None, None)))


async def find(connection: Connection, person_id: UUID, tenant_id: str | None) -> Row:
    """The person's row. `tenant_id`: only a row of this tenant; None: of any tenant. Locks the row until the
    transaction ends. Raises NotFound.
    """
    row = await connection.fetchrow(_FIND, person_id, tenant_id)
    if row is None:
        raise NotFound("person_not_found", "There is no such person.")
    return row


async def change(connection: Connection, actor: Actor, row: Row, change: Change) -> None:
    """Change a person whose row the caller's transaction has locked by `find`. If the change disables the person, the
    person's sessions in the tenant of this row end.
    """
    role = row["set_role"] if change.role is None else change.role
    if role == "provider":
        role = None
    was_disabled = row["disabled_at"] is not None
    is_disabled = was_disabled if change.disabled is None else change.disabled
    if (role, is_disabled) == (row["set_role"], was_disabled):
        return
    await connection.execute(_CHANGE, row["id"], role, int(is_disabled and not was_disabled), is_disabled)
    target = Target("person", str(row["id"]), row["tenant_id"])
    if role != row["set_role"]:
        await audit.record(
            connection, actor, "person.role_set", target, login=row["login"], role=change.role, before=row["set_role"]
        )
    if is_disabled != was_disabled:
        action = "person.disabled" if is_disabled else "person.enabled"
        await audit.record(connection, actor, action, target, login=row["login"])


async def end_sessions(connection: Connection, actor: Actor, row: Row) -> None:
    """End the person's sessions in the tenant of this row, which the caller's transaction has locked by `find`."""
    await connection.execute(_END_SESSIONS, row["id"])
    target = Target("person", str(row["id"]), row["tenant_id"])
    await audit.record(connection, actor, "person.sessions_ended", target, login=row["login"])


def refuse_own_person(actor_id: UUID | None, row: Row) -> None:
    """Raises Conflict `own_person` for the actor's own row, because the last admin must not lose access by mistake."""
    if actor_id == row["id"]:
        raise Conflict("own_person", "You cannot change your own role or access. Another admin can.")


async def forget(connection: Connection, days: int, limit: int = 1000) -> bool:
    """Delete at most `limit` rows of people who have not signed in for `days` days. Rows that an admin has changed
    stay. Returns whether more rows may have to be deleted.
    """
    return row_count(await connection.execute(_FORGET, days, limit)) >= limit
