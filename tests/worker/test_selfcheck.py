"""What the parts can promise is looked at, not guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from leasehold.cli import doctor
from leasehold.db.database import connect, is_direct
from leasehold.selfcheck import Finding
from leasehold.settings import Settings


def wrong(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.part, finding.found) for finding in findings if not finding.ok]


#: The tests' own server does not wait for its disk, and the self-check says so.
TESTS_SERVER = ("database", "fsync off, synchronous_commit off, full_page_writes off")


async def test_a_sound_installation_has_nothing_wrong_but_what_the_tests_chose(settings: Settings) -> None:
    findings = await doctor.examine(settings)
    assert set(wrong(findings)) <= {TESTS_SERVER}
    found = " ".join(finding.found for finding in findings)
    for said in ("PostgreSQL", "accepts writes", "migrated", "own session", "RabbitMQ", "ignores If-None-Match"):
        assert said in found


async def test_a_read_only_database_is_told(settings: Settings) -> None:
    connection = await connect(settings, "test")
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    await connection.close()
    assert ("database", "read-only") in wrong(await doctor.examine(settings))


async def test_parts_that_are_away_are_findings_and_no_secret_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE_SECONDS", 0.2)
    away: dict[str, Any] = {
        "database_url": SecretStr("postgresql://u:canary@127.0.0.1:1/x"),
        "amqp_url": SecretStr("amqp://u:canary@127.0.0.1:1/"),
        "s3_endpoint": "http://127.0.0.1:1",
        "s3_secret_key": SecretStr("canary"),
    }
    findings = await doctor.examine(settings.model_copy(update=away))
    assert {finding.part for finding in findings if not finding.ok} == {"database", "broker", "store"}
    assert "canary" not in repr(findings)


@asynccontextmanager
async def pooler(url: str) -> AsyncIterator[str]:
    """Passes everything on, but greets with a process id of its own, as poolers do."""
    target = urlsplit(url)
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, greets: bool) -> None:
        while data := await reader.read(65536):
            at = data.find(b"K\x00\x00\x00\x0c")
            if greets and at >= 0:
                data = data[: at + 5] + b"\x00\x00\x00\x01" + data[at + 9 :]
                greets = False
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(target.hostname, target.port)
        for task in (
            asyncio.create_task(pipe(reader, upstream[1], greets=False)),
            asyncio.create_task(pipe(upstream[0], writer, greets=True)),
        ):
            pipes.add(task)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield target._replace(netloc=f"{target.username}:{target.password or ''}@127.0.0.1:{port}").geturl()
        await asyncio.gather(*pipes)


async def test_a_pooler_is_noticed(settings: Settings) -> None:
    async with pooler(settings.database_url.get_secret_value()) as url:
        connection = await connect(settings.model_copy(update={"database_url": SecretStr(url)}), "test")
        assert not await is_direct(connection)
        await connection.close()
    connection = await connect(settings, "test")
    assert await is_direct(connection)
    await connection.close()
