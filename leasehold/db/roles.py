"""What the role that runs the platform may do: read and write rows. The role that migrates owns the schema."""

from __future__ import annotations

import asyncpg

from leasehold.domain.errors import Invalid

# Those of the role that migrates: a schema may hold others' tables, too.
_OURS = """
SELECT c.oid::regclass::text AS name, c.relkind = 'v' OR c.relname = 'alembic_version' AS only_read
FROM pg_class c
WHERE c.relnamespace = current_schema()::regnamespace AND c.relowner = current_user::regrole
  AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition
"""
#: Statements touch it by its own name, unlike the days.
_DEFAULT_DAY = "event_default"
_FUNCTIONS = ("add_event_day(date)", "drop_event_day(date)")


async def grant(connection: asyncpg.Connection[asyncpg.Record], role: str) -> None:
    """Let `role` read and write the rows of every table that the caller owns; repeating it changes nothing.

    Whatever it may do with the schema is taken away, where it was granted to the role itself.

    Raises Invalid: `role_unknown`, or `role_owns_schema` for a role that could change it all the same.
    """
    found = await connection.fetchrow(
        "SELECT quote_ident(rolname) AS name, rolsuper OR pg_has_role(rolname, current_user, 'MEMBER') AS owns,"
        " quote_ident(current_schema()) AS schema FROM pg_roles WHERE rolname = $1",
        role,
    )
    if found is None:
        raise Invalid("role_unknown", f"There is no role {role}: create it first (deploy/postgres/roles.sh does).")
    if found["owns"]:
        raise Invalid("role_owns_schema", f"The role {role} may act as the one that migrates: nothing is kept apart.")
    name, schema = found["name"], found["schema"]
    async with connection.transaction():
        await connection.execute(f"REVOKE ALL ON SCHEMA {schema} FROM {name}")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
        for row in await connection.fetch(_OURS):
            await _grant_rows(connection, row["name"], name, only_read=row["only_read"])
        await _grant_rows(connection, _DEFAULT_DAY, name)
        for function in _FUNCTIONS:
            await connection.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {name}")


async def _grant_rows(
    connection: asyncpg.Connection[asyncpg.Record], table: str, role: str, *, only_read: bool = False
) -> None:
    """Both names are quoted already."""
    rights = "SELECT" if only_read else "SELECT, INSERT, UPDATE, DELETE"
    await connection.execute(f"REVOKE ALL ON {table} FROM {role}")
    await connection.execute(f"GRANT {rights} ON {table} TO {role}")
