"""What callers of the generation endpoints are promised, from the order to the file."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx2
import orjson
import pytest
import time_machine

from leasehold.api.generation.schemas import TASK_ID
from leasehold.db.database import Connection, make_pool
from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.housekeeping import housekeeping
from leasehold.pipelines.generation.operations import withdraw
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import sweeps
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.api.media_api import problem
from tests.generation.conftest import SCOPES, SECONDS, Client
from tests.generation.simulator.server import Simulator
from tests.generation.simulator.work import picture


@pytest.fixture
async def hooks(generation_settings: Settings) -> AsyncIterator[KindHousekeeping]:
    store = ObjectStore.from_settings(generation_settings)
    await store.open()
    async with make_pool(generation_settings, "test", 1) as pool:
        yield housekeeping(HousekeepingContext(generation_settings, pool.acquire, store))
    await store.close()


async def test_an_image_is_ordered_polled_and_stored(client: Client, worker: Worker, simulator: Simulator) -> None:
    answer = await client.order("a lighthouse #work=2 #files=2", task_id="order-4711")
    assert answer.status_code == 202
    said = answer.json()
    job_id = said["data"].pop("job_id")
    assert said["data"] == {"task_id": "order-4711", "status": 0}
    assert isinstance(said["created"], int)
    done = await client.ended("order-4711")
    assert (done["status"], done["status_text"], done["error"]) == (-1, "completed", None)
    assert done["job_id"] == job_id
    repeated = await client.order("a lighthouse #work=2 #files=2", task_id="order-4711")
    assert repeated.json()["data"]["job_id"] == job_id
    assert done["url"] == ",".join(done["urls"])
    assert [httpx2.URL(url).path.rpartition("/")[2] for url in done["urls"]] == ["0.png", "1.png"]
    async with httpx2.AsyncClient(timeout=SECONDS) as anybody:
        assert (await anybody.get(done["urls"][1])).content == picture(1)
    metadata = done["metadata"]
    assert (metadata["total_files"], metadata["successful_uploads"], metadata["tos_upload_errors"]) == (2, 2, [])
    assert simulator.bought[0].polls == 3


async def test_a_video_is_made_as_well(client: Client, worker: Worker) -> None:
    done = await client.ended(await client.ordered("waves", "video", duration=5000, ratio="16:9"), "video")
    assert [httpx2.URL(url).path.rpartition("/")[2] for url in done["urls"]] == ["0.mp4"]


async def test_many_images_are_listed_in_the_order_of_the_provider(client: Client, worker: Worker) -> None:
    done = await client.ended(await client.ordered("a crowd #files=12"))
    names = [httpx2.URL(url).path.rpartition("/")[2] for url in done["urls"]]
    assert names == [f"{number}.png" for number in range(12)]


@pytest.mark.parametrize("prompt", ["a lighthouse", "another one"])
@pytest.mark.parametrize("gone", ["expires_at = clock_timestamp()", "keep_seconds = 0"])
async def test_the_order_of_a_deleted_generation_is_a_new_order_although_its_rows_still_wait(
    client: Client, connection: Connection, gone: str, prompt: str
) -> None:
    """Retention could not delete them yet, because the store is away or a step has a lease."""
    first = (await client.order("a lighthouse", task_id="order-1")).json()["data"]["job_id"]
    await client.http.post("/v1/images/cancel", json={"task_id": "order-1"})
    await connection.execute(f"UPDATE job SET {gone} WHERE id = $1", UUID(first))
    again = await client.order(prompt, task_id="order-1")
    assert again.status_code == 202
    assert again.json()["data"]["job_id"] != first
    said = await client.look("order-1")
    assert (said["job_id"], said["status_text"]) == (again.json()["data"]["job_id"], "pending")
    repeated = await client.order(prompt, task_id="order-1")
    assert repeated.json()["data"]["job_id"] == said["job_id"]


async def test_no_task_id_of_a_client_stands_in_the_way_of_another_order(
    client: Client, connection: Connection
) -> None:
    """Whatever name a deleted generation gets while its rows wait, a client cannot have taken it."""
    first = (await client.order("a lighthouse", task_id="order-1")).json()["data"]["job_id"]
    await client.http.post("/v1/images/cancel", json={"task_id": "order-1"})
    await connection.execute("UPDATE job SET expires_at = clock_timestamp() WHERE id = $1", UUID(first))
    assert (await client.order("a lighthouse", task_id=f"gone:{first}")).status_code == 202
    assert (await client.order("a lighthouse", task_id="order-1")).status_code == 202
    renamed = await connection.fetchval("SELECT task_id FROM generation WHERE job_id = $1", UUID(first))
    assert not re.fullmatch(TASK_ID, renamed)


async def test_an_unknown_task_is_no_error(client: Client) -> None:
    assert await client.look("nobody") == {
        "task_id": "nobody", "job_id": None, "url": "", "status": 0, "status_text": "unknown", "urls": [],
        "error": None, "metadata": None, "expires_at": None,
    }  # fmt: skip
    answer = await client.http.post("/v1/video/query", json={"task_id": "nobody"})
    assert answer.json()["data"]["status_text"] == "unknown"


async def test_an_order_waits_as_pending_and_is_told_by_its_kind_alone(client: Client) -> None:
    task = await client.ordered("a cat")
    assert (await client.look(task))["status_text"] == "pending"
    assert (await client.look(task, "video"))["status_text"] == "unknown"


async def test_repeating_an_order_with_its_task_id_buys_one(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    answers = await asyncio.gather(*(client.order("a dog", task_id="mine") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {202}
    await client.ended("mine")
    assert (await client.order("a dog", task_id="mine")).status_code == 202
    assert simulator.purchases("a dog") == 1
    problem(await client.order("another dog", task_id="mine"), 409, "task_id_reused")


async def test_a_result_is_kept_until_it_is_consumed(client: Client, worker: Worker) -> None:
    task = await client.ordered("a bird")
    await client.ended(task)
    assert (await client.look(task))["status"] == -1  # reading it takes nothing away
    answers = await asyncio.gather(*(client.look(task, consume=True) for _ in range(5)))
    assert sorted(said["status_text"] for said in answers) == ["completed"] + ["unknown"] * 4
    assert (await client.look(task))["status_text"] == "unknown"


async def test_an_order_whose_result_was_consumed_is_not_accepted_again(client: Client, worker: Worker) -> None:
    """Its repetition got 202, and each query after that `unknown`."""
    await client.ordered("a bird", task_id="mine")
    await client.ended("mine")
    assert (await client.order("a bird", task_id="mine")).status_code == 202
    assert (await client.look("mine", consume=True))["status_text"] == "completed"
    problem(await client.order("a bird", task_id="mine"), 409, "result_consumed")
    problem(await client.order("another bird", task_id="mine"), 409, "task_id_reused")
    assert (await client.order("a bird", task_id="another")).status_code == 202


async def test_consuming_takes_nothing_that_is_not_finished(client: Client, worker: Worker) -> None:
    task = await client.ordered("a slow bird #never")
    await client.until(task, "polling")
    assert (await client.look(task, consume=True))["status_text"] == "polling"
    assert (await client.look(task))["status_text"] == "polling"


async def test_a_result_that_has_expired_is_forgotten_with_its_files(
    client: Client, worker: Worker, connection: Connection
) -> None:
    task = await client.ordered("a fish")
    done = await client.ended(task)
    assert done["expires_at"] is not None
    await connection.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 s'")
    assert (await client.look(task))["status_text"] == "unknown"
    (old,) = await sweeps.forgettable_jobs(connection)
    await sweeps.forget_jobs(connection, [old.job_id])
    assert await connection.fetchval("SELECT count(*) FROM generation") == 0


async def test_another_tenant_sees_nothing_of_it(
    client: Client, generation_settings: Settings, connection: Connection
) -> None:
    await client.ordered("a secret", task_id="shared-name")
    key = await create_key(connection, tenant_id="other", client_id="t", scopes=SCOPES)
    async with serving(generation_settings) as running, client_of(running.url, key.text) as http:
        stranger = Client(http)
        assert (await stranger.look("shared-name"))["status_text"] == "unknown"
        problem(await http.post("/v1/images/cancel", json={"task_id": "shared-name"}), 404, "task_not_found")
        assert await stranger.ordered("a plan", task_id="shared-name") == "shared-name"
        assert (await http.get("/v1/generations/statistics")).json()["tasks"] == {"image": {"pending": 1}}


@pytest.mark.parametrize("scope", SCOPES)
async def test_the_endpoint_needs_its_scopes(generation_settings: Settings, connection: Connection, scope: str) -> None:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=[scope])
    async with serving(generation_settings) as running, client_of(running.url, key.text) as http:
        order = await http.post("/v1/images/generations", json={"prompt": "x"})
        look = await http.get("/v1/images/query", params={"task_id": "x"})
    assert {order.status_code, look.status_code} & {403}
    assert {order.status_code, look.status_code} & {200, 202}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_request"),
        ({"prompt": ""}, "invalid_request"),
        ({"prompt": "x" * 10_001}, "invalid_request"),
        ({"prompt": "x", "width": 0}, "invalid_request"),
        ({"prompt": "x", "ratio": "wide"}, "invalid_request"),
        ({"prompt": "x", "response_format": "b64_json"}, "invalid_request"),
        ({"prompt": "x", "task_id": "with space"}, "invalid_request"),
        ({"prompt": "x", "task_id": "a,b"}, "invalid_request"),
        ({"prompt": "x", "server_id": "../.."}, "invalid_request"),
        ({"prompt": "x", "images": [{"url": "file:///etc/passwd"}]}, "invalid_request"),
        ({"prompt": "x", "extra": {"a": "y" * 9000}}, "invalid_request"),
        ({"prompt": "x", "surprise": 1}, "invalid_request"),
        ({"prompt": "x", "provider": "nobody"}, "unknown_provider"),
    ],
)
async def test_a_bad_order_is_refused_with_a_stable_code(client: Client, body: dict[str, object], code: str) -> None:
    problem(await client.http.post("/v1/images/generations", json=body), 422, code)


async def test_without_a_provider_or_a_credential_nothing_is_accepted(
    generation_settings: Settings, connection: Connection
) -> None:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    bare = generation_settings.model_copy(update={"generation_provider": "", "generation_credentials": {}})
    async with serving(bare) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        problem(await client.order("x"), 422, "provider_not_configured")
        problem(await client.order("x", provider="gateway"), 422, "credential_missing")
        http.headers["X-Provider-Credential"] = ""
        problem(await client.order("x", provider="gateway"), 422, "credential_missing")


async def test_a_called_off_generation_is_called_off_at_its_provider(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    task = await client.ordered("endless #never")
    await client.until(task, "polling")
    answer = await client.http.post("/v1/images/cancel", json={"task_id": task, "reason": "changed my mind"})
    assert answer.status_code == 202
    async with asyncio.timeout(SECONDS):
        while not simulator.bought[0].cancelled:
            await asyncio.sleep(0.02)
    said = await client.look(task)
    assert (said["status"], said["error"]["code"]) == (-2, "cancelled")
    problem(await client.http.post("/v1/images/cancel", json={"task_id": task}), 409, "resource_invalid_state")


@pytest.mark.parametrize("how", ["deleted", "cancelled and deleted", "cancelled and expired"])
async def test_an_order_is_called_off_at_its_provider_although_its_generation_is_deleted(
    generation_settings: Settings, connection: Connection, simulator: Simulator, how: str
) -> None:
    """The rows of a deleted job go at once, but its order costs money until the provider is told."""
    scopes = (*SCOPES, "jobs:read", "jobs:delete")
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=scopes)
    async with serving(generation_settings) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        async with Worker(generation_settings) as worker:
            task = await client.ordered("endless #never")
            job_id = (await client.until(task, "polling"))["job_id"]
            await worker.drain()  # no step has a lease, so the rows go at once
        if how != "deleted":
            assert (await http.post("/v1/images/cancel", json={"task_id": task})).status_code == 202
        if how == "cancelled and expired":
            await connection.execute("UPDATE job SET expires_at = clock_timestamp() WHERE id = $1", UUID(job_id))
            await sweeps.forget_jobs(connection, [UUID(job_id)], running.services.actions.before_jobs_go)
        else:
            assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 204
        assert not await connection.fetchval("SELECT EXISTS (SELECT FROM job WHERE pipeline = 'generation')")
        async with Worker(generation_settings), asyncio.timeout(SECONDS):
            while not simulator.bought[0].cancelled:
                await asyncio.sleep(0.02)
            while await connection.fetchval("SELECT status FROM job") != "succeeded":
                await asyncio.sleep(0.02)
        kept = await connection.fetchval("SELECT params FROM job")
        assert "endless" not in orjson.dumps(kept).decode(), "the client's words go with the generation"
        (listed,) = (await http.get("/v1/jobs")).json()["jobs"]
        shown = (await http.get(f"/v1/jobs/{listed['id']}")).json()
        assert (shown["parameters"], shown["redacted"]) == ({"job_id": job_id}, ["order"])


async def test_a_cancel_is_sent_again_no_earlier_than_the_provider_asks_for(
    client: Client, worker: Worker, connection: Connection
) -> None:
    """The attempts of the ladder alone would all be used up within five minutes."""
    task = await client.ordered("endless #never #wait=3600")
    await client.until(task, "polling")
    await client.http.post("/v1/images/cancel", json={"task_id": task})
    failed = "SELECT available_at - clock_timestamp() FROM task WHERE step = 'withdraw' AND status = 'retry'"
    async with asyncio.timeout(SECONDS):
        while (until_next := await connection.fetchval(failed)) is None:
            await asyncio.sleep(0.02)
    assert until_next > timedelta(minutes=30)


async def test_an_order_that_is_called_off_before_it_went_out_is_never_bought(
    client: Client, generation_settings: Settings, simulator: Simulator
) -> None:
    task = await client.ordered("not yet")
    assert (await client.http.post("/v1/images/cancel", json={"task_id": task})).status_code == 202
    async with Worker(generation_settings):
        await client.ended(await client.ordered("the next one"))
    assert simulator.purchases("not yet") == 0


async def test_a_deadline_ends_in_a_result_and_a_word_to_the_provider(
    generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    for seconds in (1, 4, 16):
        short = generation_settings.model_copy(update={"generation_image_seconds": seconds})
        async with serving(short) as running, client_of(running.url, key.text) as http, Worker(short):
            client = Client(http)
            said = await client.ended(await client.ordered("never made #never"))
        if simulator.bought:
            break  # else it was not ordered in time: on a busy machine that may be
    assert (said["status"], said["error"]["code"]) == (-2, "deadline_exceeded")
    assert said["metadata"]["total_files"] == 0
    assert "in time" in said["metadata"]["fail_reason"]
    assert simulator.bought[0].cancelled


async def test_a_provider_that_is_busy_at_the_deadline_is_told_later(
    generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    for seconds in (1, 4, 16):
        short = generation_settings.model_copy(update={"generation_image_seconds": seconds})
        async with serving(short) as running, client_of(running.url, key.text) as http, Worker(short):
            said = await Client(http).ended(await Client(http).ordered("never made #never #wait=3600"))
            assert said["error"]["code"] == "deadline_exceeded"
            if simulator.bought:  # else it was not ordered in time: on a busy machine that may be
                asked = "SELECT count(*) FROM task WHERE step = 'withdraw' AND status = 'retry'"
                async with asyncio.timeout(SECONDS):
                    while await connection.fetchval(asked) != 1:
                        await asyncio.sleep(0.02)
                # As a second attempt does, if the first has died before its end was committed.
                assert await withdraw(connection, short, UUID(said["job_id"]), "acme") == []
                return
    pytest.fail("nothing was ordered in time")


@pytest.mark.parametrize(
    ("words", "status", "cancelled"),
    [("#work=0", "completed", False), ("#never", "failed", True), ("#never #ill=1", "failed", True)],
    ids=["made", "not made", "no answer"],
)
async def test_at_its_deadline_an_order_is_asked_for_once_more(
    generation_settings: Settings,
    connection: Connection,
    simulator: Simulator,
    words: str,
    status: str,
    cancelled: bool,
) -> None:
    """It may have been made since the last look, which was minutes ago if the provider was busy."""
    seldom = generation_settings.model_copy(update={"generation_image_poll_seconds": 3000.0})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(seldom) as running, client_of(running.url, key.text) as http, Worker(seldom):
        client = Client(http)
        task = await client.ordered(f"a lighthouse {words}")
        async with asyncio.timeout(SECONDS):
            while await connection.fetchval("SELECT status FROM task WHERE step = 'poll'") != "waiting":
                await asyncio.sleep(0.02)
        late = "UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp())"
        await connection.execute(late)
        await connection.execute("UPDATE task SET available_at = clock_timestamp() WHERE step = 'poll'")
        said = await client.ended(task)
    assert said["status_text"] == status
    assert said["error"] is None or said["error"]["code"] == "deadline_exceeded"
    (bought,) = simulator.bought
    assert (bought.polls, bought.cancelled) == (1, cancelled)
    # What is made is stored, however long the download takes: the sweep of deadlines does not end the job meanwhile.
    left = await connection.fetchval("SELECT deadline_at - clock_timestamp() FROM job WHERE pipeline = 'generation'")
    assert (left > timedelta(hours=3)) is (status == "completed")


@pytest.mark.parametrize(("api", "worker"), [(-10, 0), (0, 10)], ids=["api behind", "worker ahead"])
async def test_a_deadline_counts_by_the_databases_clock_however_wrong_the_apis_or_the_workers_is(
    generation_settings: Settings, connection: Connection, api: int, worker: int
) -> None:
    """By ten minutes here: the store refuses signatures that are wrong by fifteen."""
    short = generation_settings.model_copy(update={"generation_image_seconds": 300})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(short) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        with time_machine.travel(datetime.now(UTC) + timedelta(minutes=api), tick=True):
            task = await client.ordered("in time #work=1")
        left = await connection.fetchval("SELECT (params ->> 'deadline_at')::timestamptz - created_at FROM job")
        assert abs(left - timedelta(seconds=300)) < timedelta(minutes=2)  # two reads of the clock
        with time_machine.travel(datetime.now(UTC) + timedelta(minutes=worker), tick=True):
            async with Worker(short):
                assert (await client.ended(task))["status"] == -1


async def test_an_order_that_no_worker_takes_ends_in_a_result_too(client: Client, connection: Connection) -> None:
    task = await client.ordered("nobody is there")
    await connection.execute("UPDATE job SET deadline_at = clock_timestamp()")
    await sweeps.expire_jobs(connection)
    said = await client.look(task)
    assert (said["status"], said["status_text"], said["error"]["code"]) == (-2, "failed", "deadline_exceeded")


async def test_an_order_whose_server_is_gone_at_the_deadline_is_called_off_at_its_provider(
    client: Client, generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    """Nobody polls it any more, but it would cost money until it is made."""
    async with Worker(generation_settings.model_copy(update={"worker_labels": "south"})):
        task = await client.ordered("never made #never", server_id="south")
        await client.until(task, "polling")
    await connection.execute("UPDATE job SET deadline_at = clock_timestamp()")
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        said = await client.ended(task)
        while not simulator.bought[0].cancelled:
            await asyncio.sleep(0.02)
    assert (said["status"], said["error"]["code"]) == (-2, "deadline_exceeded")


@pytest.mark.parametrize(
    ("submitted", "polled", "withdrawals"),
    [
        (None, "blocked", 0),
        ({"urls": ["https://example.com/a"]}, "waiting", 0),
        ({"ref": "g1"}, "waiting", 1),
        ({"ref": "g1"}, "succeeded", 0),
    ],
    ids=["nothing ordered", "files at once", "ordered", "made"],
)
async def test_at_the_deadline_only_an_order_that_may_still_be_made_is_called_off(
    client: Client,
    hooks: KindHousekeeping,
    connection: Connection,
    submitted: dict[str, Any] | None,
    polled: str,
    withdrawals: int,
) -> None:
    for _ in range(2):
        await client.ordered("a lighthouse")
    move = "UPDATE task SET status = $2, finished_at = CASE WHEN $2 = 'succeeded' THEN now() END WHERE step = $1"
    await connection.execute(move, "poll", polled)
    if submitted is not None:
        await connection.execute(move, "submit", "succeeded")
        await connection.execute("INSERT INTO result SELECT id, $1 FROM task WHERE step = 'submit'", submitted)
    await connection.execute("UPDATE job SET deadline_at = clock_timestamp()")
    assert hooks.after_expiry is not None
    assert len(await sweeps.expire_jobs(connection, 1, [hooks.after_expiry])) == 1
    written = await connection.fetch("SELECT exclusive_key FROM job WHERE pipeline = 'generation_withdrawal'")
    expired = await connection.fetchval("SELECT id::text FROM job WHERE status = 'expired'")
    assert [row["exclusive_key"] for row in written] == [expired] * withdrawals


async def test_a_failed_job_without_an_error_of_its_own_has_an_answer(client: Client, connection: Connection) -> None:
    task_id = await client.ordered("a lighthouse")
    await connection.execute(
        "UPDATE job SET status = 'failed', error = NULL, finished_at = clock_timestamp(),"
        " expires_at = clock_timestamp() + interval '1 day'"
    )
    answer = await client.look(task_id)
    assert (answer["status_text"], answer["error"]["code"]) == ("failed", "failed")


async def test_a_server_has_three_under_way_and_the_next_waits_its_turn(
    generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    three = generation_settings.model_copy(update={"generation_per_server": 3, "worker_labels": "south"})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(three) as running, client_of(running.url, key.text) as http, Worker(three):
        client = Client(http)
        tasks = [await client.ordered(f"{n} #never", server_id="south") for n in range(5)]
        for task in tasks[:3]:
            await client.until(task, "polling")
        said = (await http.get("/v1/generations/statistics", params={"server_id": "south"})).json()
        assert said == {"tasks": {"image": {"polling": 3, "pending": 2}}, "servers": {"south": 3}}
        assert len(simulator.bought) == 3
        await http.post("/v1/images/cancel", json={"task_id": tasks[0]})
        await client.until(tasks[3], "polling")
        assert len(simulator.bought) == 4


async def test_a_provider_has_no_more_under_way_than_its_limit(
    generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    limited = generation_settings.model_copy(update={"generation_limits": {"gateway": 2}})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(limited) as running, client_of(running.url, key.text) as http, Worker(limited):
        client = Client(http)
        tasks = await asyncio.gather(*(client.ordered(f"{n} #work=3") for n in range(8)))
        for task in tasks:
            await client.ended(task)
    assert len(simulator.bought) == 8
    assert simulator.studio.most_under_way == 2


async def test_what_a_credential_is_nobody_can_read(
    generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    bare = generation_settings.model_copy(update={"generation_credentials": {}})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(bare) as running, client_of(running.url, key.text) as http, Worker(bare):
        http.headers["X-Provider-Credential"] = "wrong-s3cret"
        said = await Client(http).ended(await Client(http).ordered("mine"))
        assert said["error"]["code"] == "provider_unauthorized"
        assert "s3cret" not in str(said)
    kept = await connection.fetch("SELECT j::text AS said FROM job j UNION ALL SELECT e::text FROM history e"
                                  " UNION ALL SELECT f::text FROM failure f")  # fmt: skip
    assert kept
    assert not any("s3cret" in row["said"] for row in kept)


async def test_a_credential_needs_a_key_to_be_sealed_with(
    generation_settings: Settings, connection: Connection
) -> None:
    bare = generation_settings.model_copy(update={"sealing_keys": type(generation_settings.sealing_keys)("")})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(bare) as running, client_of(running.url, key.text) as http:
        http.headers["X-Provider-Credential"] = "secret"
        problem(await Client(http).order("x"), 503, "sealing_not_configured")


async def test_a_source_image_is_uploaded_and_found_by_its_url(client: Client, connection: Connection) -> None:
    files = [("file", ("cat.png", picture(1), "image/png")), ("file", ("é.png", picture(2), "image/png"))]
    answer = await client.http.post("/v1/upload/images", files=files)
    assert answer.status_code == 200, answer.text
    urls = [one["url"] for one in answer.json()["data"]]
    async with httpx2.AsyncClient(timeout=SECONDS) as anybody:
        assert [(await anybody.get(url)).content for url in urls] == [picture(1), picture(2)]
    assert (await client.http.post("/v1/upload/images", files=files[:1])).status_code == 200  # the same one again
    assert await connection.fetchval("SELECT count(*) FROM source_image") == 2


async def test_a_source_image_that_is_kept_for_longer_than_a_week_is_found_by_its_url_for_a_week(
    generation_settings: Settings, connection: Connection
) -> None:
    kept_for_a_month = generation_settings.model_copy(update={"generation_keep_seconds": 30 * 86_400})
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(kept_for_a_month) as running, client_of(running.url, key.text) as http:
        answer = await http.post("/v1/upload/images", files=[("file", ("cat.png", picture(1), "image/png"))])
    said = answer.json()
    url = said["data"][0]["url"]
    week = 7 * 86_400  # S3 refuses every URL that is signed for longer
    assert httpx2.URL(url).params["X-Amz-Expires"] == str(week)
    assert said["expires_at"] == said["created"] + week
    async with httpx2.AsyncClient(timeout=SECONDS) as anybody:
        assert (await anybody.get(url)).content == picture(1)
    kept_seconds = await connection.fetchval("SELECT extract(epoch FROM expires_at - now()) FROM source_image")
    assert kept_seconds > week


@pytest.fixture
def forgetting(hooks: KindHousekeeping) -> Forgetting[str]:
    """The duty that deletes expired source images."""
    (duty,) = hooks.duties
    assert isinstance(duty, Forgetting)
    return duty


async def upload(client: Client, number: int) -> httpx2.Response:
    return await client.http.post("/v1/upload/images", files=[("file", ("a.png", picture(number), "image/png"))])


async def fetched(answer: httpx2.Response) -> httpx2.Response:
    """What a provider gets from the URL of the uploaded image."""
    async with httpx2.AsyncClient(timeout=SECONDS) as anybody:
        return await anybody.get(answer.json()["data"][0]["url"])


async def expire_sources(connection: Connection) -> None:
    await connection.execute("UPDATE source_image SET expires_at = clock_timestamp() - interval '1 second'")


async def test_source_images_are_forgotten_in_time(
    client: Client, connection: Connection, forgetting: Forgetting[str]
) -> None:
    expired = await upload(client, 1)
    await expire_sources(connection)
    kept = await upload(client, 2)
    keys = await forgetting.find(connection)
    for key in keys:
        await forgetting.delete(key)
    await forgetting.forget(connection, keys)
    assert [(await fetched(answer)).status_code for answer in (expired, kept)] == [404, 200]
    assert await connection.fetchval("SELECT count(*) FROM source_image") == 1


async def test_the_images_of_a_form_that_arrives_slowly_are_kept_for_as_long_as_their_urls_work(
    client: Client, connection: Connection
) -> None:
    """The URLs' time begins with the answer."""

    async def form() -> AsyncIterator[bytes]:
        for number in (1, 2):
            head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
            yield head + picture(number) + b"\r\n"
            if number == 1:
                yield b"--b\r\n"  # the end of the first image
                async with asyncio.timeout(SECONDS):
                    while not await connection.fetchval("SELECT count(*) FROM source_image"):
                        await asyncio.sleep(0.02)
                # As if the form had taken so long since then.
                await connection.execute("UPDATE source_image SET expires_at = expires_at - interval '290 seconds'")
                yield b'Content-Disposition: form-data; name="note"\r\n\r\n\r\n'
        yield b"--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await client.http.post("/v1/upload/images", content=form(), headers=headers)
    assert answer.status_code == 200, answer.text
    kept_until = await connection.fetch("SELECT extract(epoch FROM expires_at)::float8 AS at FROM source_image")
    assert len(kept_until) == 2
    assert min(row["at"] for row in kept_until) >= answer.json()["expires_at"]


