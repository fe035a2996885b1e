"""What the API depends on goes away: it says so, stays up, and comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr

from leasehold.api.auth.security import OPERATE
from leasehold.api.fleet import health
from leasehold.db.database import Connection
from leasehold.security.other_cells import ask
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, client_of, serving
from tests.api.media_api import MediaApi, problem
from tests.api.proxy import Proxy, proxy_to
from tests.support.databases import Databases

pytestmark = pytest.mark.usefixtures("patient_readiness")  # what is away here refuses at once


@pytest.fixture
async def to_database(database_url: str) -> AsyncIterator[Proxy]:
    at = urlsplit(database_url)
    assert at.hostname is not None
    async with proxy_to(at.hostname, at.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(settings: Settings, database_url: str, to_database: Proxy) -> Settings:
    at = urlsplit(database_url)
    user = f"{at.username}:{at.password}@" if at.password else f"{at.username}@"
    url = at._replace(netloc=f"{user}127.0.0.1:{to_database.port}").geturl()
    return settings.model_copy(update={"database_url": SecretStr(url), "database_timeout": 20.0})


async def test_while_the_database_is_away_requests_are_told_to_come_back(
    through_proxy: Settings, to_database: Proxy, make_key: MakeKey
) -> None:
    async with serving(through_proxy) as api, client_of(api.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.submitted()
        errors = server_errors()
        await to_database.cut()
        for answer in (await media_api.ask(), await media_api.complete(ticket), await media_api.look(ticket)):
            problem(answer, 503, "database_unavailable")
            assert answer.headers["retry-after"] == "2"
        assert (await client.get("/readyz")).status_code == 503  # which is no error: no client asked
        assert (await client.get("/livez")).status_code == 200
        await to_database.open()
        assert (await media_api.look(ticket)).status_code == 200
        await media_api.submitted()
        assert server_errors() == errors + 3


def server_errors() -> float:
    """The counter of the alerts about answers of 5xx."""
    value = REGISTRY.get_sample_value("leasehold_http_server_errors_total")
    assert value is not None, "it exists before the first error"
    return value


async def test_a_database_that_was_away_and_is_back_costs_no_request(
    through_proxy: Settings, to_database: Proxy, make_key: MakeKey
) -> None:
    async with serving(through_proxy) as api, client_of(api.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.submitted()
        assert (await media_api.look(ticket)).status_code == 200
        await to_database.cut()
        await to_database.open()
        assert (await media_api.look(ticket)).status_code == 200
        await media_api.submitted()


async def test_the_api_starts_without_its_database_and_is_not_ready(
    through_proxy: Settings, to_database: Proxy, make_key: MakeKey
) -> None:
    key = await make_key()
    await to_database.cut()
    async with serving(through_proxy) as api, client_of(api.url, key.text) as client:
        assert (await client.get("/livez")).status_code == 200
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["database"] == {"ok": False, "required": True, "detail": "does not answer"}
        problem(await MediaApi(client).ask(), 503, "database_unavailable")
        await to_database.open()
        await MediaApi(client).submitted()


async def test_a_demoted_database_is_not_ready_but_still_reads(
    settings: Settings, make_key: MakeKey, rows: Connection, postgres: Databases
) -> None:
    name = await rows.fetchval("SELECT current_database()")
    key = await make_key()
    await rows.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    async with serving(settings) as api, client_of(api.url, key.text) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["database"]["ok"] is False
        problem(await MediaApi(client).ask(), 503, "database_unavailable")
        assert (await client.get("/media/01975c1e-7d3a-7c55-9a3e-1f7f6f2f9b10")).status_code == 404


async def test_a_database_that_was_not_migrated_is_not_ready(settings: Settings, rows: Connection) -> None:
    await rows.execute("UPDATE alembic_version SET version_num = '0000'")
    async with serving(settings) as api, client_of(api.url) as client:
        # A revision we do not know is a newer release's: it does not put the older one out of service.
        assert (await client.get("/readyz")).status_code == 200
    await rows.execute("DELETE FROM alembic_version")
    async with serving(settings) as api, client_of(api.url) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["migrations"]["ok"] is False


async def test_a_healthy_api_is_ready_and_can_say_what_it_checked(settings: Settings, make_key: MakeKey) -> None:
    async with serving(settings) as api, client_of(api.url, (await make_key(scopes=(OPERATE,))).text) as client:
        assert (await client.get("/livez")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"status": "ok"}
        checks = (await client.get("/readyz?verbose")).json()["checks"]
        assert set(checks) == {"serving", "database", "migrations", "broker", "store"}
        assert all(checks[name]["ok"] for name in ("serving", "database", "migrations", "store"))


async def test_several_processes_are_ready_at_one_database_again_and_again(
    settings: Settings, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check writes the same row."""
    monkeypatch.setattr(health, "_SHARED_SECONDS", -1.0)  # each request checks anew
    written = []
    async with (
        serving(settings) as one,
        serving(settings) as other,
        client_of(one.url) as first,
        client_of(other.url) as second,
    ):
        for client in (first, second, second, first):
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            written += await rows.fetch("SELECT owner, until FROM leadership WHERE role = 'readiness'")
    owners = [row["owner"] for row in written]
    assert owners == [owners[0], owners[1], owners[1], owners[0]]
    assert len(set(owners)) == 2
    assert len({row["until"] for row in written}) == 4, "each check has written"


