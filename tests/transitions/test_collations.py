"""Limits are locked in one order whatever the collation of the database: the image `postgres` has en_US.utf8, which
sorts by other rules than Python.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from leasehold.cli import moving_rows
from leasehold.cli.moving_rows import leave_shared_limits
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.transitions import concurrency, limits
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.statements import statements
from tests.factories import ONE, Rows
from tests.support.databases import Databases
from tests.support.lock_waits import until_waiting
from tests.support.not_here import not_here
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import wait_at

Names = list[ConcurrencyLimitName]
#: In the order of Python. English puts `_` before `=`, and `a` before `B`.
BY_KEY: Names = [(EVERYBODY, "payload:t:/user=1"), (EVERYBODY, "payload:t:/user_id=1")]
BY_TENANT: Names = [("B", "tenant"), ("a", "tenant")]


@pytest.fixture
async def database_url(postgres: Databases, migrated_template: str) -> AsyncIterator[str]:
    url = await postgres.create_database(migrated_template)
    try:
        connection = await asyncpg.connect(url)
        try:
            await sort_as_english(connection)
        finally:
            await connection.close()
        yield url
    finally:
        await postgres.drop_database(url)


async def sort_as_english(connection: asyncpg.Connection) -> None:
    """Skips the test on a machine that cannot."""
    try:
        await connection.execute("CREATE COLLATION english (locale = 'en_US.utf8')")
    except asyncpg.PostgresError:  # the machine has no such locale
        try:
            await connection.execute("CREATE COLLATION english (provider = icu, locale = 'en-US')")
        except asyncpg.FeatureNotSupportedError:
            not_here("PostgreSQL has no collation of English here")
    for column in ("tenant_id", "key"):
        await connection.execute(f"ALTER TABLE gate ALTER COLUMN {column} TYPE text COLLATE english")


async def admit(connection: Connection, names: Names) -> None:
    await rooms_of(connection, names, None)


async def lock(connection: Connection, names: Names) -> None:
    await concurrency.lock_limits(connection, [ConcurrencyLimit(*name, at_most=2) for name in names])


async def follow(connection: Connection, names: Names) -> None:
    """As jobs do whose own limits have the bounds of these declared limits."""
    followers = [ConcurrencyLimit("t", f"k{n}", declared_as=name) for n, name in enumerate(names)]
    await concurrency.lock_limits(connection, followers)


async def declare(connection: Connection, _: Names) -> None:
    """As an operator does who changes the bounds of all tenants."""
    await limits.declare(connection, [ONE], ConcurrencyLimit(EVERYBODY, "tenant", at_most=3))


async def move_away(connection: Connection, _: Names) -> None:
    await leave_shared_limits(connection, "t")


@pytest.mark.parametrize(
    ("locking", "names", "is_declared"),
    [
        (admit, BY_KEY, False),
        (admit, BY_TENANT, False),
        (lock, BY_KEY, False),
        (lock, BY_TENANT, False),
        (follow, BY_KEY, True),
        (follow, BY_TENANT, True),
        (declare, BY_TENANT, False),
        (move_away, BY_KEY, False),
    ],
)
async def test_limits_are_locked_in_the_order_of_their_bytes_so_that_no_two_transactions_deadlock(
    rows: Rows,
    another: Open,
    locking: Callable[[Connection, Names], Awaitable[None]],
    names: Names,
    is_declared: bool,
) -> None:
    await wait_at(rows, *(ConcurrencyLimit(*name, at_most=1) for name in names))
    await rows.connection.execute("UPDATE gate SET declared = $1", is_declared)
    assert [tuple(row) for row in await rows.connection.fetch("SELECT tenant_id, key FROM gate ORDER BY 1, 2")] == [
        *reversed(names)
    ]
    first, second = names
    one_row = "SELECT FROM gate WHERE tenant_id = $1 AND key = $2 FOR UPDATE"

    async def lock_both() -> None:
        async with rows.connection.transaction():
            await locking(rows.connection, names)

    other, third = (await another()).connection, (await another()).connection
    async with other.transaction():
        await other.execute(one_row, *first)
        locked = asyncio.create_task(lock_both())
        await until_waiting(other)
        await third.execute(f"{one_row} NOWAIT", *second)
    await locked


def test_every_statement_that_locks_limits_sorts_them_by_their_bytes() -> None:
    """Also where PostgreSQL has no other collation to try it with."""
    texts = statements() | {"shared": moving_rows._LOCK_SHARED_LIMITS}
    pattern = r"ORDER BY ([^()]*\bkey\b[^()]*?)\s+FOR (?:NO KEY |KEY )?(?:UPDATE|SHARE)"
    found = {name: re.search(pattern, text) for name, text in texts.items()}
    columns = {name: order[1].split(", ") for name, order in found.items() if order is not None}
    assert columns == {
        "gates_keep": ['g.tenant_id COLLATE "C"', 'g.key COLLATE "C"'],
        "gates_lock": ['g.tenant_id COLLATE "C"', 'g.key COLLATE "C"'],
        "gates_lock_or_skip": ['g.tenant_id COLLATE "C"', 'g.key COLLATE "C"'],
        "gates_followed": ['g.tenant_id COLLATE "C"', 'g.key COLLATE "C"'],
        "limits_follow": ['tenant_id COLLATE "C"', 'key COLLATE "C"'],
        "shared": ['t.tenant_id COLLATE "C"', 't.key COLLATE "C"'],
    }
