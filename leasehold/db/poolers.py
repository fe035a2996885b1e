"""Finds out, when a process starts, whether a pooler (PgBouncer) stands before PostgreSQL, and what it cannot do.

In transaction mode each transaction may run on another session of the server. What lives with a session does not work
there: advisory locks, LISTEN, and prepared statements that the pooler does not know of. A process refuses to start with
the sentence that says what to set.
"""

from __future__ import annotations

from secrets import token_hex

import asyncpg

from leasehold.db.database import PLANNER_SETTINGS, Connection, connected, is_direct
from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings

_NAME, _DIRECT = "LEASEHOLD_DATABASE_URL", "LEASEHOLD_DATABASE_DIRECT_URL"
_NO_STATEMENTS = (
    "a pooler in transaction mode stands before PostgreSQL, and does not keep prepared statements. Set"
    " max_prepared_statements = 1000 in PgBouncer 1.21 or later, or pool_mode = session, or connect directly"
)
#: PostgreSQL's errors when a pooler has changed the session below a client's prepared statements.
_STATEMENTS_LOST = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
#: PgBouncer 1.21 and later give prepared statements names of their own, if they keep them for clients.
_KEEPS_STATEMENTS = "SELECT coalesce(bool_or(starts_with(name, 'PGBOUNCER_')), false) FROM pg_prepared_statements"
_DIFFERENT = """
SELECT w.name, w.value FROM unnest($1::text[], $2::text[]) AS w(name, value) WHERE current_setting(w.name) <> w.value
"""
#: How often `_shares_sessions` tries to get two sessions for two transactions of one client.
_TRIES = 3


async def check_pooler(settings: Settings) -> None:
    """Raises BadSetting when a pooler stands before PostgreSQL and something must be set first; or one of TRY_AGAIN."""
    try:
        keeps_statements = await _check(settings)
    except _STATEMENTS_LOST:
        raise BadSetting(_NAME, _NO_STATEMENTS) from None
    if keeps_statements and not settings.database_direct_url.get_secret_value():
        raise BadSetting(
            _DIRECT,
            "a pooler in transaction mode stands before PostgreSQL. Set this URL, which leads to PostgreSQL itself, "
            "for what needs a session: the presence of workers, LISTEN, and `leasehold migrate`",
        )


async def refuse_shared_sessions(settings: Settings) -> None:
    """For `leasehold migrate`, whose advisory lock and lock_timeout would stay in a session that others use. Raises
    BadSetting, or one of TRY_AGAIN.
    """
    try:
        async with connected(settings, "pooler check") as connection, connected(settings, "pooler check") as other:
            if await is_direct(connection):
                return
            shares = await _keeps_statements(connection) or await _shares_sessions(connection, other)
    except _STATEMENTS_LOST:
        shares = True
    if shares:
        raise BadSetting(
            _DIRECT,
            "migrations need a session of their own, and a pooler in transaction mode stands before PostgreSQL. Set "
            "this URL, which leads to PostgreSQL itself",
        )


async def _check(settings: Settings) -> bool:
    """Whether a pooler stands before PostgreSQL and keeps prepared statements: such a pooler is in transaction mode."""
    async with connected(settings, "pooler check") as connection:
        if await is_direct(connection):
            return False
        keeps_statements = await _keeps_statements(connection)
        async with connected(settings, "pooler check") as other:
            if not keeps_statements and await _shares_sessions(connection, other):
                raise BadSetting(_NAME, _NO_STATEMENTS)
        rows = await connection.fetch(_DIFFERENT, list(PLANNER_SETTINGS), list(PLANNER_SETTINGS.values()))
    if rows:
        sets = "; ".join(f"ALTER ROLE ... SET {row['name']} = '{row['value']}'" for row in rows)
        raise BadSetting(
            _NAME,
            f"a pooler stands before PostgreSQL and drops the settings of the session. Give them to the role: {sets}",
        )
    return keeps_statements


async def _keeps_statements(connection: Connection) -> bool:
    return bool(await connection.fetchval(_KEEPS_STATEMENTS))


async def _shares_sessions(connection: Connection, other: Connection) -> bool:
    """Whether a session that served `connection` serves `other` next. PgBouncer lends the session that was returned
    last. The simple protocol needs no prepared statement.
    """
    for _ in range(_TRIES):
        word = token_hex(8)
        await connection.execute(f"SET leasehold.pooler = '{word}'")
        try:
            # A transaction of the other client keeps the session busy, so this client gets another one.
            await other.execute("BEGIN")
            if await _differs(connection, word):
                return True
        finally:
            await other.execute("ROLLBACK")
    return False


async def _differs(connection: Connection, word: str) -> bool:
    try:
        await connection.execute(
            "DO $$ BEGIN IF current_setting('leasehold.pooler', true) IS DISTINCT FROM "
            f"'{word}' THEN RAISE EXCEPTION 'another session' USING ERRCODE = 'LH001'; END IF; END $$"
        )
    except asyncpg.PostgresError as error:
        if error.sqlstate == "LH001":
            return True
        raise
    return False
