"""Grants rights to the database role with which the API and the workers connect. This role may read and write rows, but
not change the schema. `leasehold migrate` calls `grant`.

Another database role migrates and owns the schema. So somebody who steals the API's password cannot change the schema.
"""

from __future__ import annotations

from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid

# The tables and views on which to grant rights. The migrating role owns them. Tables of other owners are left out.
# `only_read`: the role may not write the rows.
_OWN_TABLES = """
SELECT c.oid::regclass::text AS name, c.relkind = 'v' OR starts_with(c.relname, 'alembic_version') AS only_read
FROM pg_class c
WHERE c.relnamespace = current_schema()::regnamespace AND c.relowner = current_user::regrole
  AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition
"""
#: The default partition of the table `event`. Statements name this partition directly, so it needs a grant of its own.
#: Statements reach the other partitions through `event`, and the grant on `event` is enough.
_DEFAULT_EVENT_PARTITION = "event_default"
#: The SQL functions that the role may call. They run with the rights of the role that migrates.
_FUNCTIONS = ("add_event_day(date)", "drop_event_day(date)", "forget_audit(int, int)", "analyze_grown_tables()")
#: The audit tables, each with the columns that the role may insert. The role may also read these tables, but not change
#: or delete their rows.
_APPEND_ONLY: dict[str, tuple[str, ...]] = {
    "audit": (
        "id", "tenant_id", "actor_kind", "actor", "actor_tenant", "key_prefix", "action", "target_kind", "target",
        "source_ip", "request_id", "details",
    ),
    "audit_chain": (),
}  # fmt: skip


async def grant(connection: Connection, role: str) -> None:
    """Let `role` read and write the rows of every table that the connection's role owns. Exceptions: `role` may only
    read views and Alembic's tables, and may only read and add rows of the audit. If `role` had rights to change the
    schema, they are revoked.

    A second call changes nothing. The schema may be at an older revision, so missing tables and functions are left
    out. Raises Invalid, as `check_role` does.
    """
    name, schema = await check_role(connection, role)
    async with connection.transaction():
        await connection.execute(f"REVOKE ALL ON SCHEMA {schema} FROM {name}")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
        for table in await connection.fetch(_OWN_TABLES):
            await _grant_rows(connection, table["name"], name, only_read=table["only_read"])
        if await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", _DEFAULT_EVENT_PARTITION):
            await _grant_rows(connection, _DEFAULT_EVENT_PARTITION, name)
        for function in _FUNCTIONS:
            if await connection.fetchval("SELECT to_regprocedure($1) IS NOT NULL", function):
                await connection.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {name}")


async def check_role(connection: Connection, role: str) -> tuple[str, str]:
    """The quoted names of the role and of the schema.

    Raises Invalid: `role_unknown`, or `role_owns_schema` for a role that keeps the right to change the schema.
    """
    row = await connection.fetchrow(
        "SELECT quote_ident(rolname) AS name, rolsuper OR pg_has_role(rolname, current_user, 'MEMBER') AS owns,"
        " quote_ident(current_schema()) AS schema FROM pg_roles WHERE rolname = $1",
        role,
    )
    if row is None:
        raise Invalid("role_unknown", f"There is no role {role}: create it first, with deploy/postgres/roles.sh.")
    if row["owns"]:
        raise Invalid(
            "role_owns_schema",
            f"The role {role} is a superuser or a member of the role that migrates: it could change the schema.",
        )
    return row["name"], row["schema"]


async def _grant_rows(connection: Connection, table: str, role: str, *, only_read: bool = False) -> None:
    """Grant `role` rights on the rows of `table`. Both names are quoted already. `only_read`: no right to write."""
    rights = "SELECT, INSERT, UPDATE, DELETE"
    if table in _APPEND_ONLY:
        columns = ", ".join(_APPEND_ONLY[table])
        rights = f"SELECT, INSERT ({columns})" if columns else "SELECT"
    elif only_read:
        rights = "SELECT"
    await connection.execute(f"REVOKE ALL ON {table} FROM {role}")
    await connection.execute(f"GRANT {rights} ON {table} TO {role}")
