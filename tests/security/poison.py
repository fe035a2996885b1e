"""Rows that break the statement that touches them, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from leasehold.db.database import Connection

SECONDS = 60.0


async def poison(rows: Connection, table: str, condition: str, *, on: str = "UPDATE OR DELETE") -> None:
    """From now on a statement of the kind `on` fails that touches a row of `table` for which `condition` is true."""
    row = "NEW" if on == "INSERT" else "OLD"
    await rows.execute(
        "CREATE OR REPLACE FUNCTION poisoned() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'this row is poison'; END $$"
    )
    await rows.execute(
        f"CREATE TRIGGER poison BEFORE {on} ON {table} FOR EACH ROW WHEN ({condition.format(row=row)})"
        " EXECUTE FUNCTION poisoned()"
    )


async def heal(rows: Connection, table: str) -> None:
    await rows.execute(f"DROP TRIGGER poison ON {table}")


async def set_aside(rows: Connection, duty: str) -> dict[str, Any]:
    """What is in quarantine of the duty: unit -> its failures."""
    found = await rows.fetch("SELECT unit, failures FROM quarantine WHERE duty = $1", duty)
    return {row["unit"]: row["failures"] for row in found}


async def until(true: Callable[[], Awaitable[Any]], seconds: float = SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        while not (found := await true()):
            await asyncio.sleep(0.02)
    return found
