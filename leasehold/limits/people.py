"""People who sign in by OpenID Connect: each sign-in writes their rows, and admins change them, with the audit.

A person has a row in each tenant that the provider's groups named. A row that no group names any more has no scopes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from uuid import UUID

from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Connection, lock_name
from leasehold.db.job_reads import Row
from leasehold.domain.audit import Actor
from leasehold.domain.errors import Conflict, NotFound
from leasehold.domain.ids import new_id
from leasehold.limits.bounds import make_room
from leasehold.security.openid import Identity
from leasehold.security.roles import PREFIX

Role: TypeAlias = Literal["viewer", "operator", "admin"]
#: A person's scopes, of their row `p`: the role that an admin set counts instead of what the groups gave.
_SCOPES = f"CASE WHEN p.set_role IS NULL OR p.scopes = '{{}}' THEN p.scopes ELSE ARRAY['{PREFIX}' || p.set_role] END"
_COLUMNS = f"""p.id, p.tenant_id, p.issuer, p.subject, p.login, p.name, {_SCOPES} AS scopes,
       p.scopes AS given, p.set_role, p.generation, p.created_at, p.seen_at, p.disabled_at"""

_OF_SESSION = f"""
-- person_of_session
SELECT {_COLUMNS} FROM person p WHERE p.id = $1
"""

_FIND = f"""
-- person_find
SELECT {_COLUMNS} FROM person p WHERE p.id = $1 AND ($2::text IS NULL OR p.tenant_id = $2) FOR UPDATE
"""

# The newest sign-ins come first: whom an admin wants to change was mostly here lately.
_LIST = f"""
-- person_list
SELECT {_COLUMNS} FROM person p
WHERE ($1::text IS NULL OR p.tenant_id = $1)
  AND ($2::text IS NULL OR strpos(lower(p.login), lower($2)) > 0 OR strpos(lower(p.name), lower($2)) > 0)
ORDER BY p.seen_at DESC LIMIT $3
"""

_OF_SUBJECT = f"""
-- person_of_subject
SELECT {_COLUMNS} FROM person p WHERE p.issuer = $1 AND p.subject = $2 ORDER BY p.tenant_id
"""

# Somebody else of the tenant may have the login: the provider gives an address of a person who left to another one.
_ENTER = f"""
-- person_enter
INSERT INTO person AS p (id, tenant_id, issuer, subject, login, name, scopes)
SELECT $1::uuid, $2, $3, $4, CASE WHEN EXISTS (
           SELECT FROM person o WHERE o.tenant_id = $2 AND o.login = $5 AND (o.issuer, o.subject) <> ($3, $4)
       ) THEN $5 || '#' || right($1::uuid::text, 8) ELSE $5 END, $6, $7
ON CONFLICT (issuer, subject, tenant_id) DO UPDATE
SET login = CASE WHEN excluded.login = $5 THEN $5 ELSE $5 || '#' || right(p.id::text, 8) END,
    name = excluded.name, scopes = excluded.scopes, seen_at = clock_timestamp()
RETURNING {_COLUMNS}
"""

_LEAVE = """
-- person_leave
UPDATE person SET scopes = '{}', generation = generation + 1
WHERE issuer = $1 AND subject = $2 AND tenant_id <> ALL ($3::text[]) AND scopes <> '{}'
"""

_CHANGE = """
-- person_change
UPDATE person SET set_role = $2, generation = generation + $3,
       disabled_at = CASE WHEN $4 THEN coalesce(disabled_at, clock_timestamp()) END
