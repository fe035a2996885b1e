"""Lists are read from a standby: how old they are is shown, and a standby that fails is left for the primary."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Any
from uuid import uuid4

import asyncpg
import httpx2
import pytest
from cryptography.fernet import Fernet
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from pydantic import SecretStr

from chaos.replicas import copy
from leasehold.api.app import make_app
from leasehold.api.auth.security import JOBS_READ, OPERATE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.may_read_standby import LAG_HEADER, is_marked, may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.replica_reads import Reading
from leasehold.api.process.services import services_of
from leasehold.db.database import Connection, connected
from leasehold.db.replica import EXPORTER, REQUESTS, Replica, ReplicaBusy, ReplicaUnusable, open_replica
from leasehold.embedded.postgres import Postgres
from leasehold.exporter.exporter import Exporter
from leasehold.limits import rates
from leasehold.pipelines import SHIPPED
from leasehold.security.credentials import create_key
from leasehold.security.roles import roles_of
from leasehold.settings import Settings
from leasehold.transitions import jobs
from tests.api.conftest import Running, client_of, serving
from tests.api.proxy import proxy_to
from tests.factories import ONE
from tests.failover.cluster import SECONDS, Cluster, cluster_in

SCOPES = sorted({OPERATE}.union(*roles_of(SHIPPED).values()))
#: A standby may be so far behind here, in seconds: a busy machine may keep its processes standing still.
MAX_LAG = 60.0
#: For what a test waits out, one after another: on a busy machine the first may be over before the test has looked.
LIMITS = (2.0, 8.0, 30.0)
NO_ID = "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


@pytest.fixture(scope="module")
async def cluster(run_directory: Path) -> AsyncIterator[Cluster]:
    async with cluster_in(run_directory / "replicated", "asynchronous") as cluster:
        yield cluster


@pytest.fixture
async def rows(cluster: Cluster) -> AsyncIterator[Connection]:
    async with connected(settings_of(cluster), "test") as connection:
        yield connection


def settings_of(cluster: Cluster, **more: Any) -> Settings:
    given: dict[str, Any] = {
        "database_url": SecretStr(cluster.primary.url),
        "database_replica_url": SecretStr(cluster.standby.url),
        "database_replica_max_lag": MAX_LAG,
        "database_timeout": 60.0,
        "database_host_timeout": 30.0,
        "broker": "postgres",
        "object_store": "none",
        "sealing_keys": SecretStr(Fernet.generate_key().decode()),
    }
    return Settings(_env_file=None, **given | more)


@asynccontextmanager
async def listing(
    cluster: Cluster, rows: Connection, *routers: APIRouter, **more: Any
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """An API whose standby serves, and a client that may read everything."""
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(settings_of(cluster, **more), *routers) as running, client_of(running.url, key.text) as http:
        await until_serving(running)
        yield running, http


def replica_of(running: Running) -> Replica:
    assert running.services.replica_reads is not None
    return running.services.replica_reads.replica


async def until_serving(running: Running, *, serves: bool = True) -> None:
    async with asyncio.timeout(SECONDS):
        while replica_of(running).serves is not serves:
            await asyncio.sleep(0.02)


async def job(rows: Connection) -> str:
    new = jobs.NewJob(ONE, "acme")
    await jobs.submit(rows, [new])
    return str(new.id)


async def listed(http: httpx2.AsyncClient, **headers: str) -> tuple[set[str], float | None]:
    """The jobs of the list, and how old the answer says that they are."""
    answer = await http.get("/v1/jobs", params={"limit": 100}, headers=headers)
    assert answer.status_code == 200, answer.text
    lag = answer.headers.get(LAG_HEADER)
    return {row["id"] for row in answer.json()["jobs"]}, None if lag is None else float(lag)


def reads(server: str, part: str = REQUESTS) -> float:
    return REGISTRY.get_sample_value("leasehold_replica_reads_total", {"part": part, "server": server}) or 0.0


@asynccontextmanager
async def paused(server: Postgres) -> AsyncIterator[None]:
    """For a block, the standby replays nothing."""
    connection = await asyncpg.connect(server.url)
    await connection.execute("SELECT pg_wal_replay_pause()")
    async with asyncio.timeout(SECONDS):
        while await connection.fetchval("SELECT pg_get_wal_replay_pause_state()") != "paused":
            await asyncio.sleep(0.02)
    try:
        yield
    finally:
        await connection.execute("SELECT pg_wal_replay_resume()")
        await connection.close()


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        with suppress(ProcessLookupError):  # a session may have ended
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def processes_of(server: Postgres) -> list[int]:
    """Those that answer: the sessions of this test's API, and what makes new ones."""
    connection = await asyncpg.connect(server.url)
    found = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'leasehold %'")
    await connection.close()
    postmaster = (server.directory / "data/postmaster.pid").read_text().splitlines()[0]
    return [int(postmaster), *(row["pid"] for row in found)]


