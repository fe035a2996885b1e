"""No silent server takes connections, slots or time from anybody: what a process may hold is a sum, and it is kept."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr, ValidationError

from leasehold.api.process import services
from leasehold.api.process.tenant_pool import set_tenant
from leasehold.db.database import Connection, make_pool
from leasehold.db.pool_sizes import pool_of_api
from leasehold.domain.ids import new_id
from leasehold.pipelines.webhooks.limits import DeliveryLimits
from leasehold.runtime.holding import ConnectionHeld
from leasehold.security.credentials import create_key
from leasehold.security.egress import Egress, EgressFailed
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.worker.worker import Worker
from tests.api.conftest import MakeKey, client_of, serving
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client, runs_settings

__all__ = ["runs_settings"]

ROOT = Path(__file__).parents[2]
#: Runs of the hostile tenant, each of which makes a delivery to a receiver that does not answer.
FLOOD = 120


@dataclass
class Receiver:
    """A real server. `answers`: it does at once; else it accepts, reads, and sends a header, a byte a tick, without
    end.
    """

    answers: bool = False
    tick: float = 0.05
    url: str = ""
    open: int = 0
    at_most: int = 0
    heard: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.at_most = max(self.at_most, self.open)
        try:
            self.heard.append(await reader.readuntil(b"\r\n\r\n"))
            if self.answers:
                writer.write(b"HTTP/1.1 204 X\r\n\r\n")
                await writer.drain()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nx-endless: ")
            while not writer.is_closing():
                writer.write(b".")
                await writer.drain()
                await asyncio.sleep(self.tick)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the caller has left
        finally:
            self.open -= 1
            writer.close()


async def _serve(receiver: Receiver) -> AsyncIterator[Receiver]:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


@pytest.fixture
async def tarpit() -> AsyncIterator[Receiver]:
    async for receiver in _serve(Receiver()):
        yield receiver


@pytest.fixture
async def honest() -> AsyncIterator[Receiver]:
    async for receiver in _serve(Receiver(answers=True)):
        yield receiver


@pytest.fixture
def guarded(runs_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    # A hundred requests at once take long on a busy machine, and each must be answered.
    monkeypatch.setattr("leasehold.api.process.services._PATIENCE_SECONDS", 60.0)
    return runs_settings.model_copy(
        update={
            "egress_allow": "127.0.0.0/8",
            "database_timeout": 60.0,
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "pipelines": "tests.runs.work:pipelines_and_webhooks",
            "worker_concurrency": 2,
            "worker_reserve": 0,  # so that one slot too many of the hostile tenant would show
            "webhook_per_host": 64,  # both receivers are on one host
            "webhook_seconds": 50.0,  # a tarpit keeps its callers for longer than the tests wait
        }
    )


class Sessions:
    """The most sessions that each kind of process had at once, by the names that they give themselves."""

    def __init__(self, rows: Connection) -> None:
        self._rows = rows
        self.at_most: Counter[str] = Counter()

    async def watch(self) -> None:
        while True:
            found = await self._rows.fetch(
                "SELECT application_name LIKE 'leasehold api%' AS api, count(*) FROM pg_stat_activity"
                " WHERE application_name LIKE 'leasehold %' AND application_name <> 'leasehold test'"
                " AND datname = current_database() GROUP BY 1"
            )
            for row in found:
                kind = "api" if row["api"] else "worker"
                self.at_most[kind] = max(self.at_most[kind], row["count"])
            await asyncio.sleep(0.02)


async def test_a_receiver_that_trickles_without_end_takes_no_connections_and_nobodys_slots(
    guarded: Settings, rows: Connection, tarpit: Receiver, honest: Receiver
) -> None:
    sessions = Sessions(rows)
    bad = await create_key(rows, tenant_id="hostile", client_id="tests", scopes=SCOPES)
    good = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with (
        serving(guarded) as running,
        client_of(running.url, bad.text) as hostile_http,
        client_of(running.url, good.text) as honest_http,
        Worker(guarded),
    ):
        watching = asyncio.create_task(sessions.watch())
        hostile, acme = Client(hostile_http), Client(honest_http)
        assert (await hostile.post("/v1/webhooks", url=tarpit.url)).status_code == 201
        assert (await acme.post("/v1/webhooks", url=honest.url)).status_code == 201
        await asyncio.gather(*(hostile.start() for _ in range(FLOOD)))
        async with asyncio.timeout(60):
            while tarpit.open < guarded.webhook_per_tenant:
                await asyncio.sleep(0.02)
        for _ in range(5):
            await acme.until(await acme.start(), "succeeded")
        async with asyncio.timeout(40):  # the tarpit's own limit is 50 s: these did not wait for it
            while len(honest.heard) < 5:
                await asyncio.sleep(0.02)
        watching.cancel()
    assert tarpit.at_most <= guarded.webhook_per_tenant
    assert sessions.at_most["worker"] <= guarded.database_pool_size
    assert sessions.at_most["api"] <= guarded.database_pool_size


async def test_a_receiver_that_trickles_is_left_at_the_total_time_limit_and_the_slot_is_free_again(
    guarded: Settings, rows: Connection, tarpit: Receiver
) -> None:
    key = await create_key(rows, tenant_id="hostile", client_id="tests", scopes=SCOPES)
    short = guarded.model_copy(update={"webhook_seconds": 0.5})
    async with serving(short) as running, client_of(running.url, key.text) as http, Worker(short):
        client = Client(http)
        assert (await client.post("/v1/webhooks", url=tarpit.url)).status_code == 201
        await client.start()
        async with asyncio.timeout(60):
            while await rows.fetchval("SELECT code FROM failure LIMIT 1") != "webhook_unreachable":
                await asyncio.sleep(0.02)
            while tarpit.open:
                await asyncio.sleep(0.02)


async def test_a_delivery_over_its_bound_gives_its_lease_back_and_loses_no_attempt(
    guarded: Settings, rows: Connection, tarpit: Receiver
) -> None:
    key = await create_key(rows, tenant_id="hostile", client_id="tests", scopes=SCOPES)
    one = guarded.model_copy(update={"webhook_per_tenant": 1})
    async with serving(one) as running, client_of(running.url, key.text) as http, Worker(one):
        client = Client(http)
        assert (await client.post("/v1/webhooks", url=tarpit.url)).status_code == 201
        for _ in range(4):
            await client.start()
        snoozing = "SELECT count(*) FROM task WHERE step = 'deliver' AND status = 'waiting'"
        async with asyncio.timeout(40):
            while await rows.fetchval(snoozing) < 3:
                await asyncio.sleep(0.02)
        assert await rows.fetchval("SELECT max(errors + crashes + losses) FROM task WHERE step = 'deliver'") == 0
    assert tarpit.at_most == 1


def test_turns_count_by_tenant_and_by_host_and_are_given_back() -> None:
    limits = DeliveryLimits(per_tenant=2, per_host=3)
    with limits.try_acquire(tenant="a", host="x") as first, limits.try_acquire(tenant="a", host="x") as second:
        assert (first, second) == (True, True)
        with limits.try_acquire(tenant="a", host="y") as third:
            assert not third
        with limits.try_acquire(tenant="b", host="x") as fourth, limits.try_acquire(tenant="c", host="x") as fifth:
            assert (fourth, fifth) == (True, False)
    with limits.try_acquire(tenant="a", host="x") as again:
        assert again


async def test_an_api_has_no_more_connections_than_its_sum_however_many_ask(
    guarded: Settings, rows: Connection
) -> None:
    sessions = Sessions(rows)
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(guarded) as running, client_of(running.url, key.text) as http:
        watching = asyncio.create_task(sessions.watch())
        client = Client(http)
        runs = await asyncio.gather(*(client.start() for _ in range(40)))
        await asyncio.gather(
            *(http.get("/readyz", params={"verbose": ""}) for _ in range(20)),
            *(client.look(run, wait=1) for run in runs),
            *(http.get("/v1/runs") for _ in range(40)),
        )
        async with asyncio.timeout(60):  # the pool keeps what it has opened
            while sessions.at_most["api"] <= 1:
                await asyncio.sleep(0.02)
        watching.cancel()
    assert sessions.at_most["api"] <= guarded.database_pool_size


async def test_a_tenant_whose_requests_hold_all_its_connections_leaves_the_last_to_others(
    settings: Settings, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_PATIENCE_SECONDS", 0.05)
    keys = await make_key("acme"), await make_key("rival")
    path = f"/media/{new_id()}"
    async with (
        serving(settings) as api, client_of(api.url, keys[0].text) as acme, client_of(api.url, keys[1].text) as rival
    ):  # fmt: skip
        async with AsyncExitStack() as lent:
            set_tenant("acme")
            for _ in range(pool_of_api(settings) - 1):
                await lent.enter_async_context(api.services.pool.acquire())
            problem(await acme.get(path), 503, "busy")
            assert (await rival.get(path)).status_code == 404
        assert (await acme.get(path)).status_code == 404


def test_a_process_with_too_few_connections_for_its_parts_is_refused(settings: Settings) -> None:
    with pytest.raises(ValidationError, match="database_pool_size"):
        Settings(_env_file=None, **settings.model_dump(include={"database_url"}), database_pool_size=11)


async def test_outbound_io_with_a_connection_in_hand_is_an_error(settings: Settings) -> None:
    store = ObjectStore.from_settings(settings)
    await store.open()
    async with make_pool(settings, "test", 1) as pool, Egress() as egress:
        async with pool.acquire():
            with pytest.raises(ConnectionHeld):
                await egress.request("GET", "http://127.0.0.1:9/")
            with pytest.raises(ConnectionHeld):
                await egress.check("http://127.0.0.1:9/")
            with pytest.raises(ConnectionHeld):
                await store.head("x")
            with pytest.raises(ConnectionHeld):
                await asyncio.create_task(store.head("x"))  # nor by a task that was started meanwhile
        assert await store.head("x") is None  # it was given back
    await store.close()


async def test_a_connection_that_was_given_back_is_in_nobodys_hands(settings: Settings) -> None:
    allowed = settings.model_copy(update={"egress_allow": "127.0.0.0/8"})
    async with make_pool(settings, "test", 1) as pool, Egress.from_settings(allowed) as egress:
        for _ in range(3):
            async with pool.acquire() as connection:
                await connection.execute("SELECT 1")
        with pytest.raises(EgressFailed):  # nobody listens there
            await egress.request("GET", "http://127.0.0.1:9/")


#: Who may open a connection to PostgreSQL. All of them are in the sum of leasehold/db/pool_sizes.py.
OPENERS = {
    "api/process/services.py": 1,
    "api/process/submissions.py": 1,
    "leasehold/app/link.py": 1,  # the pool of a program with an App
    "leasehold/broker/postgres.py": 1,  # for two sessions
    "leasehold/db/database.py": 4,
    "leasehold/db/poolers.py": 4,  # before a process opens any other, and closed again
    "leasehold/db/replica.py": 1,  # to another server, and counted apart
    "leasehold/db/servers.py": 2,  # for database.py
    "leasehold/db/upgrading/patience.py": 1,  # of `leasehold migrate`, which is no part of a process that serves
    "leasehold/pipelines/operations/context.py": 1,
    "worker/attempts/chunk_writer.py": 1,  # for logs and for streams
    "worker/attempts/journals.py": 1,
    "worker/leases/claim_batcher.py": 1,
    "worker/leases/heartbeat.py": 1,
    "worker/leases/settlement_batcher.py": 1,
    "worker/parts.py": 1,
}
_OPENS = {"connect", "connected", "create_pool", "make_pool", "create_async_engine", "open_connection"}


def _opened_in(path: Path) -> int:
    """How often the file calls what opens a connection, or hands it on."""
    calls = 0
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _OPENS:
                calls += 1
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncpg"), attr=name)) if name in _OPENS:
                calls += 1
            case ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id=name), *_]) if name in _OPENS:
                calls += 1
    return calls


def test_nothing_opens_a_connection_but_what_the_sum_counts() -> None:
    folders = ("leasehold", "api", "worker")
    found = {
        str(path.relative_to(ROOT)): calls
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not {"cli", "embedded", "testing"} & set(path.parts)  # commands, servers of one machine, tests of apps
        if (calls := _opened_in(path))
    }
    assert found == OPENERS
