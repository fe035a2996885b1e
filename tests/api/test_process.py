"""The API as a process: light, quiet about secrets, and quick to stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, client_of
from tests.api.driver import finish_all
from tests.api.media_api import PNG, MediaApi, problem

MIB = 1024 * 1024
MAX_RESIDENT = 150 * MIB
_LISTENING = re.compile(r"http://(?:127\.0\.0\.1|\[::\]):(\d+)")


@dataclass
class Process:
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    url: str = field(init=False)
    followed: asyncio.Task[None] = field(init=False)

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    @property
    def resident(self) -> int:
        """Bytes, at their highest."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    async def follow(self, listening: asyncio.Future[str]) -> None:
        """Read the log to its end; a process whose log nobody reads stands still."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            self.lines.append(raw.decode().rstrip())
            found = _LISTENING.search(self.lines[-1])
            if found is not None and not listening.done():
                listening.set_result(f"http://127.0.0.1:{found[1]}")
        if not listening.done():
            listening.set_exception(AssertionError(self.said))

    async def stop(self) -> int:
        """Its exit status, once its last line was read."""
        self.process.send_signal(signal.SIGTERM)
        status = await self.process.wait()
        await self.followed
        return status


@asynccontextmanager
async def running(
    settings: Settings, log_format: str = "json", host: str = "127.0.0.1", **more: str
) -> AsyncIterator[Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    for name in ("database_url", "amqp_url", "s3_endpoint", "s3_bucket", "s3_access_key", "s3_secret_key"):
        value = getattr(settings, name)
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        environment[f"LEASEHOLD_{name.upper()}"] = text
    environment |= {"LEASEHOLD_LOG_FORMAT": log_format, "LEASEHOLD_LOG_LEVEL": "debug"}
    environment |= {"LEASEHOLD_METRICS_PUBLIC": "true", **more}
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "leasehold.api",
        "--host",
        host,
        "--port",
        "0",
        env=environment,
        stderr=asyncio.subprocess.PIPE,
        limit=16 * MIB,
    )
    process = Process(started)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    process.followed = asyncio.create_task(process.follow(listening))
    try:
        process.url = await listening
        yield process
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        await process.followed


async def test_the_api_loads_no_image_or_model_library_and_no_second_way_to_the_database() -> None:
    program = (
        "import leasehold.api.app, sys;"
        "heavy = {'PIL', 'numpy', 'onnx', 'onnxruntime', 'alembic', 'sqlalchemy', 'worker'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0


async def test_an_api_on_all_addresses_answers_over_ipv4_and_ipv6(settings: Settings) -> None:
    async with running(settings, host="::") as process:
        for url in (process.url, process.url.replace("127.0.0.1", "[::1]")):
            async with client_of(url) as client:
                assert (await client.get("/livez")).status_code == 200
        assert await process.stop() == 0


async def test_an_api_that_works_stays_small(settings: Settings, make_key: MakeKey, rows: Connection) -> None:
    async with running(settings) as process, client_of(process.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        for _ in range(10):
            ticket = await media_api.submitted()
            await finish_all(rows, ticket.media_id)
            assert (await media_api.look(ticket)).json()["status"] == "READY"
        assert process.resident < MAX_RESIDENT


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_no_secret_reaches_a_log_or_an_error(
    settings: Settings, make_key: MakeKey, rows: Connection, log_format: str
) -> None:
    """Also when requests fail in ways that nobody foresaw."""
    key = await make_key()
    stranger = f"lh_{'a' * 12}_{'B' * 43}"
    answers = []
    async with running(settings, log_format) as process:
        async with client_of(process.url, key.text) as client, client_of(process.url, stranger) as nobody:
            media_api = MediaApi(client)
            ticket = await media_api.submitted()
            refused = await media_api.upload(PNG)
            answers += [await media_api.complete(refused), await MediaApi(nobody).ask()]
            answers += [await client.get(f"/media/{ticket.media_id}?token=query-canary")]
            await rows.execute("DROP TABLE idempotency")
            answers += [await client.post("/upload-url", json=BODY, headers={"Idempotency-Key": "key-canary"})]
            problem(answers[-1], 500, "internal_error")
            await rows.execute("DROP TABLE failure CASCADE")
            answers += [await media_api.look(ticket)]
            problem(answers[-1], 500, "internal_error")
        assert await process.stop() == 0
    everything = process.said + "".join(answer.text for answer in answers)
    signature = parse_qs(urlsplit(ticket.upload_url).query)["X-Amz-Signature"][0]
    secrets = {
        "the API key": key.text.removeprefix(f"lh_{key.prefix}_"),
        "a stranger's key": "B" * 43,
        "the upload URL's signature": signature,
        "the store's secret": settings.s3_secret_key.get_secret_value(),
        "the database's URL": settings.database_url.get_secret_value(),
        "the broker's URL": settings.amqp_url.get_secret_value(),
        "a query": "query-canary",
        "a header": "key-canary",
        "a body": "body-canary",
    }
    assert [name for name, secret in secrets.items() if secret in everything] == []
    assert "UndefinedTable" in process.said  # that was told, so the rest could have been


BODY = {"content_type": "image/jpeg", "file_name": "body-canary.jpg"}


async def test_every_line_of_a_request_has_its_id(settings: Settings, make_key: MakeKey) -> None:
    async with running(settings) as process:
        async with client_of(process.url, (await make_key()).text) as client:
            await client.post("/upload-url", json=BODY, headers={"X-Request-Id": "my-request"})
        await process.stop()
    mine = [line for line in process.lines if "my-request" in line]
    assert [("upload registered" in line, '"tenant_id":"acme"' in line) for line in mine] == [
        (True, True),
        (False, True),
    ]


async def test_a_process_that_is_told_to_stop_lets_long_polls_and_streams_go(
    settings: Settings, make_key: MakeKey
) -> None:
    async with running(settings) as process, client_of(process.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.submitted()
        async with client.stream("GET", f"/media/{ticket.media_id}/events") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "event: submitted"
            poll = asyncio.create_task(media_api.look(ticket, params={"wait": 30}))
            while "leasehold_http_requests_in_flight 3.0" not in (await client.get("/metrics")).text:
                assert not poll.done()
            ended = asyncio.create_task(process.stop())
            assert (await poll).status_code == 200
            async for _ in lines:
                pass
        assert await ended == 0
