from __future__ import annotations

import struct

import asyncpg

from chaos.postgres_tap import PostgresTap, Session
from leasehold.domain.ids import new_id
from leasehold.transitions import workers
from tests.support.databases import Databases


def test_a_connection_tells_who_it_is_after_it_asked_for_encryption() -> None:
    ended: list[Session] = []
    tap = PostgresTap("worker-0.0", ended.append)
    words = b"user\0x\0application_name\0leasehold heartbeat\0\0"
    for byte in struct.pack(">II", 8, 80877103) + struct.pack(">II", 8 + len(words), 196608) + words:
        tap.request(bytes([byte]))
    assert tap.label == "leasehold heartbeat"
    tap.closed()
    assert [(one.process, one.label, one.present) for one in ended] == [("worker-0.0", "leasehold heartbeat", False)]


async def test_a_worker_that_appears_is_heard_to_be_present(database_url: str, postgres: Databases) -> None:
    from urllib.parse import urlsplit  # noqa: PLC0415 - only here

    from chaos.proxy import Link  # noqa: PLC0415 - as above

    ended: list[Session] = []
    there = urlsplit(database_url)
    link = Link((there.hostname or "", there.port or 0), lambda: PostgresTap("w", ended.append))
    await link.open()
    through = database_url.replace(f":{there.port}/", f":{link.port}/")
    connection = await asyncpg.connect(through)
    worker = new_id()
    key = await workers.register(connection, worker, host="h", pid=1, version="0", queues=[])
    assert await workers.appear(connection, worker, key)
    await connection.close()
    await link.close()
    assert [one.present for one in ended] == [True]