async def test_a_list_is_read_from_the_standby_and_a_job_by_its_id_from_the_primary(
    cluster: Cluster, rows: Connection
) -> None:
    async with listing(cluster, rows) as (_, http), paused(cluster.standby):
        new = await job(rows)
        stale, lag = await listed(http)
        assert new not in stale
        assert lag is not None
        assert 0 <= lag <= MAX_LAG + 0.1
        answer = await http.get(f"/v1/jobs/{new}")
        assert answer.status_code == 200
        assert LAG_HEADER not in answer.headers
        for several in (["no-cache"], ["max-age=0, No-Cache"], ["no-transform", "NO-CACHE"]):
            answer = await http.get("/v1/jobs", headers=[("Cache-Control", one) for one in several])
            assert new in {one["id"] for one in answer.json()["jobs"]}, several
            assert LAG_HEADER not in answer.headers


async def test_the_shown_age_is_never_less_than_the_true_one_and_beyond_the_limit_the_primary_answers(
    cluster: Cluster, rows: Connection
) -> None:
    clock = asyncio.get_running_loop().time
    for limit in LIMITS:
        async with listing(cluster, rows, database_replica_max_lag=limit) as (running, http):
            async with paused(cluster.standby):
                await job(rows)
                new, since = await job(rows), clock()
                ages = []
                async with asyncio.timeout(SECONDS):
                    while True:
                        before = clock()
                        found, lag = await listed(http)
                        if new in found:
                            break
                        assert lag is not None
                        assert lag >= before - since  # the job is older than this, and is not there
                        ages.append(lag - (clock() - before))  # at most this old when the standby was chosen
                assert lag is None
                await until_serving(running, serves=False)
                assert REGISTRY.get_sample_value("leasehold_replica_serves", {"part": REQUESTS}) == 0
            await until_serving(running)
        if ages:
            break
    assert max(ages) <= limit + 0.1
    async with listing(cluster, rows) as (_, http):
        found, lag = await listed(http)
        assert lag is not None
        assert new in found
        assert REGISTRY.get_sample_value("leasehold_replica_serves", {"part": REQUESTS}) == 1


async def test_a_commit_that_does_not_wait_for_the_disk_is_never_missing_from_a_younger_answer(
    cluster: Cluster, rows: Connection
) -> None:
    """Such a commit is visible on the primary before its log is written. Bulk operations and the outbox commit so."""
    primary = await pool_of(cluster)
    async with open_replica(settings_of(cluster), "test", 1, primary) as replica, log_written_late(rows):
        assert replica is not None
        await job(rows)
        await cluster.replicated()
        await replica.note()
        async with asyncio.timeout(SECONDS):
            while True:
                new, since = await job_of_asynchronous_commit(rows), monotonic()
                if await rows.fetchval("SELECT pg_current_wal_insert_lsn() > pg_current_wal_lsn()"):
                    break
                await asyncio.sleep(0.1)
        await replica.note()
        await cluster.replicated()
        async with replica.pool.acquire() as connection:
            as_of = await replica.check(connection)
            assert as_of < since or await connection.fetchval("SELECT true FROM job WHERE id = $1::text::uuid", new)
    primary.terminate()


@asynccontextmanager
async def log_written_late(primary: Connection) -> AsyncIterator[None]:
    """For a block, the primary writes its log only when a commit waits for it."""
    await primary.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    await primary.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        await primary.execute("ALTER SYSTEM RESET wal_writer_delay")
        await primary.execute("SELECT pg_reload_conf()")


async def job_of_asynchronous_commit(rows: Connection) -> str:
    async with rows.transaction():
        await rows.execute("SET LOCAL synchronous_commit TO off")
        return await job(rows)


