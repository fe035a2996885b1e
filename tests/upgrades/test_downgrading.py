"""What a downgrade of the schema keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import orjson
from alembic import command

from leasehold.broker import outbox
from leasehold.db.database import migrate
from leasehold.db.upgrading.rendering import config_of
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


def _encoded(value: Any) -> str:
    return orjson.dumps(value).decode()


def _downgrade(url: str, revision: str) -> None:
    config = config_of(None)
    config.attributes["url"] = url
    command.downgrade(config, revision)