WHERE id = $1
"""

_END_SESSIONS = """
-- person_end_sessions
UPDATE person SET generation = generation + 1 WHERE id = $1
"""

# Whoever is disabled stays: a row that is forgotten would come again, enabled.
_FORGET = """
-- person_forget
DELETE FROM person WHERE id IN (
    SELECT id FROM person WHERE seen_at < clock_timestamp() - make_interval(days => $1) AND disabled_at IS NULL
    ORDER BY seen_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
"""


@dataclass(frozen=True, slots=True)
class Change:
    """What an admin changes. None: it stays. `role`: `provider` for what the groups give."""

    role: Role | Literal["provider"] | None = None
    disabled: bool | None = None


async def of_session(connection: Connection, person_id: UUID) -> Row | None:
    """The person, or None. `scopes`: those that count now; `given`: those of the groups."""
    return await connection.fetchrow(_OF_SESSION, person_id)


async def of_subject(connection: Connection, issuer: str, subject: str) -> list[Row]:
    """Somebody's rows, one a tenant."""
    return await connection.fetch(_OF_SUBJECT, issuer, subject)


async def enter(
    connection: Connection, identity: Identity, scopes: Mapping[str, Sequence[str]], at_most: int
) -> list[Row]:
    """Write the rows of somebody who has signed in. `scopes`: by tenant, what the groups give now; in other tenants the
    person's sessions end. `at_most`: people of a tenant. Raises Conflict `too_many_people`.
    """
    issuer, subject = identity.issuer, identity.subject
    entered: list[Row] = []
    async with connection.transaction():
        for tenant_id in sorted(scopes):  # in order: two sign-ins cannot wait for each other
            await lock_name(connection, f"person of {tenant_id}")
            known = await connection.fetchval(
                "SELECT true FROM person WHERE issuer = $1 AND subject = $2 AND tenant_id = $3",
                issuer, subject, tenant_id,
            )  # fmt: skip
            if not known:
                await make_room(connection, "person", tenant_id, at_most)
            row = await connection.fetchrow(
                _ENTER, new_id(), tenant_id, issuer, subject, identity.login, identity.name, sorted(scopes[tenant_id])
            )
            assert row is not None
            entered.append(row)
        await connection.execute(_LEAVE, issuer, subject, sorted(scopes))
    return entered


async def some(connection: Connection, tenant_id: str | None, text: str | None, at_most: int) -> list[Row]:
    """People of the tenant (None: of all), those who signed in last before others. `text`: a part of login or name."""
    return await connection.fetch(_LIST, tenant_id, text or None, at_most)


async def find(connection: Connection, person_id: UUID, tenant_id: str | None) -> Row:
    """The person, if of this tenant (None: of any). Locks the row until the transaction ends. Raises NotFound."""
    row = await connection.fetchrow(_FIND, person_id, tenant_id)
    if row is None:
        raise NotFound("person_not_found", "There is no such person.")
    return row


async def change(connection: Connection, actor: Actor, row: Row, wanted: Change) -> None:
    """Change a person whom the caller's transaction has found. Whoever is disabled has no session any more."""
    role = row["set_role"] if wanted.role is None else None if wanted.role == "provider" else wanted.role
    was_disabled = row["disabled_at"] is not None
    is_disabled = was_disabled if wanted.disabled is None else wanted.disabled
    if (role, is_disabled) == (row["set_role"], was_disabled):
        return
    await connection.execute(_CHANGE, row["id"], role, int(is_disabled and not was_disabled), is_disabled)
    target = Target("person", str(row["id"]), row["tenant_id"])
    if role != row["set_role"]:
        await audit.record(
            connection, actor, "person.role_set", target, login=row["login"], role=wanted.role, before=row["set_role"]
        )
    if is_disabled != was_disabled:
        action = "person.disabled" if is_disabled else "person.enabled"
        await audit.record(connection, actor, action, target, login=row["login"])


async def end_sessions(connection: Connection, actor: Actor, row: Row) -> None:
    """End all sessions of a person whom the caller's transaction has found."""
    await connection.execute(_END_SESSIONS, row["id"])
    target = Target("person", str(row["id"]), row["tenant_id"])
    await audit.record(connection, actor, "person.sessions_ended", target, login=row["login"])


def refuse_oneself(actor_id: UUID | None, row: Row) -> None:
    """Raises Conflict `own_person`: nobody can take the last admin's access by a slip of their own hand."""
    if actor_id == row["id"]:
        raise Conflict("own_person", "Nobody changes their own role or access: another admin can.")


async def forget(connection: Connection, days: int) -> None:
    """Delete people who have not signed in for so many days, at most a thousand at once."""
    await connection.execute(_FORGET, days)