async def test_a_source_image_that_is_uploaded_again_before_it_is_deleted_stays(
    client: Client, connection: Connection, forgetting: Forgetting[str]
) -> None:
    """The upload finds the object and does not write it again."""
    await upload(client, 1)
    await expire_sources(connection)
    keys = await forgetting.find(connection)
    again = await upload(client, 1)
    for key in keys:
        await forgetting.delete(key)
    await forgetting.forget(connection, keys)
    assert (await fetched(again)).content == picture(1)
    assert await generations.expired_sources(connection) == []
    assert await connection.fetchval("SELECT count(*) FROM source_image") == 1


async def test_a_source_image_that_is_being_deleted_is_not_kept_and_can_be_uploaded_afterwards(
    client: Client, connection: Connection, forgetting: Forgetting[str]
) -> None:
    await upload(client, 1)
    await expire_sources(connection)
    (key,) = await forgetting.find(connection)
    assert await generations.condemn_source(connection, key)
    problem(await upload(client, 1), 503, "busy")
    assert await forgetting.find(connection) == [key], "another worker goes on, if this one dies here"
    await forgetting.delete(key)
    await forgetting.forget(connection, [key])
    assert (await fetched(await upload(client, 1))).content == picture(1)


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ([("file", ("a.svg", b"<svg/>", "image/png"))], "unsupported_format"),
        ([("file", ("a.png", picture(1) + b"x" * 21 * 1024 * 1024, "image/png"))], "too_large"),
        ([("file", (f"{n}.png", picture(n), "image/png")) for n in range(11)], "too_many_images"),
    ],
)
async def test_a_bad_source_image_is_refused(client: Client, files: list[object], code: str) -> None:
    problem(await client.http.post("/v1/upload/images", files=files), 422, code)  # type: ignore[arg-type]  # as httpx takes them


async def test_a_form_without_a_file_is_refused(client: Client) -> None:
    boundary = {"content-type": "multipart/form-data; boundary=x"}
    form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'
    problem(await client.http.post("/v1/upload/images", content=form, headers=boundary), 422, "image_missing")
    problem(await client.http.post("/v1/upload/images", content=b"{}"), 415, "unsupported_media_type")


def browser_form(*files: tuple[str, bytes]) -> dict[str, Any]:
    """A form as a browser sends it: the name of a file may be empty."""
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="%b"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n" % (name.encode(), content)
        for name, content in files
    ]
    return {"content": b"".join(parts) + b"--x--\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}


async def test_a_form_of_a_browser_may_leave_out_one_of_its_files(client: Client) -> None:
    """The browser then sends a file without a name and without a byte."""

    async def send(*files: tuple[str, bytes]) -> httpx2.Response:
        return await client.http.post("/v1/upload/images", **browser_form(*files))

    answer = await send(("a.png", picture(1)), ("", b""))
    assert (answer.status_code, len(answer.json()["data"])) == (200, 1)
    problem(await send(("", b"")), 422, "image_missing")
    for name, content in (("a.png", b""), ("", b"no picture")):
        problem(await send((name, content)), 422, "unsupported_format")