@pytest.mark.parametrize("where", ["page", "segment", "within"])
async def test_a_primary_whose_log_rests_at_the_head_of_a_page_makes_no_standby_old(
    cluster: Cluster, rows: Connection, where: str
) -> None:
    """The next record goes behind the head. No standby gets there before that record comes, unless an earlier record
    goes on behind the head (`within`).
    """
    primary = await pool_of(cluster)
    settings = settings_of(cluster, database_host_timeout=5.0)
    async with open_replica(settings, "test", 1, primary) as replica, asyncio.timeout(SECONDS):
        assert replica is not None
        while True:
            place = await until_next_record_goes(rows, where)
            await until_replayed(cluster.standby, place if where == "within" else place - place % WAL_PAGE)
            since = monotonic()
            await replica.note()
            async with replica.caught_up(rows) as connection:
                is_young = replica.serves and await replica.check(connection) >= since
            if await next_record(rows) == place:  # nothing else was written meanwhile
                break
        assert is_young
    primary.terminate()


WAL_PAGE = 8192


async def next_record(primary: Connection) -> int:
    """Where the next record of the primary's log goes."""
    place: int = await primary.fetchval("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
    return place


async def until_next_record_goes(primary: Connection, where: str) -> int:
    """Write records until the next one goes behind the head of a page; or of a segment, a file of the log; or `within`
    a page, as far from its begin as behind the head of a segment.
    """
    emit = "SELECT pg_logical_emit_message(false, '', repeat('x', $1))"
    while True:
        before = await next_record(primary)
        await primary.execute(emit, 400)  # long enough that its frame is as large as that of the next
        after = await next_record(primary)
        frame, room = after - before - 400, WAL_PAGE - after % WAL_PAGE
        if where == "segment":
            await primary.execute("SELECT pg_switch_wal()")
        elif room > 1000 and 0 < frame < 100:
            await primary.execute(emit, room - frame + (16 if where == "within" else 0))
        place = await next_record(primary)
        if place % WAL_PAGE == (24 if where == "page" else 40):
            return place


async def test_an_idle_primary_makes_no_standby_old(cluster: Cluster, rows: Connection) -> None:

    async def stays_young(limit: float) -> bool:
        """For longer than the limit."""
        async with listing(cluster, rows, database_replica_max_lag=limit) as (running, http):
            await cluster.replicated()
            until = asyncio.get_running_loop().time() + 1.5 * limit
            while asyncio.get_running_loop().time() < until:
                _, lag = await listed(http)
                if lag is None or lag >= limit:
                    return False
            return replica_of(running).serves

    for limit in LIMITS:
        if await stays_young(limit):
            return
    pytest.fail("an idle primary makes its standby old")


async def test_a_standby_that_dies_is_left_and_found_again(cluster: Cluster, rows: Connection) -> None:
    async with (
        proxy_to("127.0.0.1", cluster.standby.port) as address,
        listing(cluster, rows, database_replica_url=at(cluster, address.port)) as (running, http),
    ):
        _, lag = await listed(http)
        assert lag is not None
        await address.cut()
        new = await job(rows)
        found, lag = await listed(http)
        assert new in found
        assert lag is None
        await until_serving(running, serves=False)
        assert (await http.get("/readyz")).status_code == 200
        report = (await http.get("/readyz?verbose")).json()["checks"]["replica"]
        assert (report["ok"], report["required"]) == (False, False)
        await address.open()
        await until_serving(running)
        found, lag = await listed(http)
        assert lag is not None


def at(cluster: Cluster, port: int) -> SecretStr:
    return SecretStr(cluster.standby.url.replace(f":{cluster.standby.port}/", f":{port}/"))


async def test_a_standby_that_freezes_in_the_middle_costs_no_request_its_answer(
    cluster: Cluster, rows: Connection
) -> None:
    # A request gives half of its time to the standby, and a note twice the time of a host.
    limits = {"database_timeout": 10.0, "database_host_timeout": 1.0}
    async with listing(cluster, rows, **limits) as (running, http):
        await asyncio.gather(*(listed(http) for _ in range(8)))
        repeated = reads("repeated")
        for _ in range(5):  # on a busy machine a note may notice it before the requests come
            with frozen(await processes_of(cluster.standby)):
                answers = await asyncio.gather(*(listed(http) for _ in range(8)))
                assert {lag for _, lag in answers} == {None}
                await until_serving(running, serves=False)
                assert (await listed(http))[1] is None
            await until_serving(running)
            if reads("repeated") > repeated:
                break
        assert reads("repeated") > repeated


async def test_of_several_hosts_the_one_that_only_reads_is_the_replica(cluster: Cluster, rows: Connection) -> None:
    async with listing(cluster, rows, database_replica_url=SecretStr(cluster.url)) as (running, http):
        for _ in range(3):
            assert (await listed(http))[1] is not None
        async with replica_of(running).pool.acquire() as connection:
            assert await connection.fetchval("SELECT pg_is_in_recovery()")


async def test_a_server_that_takes_writes_is_no_replica(cluster: Cluster, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    settings = settings_of(cluster, database_replica_url=SecretStr(cluster.primary.url))
    async with serving(settings) as running, client_of(running.url, key.text) as http:
        async with asyncio.timeout(SECONDS):
            while "takes writes" not in replica_of(running).problem:
                await asyncio.sleep(0.02)
        assert (await listed(http))[1] is None


async def test_the_standby_of_another_primary_is_not_read(cluster: Cluster, run_directory: Path) -> None:
    async with (
        cluster_in(run_directory / "another", "asynchronous") as other,
        open_replica(settings_of(cluster), "test", 1, await pool_of(other)) as replica,
    ):
        assert replica is not None
        await replica.note()
        assert not replica.serves
        assert "another primary" in replica.problem
        async with connected(settings_of(other), "test") as primary:
            with pytest.raises(ReplicaUnusable):
                async with replica.caught_up(primary):
                    pass


async def test_a_standby_with_the_lost_tail_of_the_old_primary_is_not_read(run_directory: Path) -> None:
    """It never comes back by itself: its log and the new primary's are two. Once the new primary's log is longer, their
    lengths no longer say so.
    """
    async with cluster_in(run_directory / "tailed", "asynchronous") as cluster:
        left = Postgres(run_directory / "tailed-left", durable=True)
        try:
            await cluster.cut_replication()
            await copy(cluster.primary, left)
            await left.start()
            async with connected(settings_of(cluster), "test") as primary:
                await job(primary)
            await until_equal(cluster.primary, left)
            await cluster.fail_over()
            after = Cluster(cluster.standby, left)
            pool = await pool_of(after)
            async with (
                open_replica(settings_of(after, database_replica_max_lag=600.0), "test", 1, pool) as replica,
                connected(settings_of(after), "test") as primary,
            ):
                assert replica is not None
                await replica.note()
                assert "another primary" in replica.problem
                tail = await replayed(left)
                while await primary.fetchval("SELECT pg_current_wal_lsn() - '0/0'") <= tail:
                    await job(primary)
                await replica.note()
                assert "another primary" in replica.problem
                with pytest.raises(ReplicaUnusable, match="this primary"):
                    async with replica.caught_up(primary):
                        pass
            pool.terminate()
        finally:
            await left.kill()
            await left.forget()
            shutil.rmtree(left.directory, ignore_errors=True)


async def test_a_standby_of_the_promoted_one_serves_again(run_directory: Path) -> None:
    async with cluster_in(run_directory / "promoted", "asynchronous") as cluster:
        await cluster.fail_over()
        behind = Postgres(run_directory / "promoted-behind", durable=True)
        try:
            await copy(cluster.standby, behind)
            await behind.start()
            after = Cluster(cluster.standby, behind)
            async with connected(settings_of(after), "test") as primary:
                await job(primary)
            await until_equal(cluster.standby, behind)
            pool = await pool_of(after)
            async with open_replica(settings_of(after), "test", 1, pool) as replica, asyncio.timeout(SECONDS):
                assert replica is not None
                while not replica.serves:
                    await replica.note()
                    await asyncio.sleep(0.05)
            pool.terminate()
        finally:
            await behind.kill()
            await behind.forget()
            shutil.rmtree(behind.directory, ignore_errors=True)


async def until_equal(primary: Postgres, standby: Postgres) -> None:
    """Wait until the standby has replayed all that the primary has written."""
    connection = await asyncpg.connect(primary.url)
    length = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'")
    await connection.close()
    await until_replayed(standby, length)


async def until_replayed(standby: Postgres, length: int) -> None:
    async with asyncio.timeout(SECONDS):
        while await replayed(standby) < length:
            await asyncio.sleep(0.02)


async def replayed(standby: Postgres) -> int:
    """The bytes of the log that the standby has replayed."""
    connection = await asyncpg.connect(standby.url)
    place: int = await connection.fetchval("SELECT pg_last_wal_replay_lsn() - '0/0'")
    await connection.close()
    return place


async def pool_of(cluster: Cluster) -> Any:
    return await asyncpg.create_pool(cluster.primary.url, min_size=0, max_size=2)


writing = APIRouter(route_class=AuthenticatedFirst)


@writing.get("/writing")
@may_read_standby
async def write(request: Request, _caller: Annotated[Caller, Depends(Require(JOBS_READ))]) -> Response:
    async with services_of(request).pool.acquire() as connection:
        await connection.execute("DELETE FROM tombstone")
    return Response()


late, slow = APIRouter(route_class=AuthenticatedFirst), APIRouter(route_class=AuthenticatedFirst)


@slow.get("/slow")
@may_read_standby
async def read_slowly(
    request: Request, _caller: Annotated[Caller, Depends(Require(JOBS_READ))], seconds: float
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        await connection.execute("SELECT pg_sleep($1)", seconds)
    return Response()


async def test_nothing_is_written_to_the_standby(cluster: Cluster, rows: Connection) -> None:
    """An endpoint that may lag, and yet writes, is a mistake: PostgreSQL refuses it, and the primary gets it."""
    async with listing(cluster, rows, writing) as (_, http):
        repeated = reads("repeated")
        answer = await http.get("/writing")
        assert answer.status_code == 200
        assert LAG_HEADER not in answer.headers
        assert reads("repeated") == repeated + 1


@late.get("/late")
@may_read_standby
async def read_late(request: Request, _caller: Annotated[Caller, Depends(Require(JOBS_READ))]) -> Response:
    async with services_of(request).pool.acquire() as connection:
        return Response(str(await connection.fetchval("SELECT count(*) FROM made_late")))


async def test_a_migration_that_the_standby_has_not_replayed_yet_breaks_no_list(
    cluster: Cluster, rows: Connection
) -> None:
    async with listing(cluster, rows, late) as (running, http), paused(cluster.standby):
        await rows.execute("CREATE TABLE made_late ()")
        answer = await http.get("/late")
        assert (answer.status_code, answer.text) == (200, "0")
        assert LAG_HEADER not in answer.headers
        assert replica_of(running).serves  # for what it has
        await rows.execute("DROP TABLE made_late")


async def test_what_the_standby_does_not_have_yet_is_there(cluster: Cluster, rows: Connection) -> None:
    """Somebody has just made a webhook, and looks for its deliveries. What the primary lacks, too, is missing."""
    async with listing(cluster, rows, egress_allow="127.0.0.0/8") as (_, http):
        await http.post("/console/sign-in", data={"key": http.headers["Authorization"].removeprefix("Bearer ")})
        http.cookies.delete("leasehold_fresh")
        async with paused(cluster.standby):
            made = await http.post("/v1/webhooks", json={"url": "http://127.0.0.1/hook"})
            assert made.status_code == 201, made.text
            for path in (f"/v1/webhooks/{made.json()['id']}/deliveries", f"/console/webhooks/{made.json()['id']}"):
                repeated = reads("repeated")
                answer = await http.get(path)
                assert answer.status_code == 200, (path, answer.text)
                assert LAG_HEADER not in answer.headers
                assert reads("repeated") == repeated + 1
            missing = await http.get(f"/v1/webhooks/{NO_ID}/deliveries")
            assert (missing.status_code, missing.json()["code"]) == (404, "webhook_not_found")


async def test_a_list_that_the_primary_answers_again_is_charged_once(
    cluster: Cluster, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged, take = [], rates.take

    async def counted(connection: Connection, key: str, per_minute: int) -> Any:
        charged.append(key)
        return await take(connection, key, per_minute)

    def busy(_self: Reading, _tenant_id: str) -> Any:
        raise ReplicaBusy("too many requests wait for it")

    monkeypatch.setattr(rates, "take", counted)
    monkeypatch.setattr(Reading, "lend", busy)
    async with listing(cluster, rows) as (_, http):
        repeated = reads("repeated")
        answer = await http.get("/api/v1/jobs")
        assert answer.status_code == 200, answer.text
        assert reads("repeated") == repeated + 1
        assert "r=" in answer.headers["RateLimit"]
        assert len(charged) == 1
        await http.get("/api/v1/jobs")
        assert len(charged) == 2, "each request"


async def test_a_standby_that_is_busy_is_not_away(cluster: Cluster, rows: Connection) -> None:
    """As many slow lists as may run at once leave a connection to the notes."""

    async def serves_on(host_seconds: float) -> bool:
        """A note has twice `host_seconds`; what the slow lists take grows with it."""
        serves = True
        async with listing(cluster, rows, slow, database_host_timeout=host_seconds) as (running, http):
            slowly = {"seconds": host_seconds / 2}
            asking = [asyncio.create_task(http.get("/slow", params=slowly)) for _ in range(30)]
            for _ in range(20):
                await asyncio.sleep(host_seconds / 10)
                serves &= replica_of(running).serves
            for task in asking:
                assert (await task).status_code == 200
        return serves

    assert await serves_on(1.0) or await serves_on(4.0)  # a busy machine may let no note through in two seconds


async def test_every_endpoint_that_may_lag_is_answered_by_the_standby(cluster: Cluster, rows: Connection) -> None:
    async with listing(cluster, rows) as (running, http):
        await http.post("/console/sign-in", data={"key": http.headers["Authorization"].removeprefix("Bearer ")})
        http.cookies.delete("leasehold_fresh")
        marked = [route for route in routes_of(cluster) if is_marked(route.endpoint)]
        assert {route.path for route in marked} >= {"/v1/jobs", "/v1/runs", "/v1/queues", "/console/", "/console/jobs"}
        assert all(route.methods == {"GET"} for route in marked)
        for route in marked:
            await until_serving(running)
            served = reads("standby")
            path = re.sub(r"\{[^}]+\}", NO_ID, route.path)
            answer = await http.get(path, params={"key": "x", "tenant": "acme"} if "limits/jobs" in path else {})
            if answer.status_code == 404:  # no such object, also on the standby
                continue
            assert answer.status_code == 200, (path, answer.text)
            assert LAG_HEADER in answer.headers, path
            assert reads("standby") == served + 1, path


def routes_of(cluster: Cluster) -> list[APIRoute]:
    return [route for route in make_app(settings_of(cluster)).routes if isinstance(route, APIRoute)]


async def test_a_page_says_how_old_it_is_and_after_a_form_it_is_fresh(cluster: Cluster, rows: Connection) -> None:
    queue = f"q{uuid4().hex[:8]}"
    async with listing(cluster, rows) as (_, http):
        await http.post("/console/sign-in", data={"key": http.headers["Authorization"].removeprefix("Bearer ")})
        http.cookies.delete("leasehold_fresh")
        html = {"Accept": "text/html"}
        overview = (await http.get("/console/", headers=html)).text
        assert "The database:" not in overview  # its check proves that the primary takes writes
        shown = (await http.get("/console/jobs", headers=html)).text
        assert re.search(
            r'<p id="as-of" class="hint">Read from a standby of the database, as of <span>\d+\.\d</span>', shown
        )
        async with paused(cluster.standby):
            token = re.search(r'name="token" value="([^"]+)"', shown)
            assert token is not None
            sent = await http.post(f"/console/queues/{queue}/pause", data={"token": token[1]}, headers=html)
            assert sent.status_code == 303, sent.text
            assert f"max-age={int(MAX_LAG)}" in str(sent.headers.get_list("set-cookie")).lower()
            fresh = http.cookies["leasehold_fresh"]
            http.cookies.delete("leasehold_fresh")
            resume = f"/queues/{queue}/resume"
            assert resume not in (await http.get("/console/queues", headers=html)).text  # another browser's page
            http.cookies.set("leasehold_fresh", fresh)
            page = (await http.get("/console/queues", headers=html)).text
            assert resume in page
            assert '<p id="as-of" class="hint" hidden>' in page


async def test_the_exporter_counts_work_on_the_standby_while_it_keeps_up(cluster: Cluster, rows: Connection) -> None:
    primary = await pool_of(cluster)
    for limit in LIMITS:
        settings = settings_of(cluster, database_host_timeout=limit / 2)
        async with open_replica(settings, "test", 1, primary) as replica, primary.acquire() as connection:
            exporter = Exporter(settings, uuid4(), primary, (), replica)
            before = reads("standby", EXPORTER)
            found = await exporter._query_round(connection)
            if reads("standby", EXPORTER) == before:
                continue  # the standby had no processor for so long
            assert {"queues", "leases", "backlog", "workers", "tables", "sessions", "slow", "database"} <= found.keys()
            async with paused(cluster.standby):
                await job(rows)
                before = reads("primary", EXPORTER)
                found = await exporter._query_round(connection)
                assert reads("primary", EXPORTER) == before + 1
                assert found["backlog"][0]["unfinished"] == await rows.fetchval(
                    "SELECT count(*) FROM job WHERE finished_at IS NULL"
                )
            break
    else:
        pytest.fail("the exporter has never counted on the standby")
    await primary.close()