async def test_a_draining_api_is_not_ready(settings: Settings) -> None:
    async with serving(settings) as api, client_of(api.url) as client:
        api.services.drain()
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["serving"]["ok"] is False


async def test_neither_broker_nor_store_decides_readiness(
    settings: Settings, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_TIMEOUT_SECONDS", 5.0)  # the check of the store waits it out
    alone = settings.model_copy(
        update={"amqp_url": SecretStr("amqp://guest:guest@127.0.0.1:1/"), "s3_endpoint": "http://127.0.0.1:1"}
    )
    async with serving(alone) as api, client_of(api.url, (await make_key(scopes=(OPERATE,))).text) as client:
        answer = await client.get("/readyz?verbose")
        assert answer.status_code == 200
        checks = answer.json()["checks"]
        assert [checks[name]["ok"] for name in ("broker", "store")] == [False, False]
        assert [checks[name]["required"] for name in ("broker", "store")] == [False, False]


@dataclass
class Silent:
    """A server that accepts every connection, and never answers."""

    url: str
    asked: asyncio.Event


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    asked, may_end = asyncio.Event(), asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await may_end.wait()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield Silent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked)
    may_end.set()
    server.close()


async def test_no_answer_about_readiness_waits_for_a_silent_store(
    settings: Settings, make_key: MakeKey, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its callers do not wait for long: another cell would show this one as silent, and compose.yaml as unhealthy."""
    monkeypatch.setattr(health, "_TIMEOUT_SECONDS", 1000.0)  # the check of the store ends with the process
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 1000.0)
    alone = settings.model_copy(update={"s3_endpoint": silent.url})
    async with serving(alone) as api, client_of(api.url, (await make_key(scopes=(OPERATE,))).text) as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await ask(client, "b", api.url, None, seconds=30)).state == "ready"
        await silent.asked.wait()  # the check runs nevertheless: it records the outage
        monkeypatch.setattr(health, "_PATIENCE_SECONDS", 0.1)
        api.services.drain()
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        checks = answer.json()["checks"]
        assert checks["store"] == {"ok": False, "required": False, "detail": "no answer within 0.1 s"}
        assert checks["serving"]["ok"] is False
        assert checks["database"]["ok"] is True
        assert "no answer" not in checks["broker"]["detail"]
    assert not [task for task in asyncio.all_tasks() if "_run_check" in repr(task)]


async def test_while_the_store_is_away_uploads_are_not_taken_in_nor_refused(
    settings: Settings, make_key: MakeKey, rows: Connection
) -> None:
    alone = settings.model_copy(update={"s3_endpoint": "http://127.0.0.1:1"})
    async with serving(alone) as api, client_of(api.url, (await make_key()).text) as client:
        media_api = MediaApi(client)
        ticket = await media_api.ticket()
        answer = await media_api.complete(ticket)
        problem(answer, 503, "store_unavailable")
        assert answer.headers["retry-after"] == "2"
        assert (await media_api.look(ticket)).json()["status"] == "INIT"


async def test_the_verbose_readiness_says_what_the_parts_promise_and_no_secret(
    settings: Settings, make_key: MakeKey
) -> None:
    async with serving(settings) as api, client_of(api.url, (await make_key(scopes=(OPERATE,))).text) as client:
        answer = await client.get("/readyz?verbose")
    said = answer.json()
    assert {finding["part"] for finding in said["findings"]} >= {"database", "presence", "broker", "store"}
    assert all(finding["meaning"] for finding in said["findings"])
    for secret in (settings.database_url, settings.amqp_url, settings.s3_secret_key):
        assert secret.get_secret_value() not in answer.text
