"""Checks whether a process connects through a pooler (PgBouncer) that cannot do what the process needs. Processes check
this when they start.

In a pooler's transaction mode, each transaction may run on another session of the server. Advisory locks and LISTEN
then fail, because they belong to a session. Prepared statements also fail, unless the pooler keeps them for its
clients. If the process needs something that fails, it refuses to start, and the error names the setting to change.
"""

from __future__ import annotations

from secrets import token_hex

import asyncpg

from leasehold.db.database import PLANNER_SETTINGS, Connection, connected, is_direct
from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings

_URL, _DIRECT_URL = "LEASEHOLD_DATABASE_URL", "LEASEHOLD_DATABASE_DIRECT_URL"
#: The text of the error for a pooler in transaction mode that keeps no prepared statements.
_NO_STATEMENTS_KEPT = (
    "a pooler in transaction mode stands before PostgreSQL, and does not keep prepared statements. Set"
    " max_prepared_statements = 1000 in PgBouncer 1.21 or later, or pool_mode = session, or connect directly"
)
#: PostgreSQL's errors when a pooler runs a client's prepared statement on a session that has not prepared it.
_STATEMENTS_LOST = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
#: SQL: whether a pooler keeps prepared statements. PgBouncer (1.21 or later) then gives the statements its own names.
_KEEPS_STATEMENTS_SQL = "SELECT coalesce(bool_or(starts_with(name, 'PGBOUNCER_')), false) FROM pg_prepared_statements"
#: SQL: the settings that the process sent when it connected, but that the session does not have.
_DROPPED_SETTINGS_SQL = """
SELECT expected.name, expected.value FROM unnest($1::text[], $2::text[]) AS expected(name, value)
WHERE current_setting(expected.name) <> expected.value
"""
#: How many times `_shares_sessions` tries to get two sessions for two transactions of one client.
_TRIES = 3


async def check_pooler(settings: Settings) -> None:
    """Raises BadSetting if a pooler stands before PostgreSQL and the process cannot use it with these settings. Raises
    an error of TRY_AGAIN if PostgreSQL does not answer.
    """
    try:
        keeps_statements = await _keeps_statements_if_pooled(settings)
    except _STATEMENTS_LOST:
        raise BadSetting(_URL, _NO_STATEMENTS_KEPT) from None
    if keeps_statements and not settings.database_direct_url.get_secret_value():
        raise BadSetting(
            _DIRECT_URL,
            "a pooler in transaction mode stands before PostgreSQL. Set this URL, which leads to PostgreSQL itself, "
            "for what needs a session: the presence of workers, LISTEN, and `leasehold migrate`",
        )


async def refuse_shared_sessions(settings: Settings) -> None:
    """Raises BadSetting for a pooler that shares sessions among its clients. No migration may run through such a
    pooler. The advisory lock and the lock_timeout of `leasehold migrate` would stay in a session that other clients
    use. Raises an error of TRY_AGAIN if PostgreSQL does not answer.
    """
    try:
        async with (
            connected(settings, "pooler check") as connection,
            connected(settings, "pooler check") as other_connection,
        ):
            if await is_direct(connection):
                return
            is_shared = await _keeps_statements(connection) or await _shares_sessions(connection, other_connection)
    except _STATEMENTS_LOST:
        is_shared = True
    if is_shared:
        raise BadSetting(
            _DIRECT_URL,
            "migrations need a session of their own, and a pooler in transaction mode stands before PostgreSQL. Set "
            "this URL, which leads to PostgreSQL itself",
        )


async def _keeps_statements_if_pooled(settings: Settings) -> bool:
    """Whether a pooler stands before PostgreSQL and keeps prepared statements. Such a pooler is in transaction mode.
    Raises BadSetting for a pooler in transaction mode that keeps no prepared statements, and for a pooler that drops
    the session's settings.
    """
    async with connected(settings, "pooler check") as connection:
        if await is_direct(connection):
            return False
        keeps_statements = await _keeps_statements(connection)
        async with connected(settings, "pooler check") as other_connection:
            if not keeps_statements and await _shares_sessions(connection, other_connection):
                raise BadSetting(_URL, _NO_STATEMENTS_KEPT)
        rows = await connection.fetch(_DROPPED_SETTINGS_SQL, list(PLANNER_SETTINGS), list(PLANNER_SETTINGS.values()))
    if rows:
        commands = "; ".join(f"ALTER ROLE ... SET {row['name']} = '{row['value']}'" for row in rows)
        raise BadSetting(
            _URL,
            "a pooler stands before PostgreSQL and drops the settings of the session. Give them to the role: "
            f"{commands}",
        )
    return keeps_statements


async def _keeps_statements(connection: Connection) -> bool:
    return bool(await connection.fetchval(_KEEPS_STATEMENTS_SQL))


async def _shares_sessions(connection: Connection, other_connection: Connection) -> bool:
    """Whether the pooler lends one session to both connections in turn. `connection` sets a marker in its session, and
    returns the session. Then `other_connection` begins a transaction, and keeps the session that it gets. PgBouncer
    lends the session that was returned last, which is the session with the marker. So the next session of `connection`
    lacks the marker.

    The statements have no parameters, because asyncpg must send them without a prepared statement.
    """
    for _ in range(_TRIES):
        marker = token_hex(8)
        await connection.execute(f"SET leasehold.pooler = '{marker}'")
        try:
            await other_connection.execute("BEGIN")
            if await _lacks_marker(connection, marker):
                return True
        finally:
            await other_connection.execute("ROLLBACK")
    return False


async def _lacks_marker(connection: Connection, marker: str) -> bool:
    """Whether the session that the pooler now lends to `connection` lacks the marker. The statement answers with an
    error, and not with a row, because asyncpg prepares each statement that returns rows.
    """
    try:
        await connection.execute(
            "DO $$ BEGIN IF current_setting('leasehold.pooler', true) IS DISTINCT FROM "
            f"'{marker}' THEN RAISE EXCEPTION 'another session' USING ERRCODE = 'LH001'; END IF; END $$"
        )
    except asyncpg.PostgresError as error:
        if error.sqlstate == "LH001":
            return True
        raise
    return False
