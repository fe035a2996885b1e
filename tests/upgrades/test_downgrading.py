"""What a downgrade of the schema keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import orjson
from alembic import command

from leasehold.broker import outbox
from leasehold.db.database import migrate
from leasehold.db.upgrading.rendering import config_of
from leasehold.transitions import settlements
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import Rows
from tests.support.databases import Databases


async def test_the_hints_of_a_batch_are_in_the_outbox_that_the_release_before_relays(postgres: Databases) -> None:
    url = await postgres.create_database()
    await migrate(url, "0046_hints_together")
    connection = await asyncpg.connect(url)
    try:
        await connection.set_type_codec(
            "jsonb", encoder=_encoded, decoder=orjson.loads, schema="pg_catalog", format="text"
        )
        submitted = {one.hint.task_id: one.hint for one in await Rows(connection).submit(count=2, tenant="acme")}
        await asyncio.to_thread(_downgrade, url, "0045_room_for_claims")
        await connection.execute("UPDATE outbox SET relay_at = clock_timestamp()")
        assert {one.hint.task_id: one.hint for one in await outbox.take(connection, 10)} == submitted
    finally:
        await connection.close()
        await postgres.drop_database(url)


async def test_every_event_is_in_the_history_before_and_after_a_release_that_derives_none(postgres: Databases) -> None:
    url = await postgres.create_database()
    await migrate(url)
    try:
        async with connected(url) as rows:
            done, failed, running, old = [await rows.leased() for _ in range(4)]
            await rows.connection.execute(
                "UPDATE task SET started_at = started_at - interval '2 days' WHERE id = $1", old.lease.task_id
            )
            await settlements.complete(rows.connection, [Completion(done.lease, is_last=True)])
            for lease in (failed.lease, old.lease):
                await settlements.fail(rows.connection, [Failure(lease, "error", "x", "", False, 0.0)])
            await rows.submit(count=2)
            before = await rows.connection.fetch(_HISTORY)
        assert len({row["job_id"] for row in before}) == 6
        for revision in ("0046_hints_together", "0043_single_tasks"):
            await asyncio.to_thread(_downgrade, url, revision)
            async with connected(url) as rows:
                assert await rows.connection.fetch(_HISTORY) == before, revision
        await migrate(url)
        async with connected(url) as rows:
            assert await rows.connection.fetch(_HISTORY) == before
            await settlements.fail(rows.connection, [Failure(running.lease, "error", "x", "", True, 0.0)])
            kinds = [event["kind"] for event in await rows.events(running.job_id)]
            assert kinds == ["submitted", "claimed", "retried"]
    finally:
        await postgres.drop_database(url)


_HISTORY = "SELECT * FROM history ORDER BY job_id, seq"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Rows]:
    connection = await asyncpg.connect(url)
    await connection.set_type_codec("jsonb", encoder=_encoded, decoder=orjson.loads, schema="pg_catalog", format="text")
    yield Rows(connection)
    await connection.close()


def _encoded(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _downgrade(url: str, revision: str) -> None:
    config = config_of(None)
    config.attributes["url"] = url
    command.downgrade(config, revision)
