"""An app submits its typed tasks through the HTTP API, and knows no database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from leasehold import InvalidArguments, TaskFailed
from leasehold.api.auth.security import JOBS_READ, RUNS_READ, RUNS_WRITE
from leasehold.api.jobs.view import MAX_LINKS
from leasehold.celery import Celery
from leasehold.celery.apps import made_apps
from leasehold.client import ApiError, AsyncClient
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import (
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ObjectMissing,
    TransactionRefused,
    Unauthenticated,
    Unavailable,
)
from leasehold.domain.ids import new_id
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import Running, serving
from tests.app import http_shop as shop
from tests.app.conftest import Serve
from tests.client.front import fronting
from tests.support.now import now

SECONDS = 60.0


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Connection]:
    connection = await connect(settings, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Running]:
    async with serving(settings.model_copy(update={"pipelines": "tests.app.http_shop:app"})) as running:
        yield running


@pytest.fixture
async def key(rows: Connection) -> str:
    created = await create_key(rows, tenant_id="acme", client_id="program", scopes=(RUNS_READ, RUNS_WRITE, JOBS_READ))
    return created.text


@pytest.fixture
async def _over_http(running: Running, key: str) -> AsyncIterator[None]:
    shop.app.use_api(running.url, key, timeout=SECONDS)
    yield
    await asyncio.to_thread(shop.app.close)


@pytest.mark.usefixtures("_over_http")
async def test_typed_tasks_are_submitted_followed_and_cancelled_by_requests(serve: Serve, rows: Connection) -> None:
    async with serve(shop.app), asyncio.timeout(SECONDS):
        run = await shop.double.asubmit(4, tags={"customer": "7"}, priority="high")
        assert await run == 8
        assert await run.astatus() == "succeeded"
        stored = await rows.fetchrow("SELECT tenant_id, pipeline, priority FROM job WHERE id = $1", run.id)
        assert stored is not None
        assert tuple(stored) == ("acme", "web.double", 0)
        assert await rows.fetchval("SELECT value FROM job_tag WHERE job_id = $1", run.id) == "7"
        runs = await shop.double.asubmit_many([shop.double.options(tags={"n": "1"}).call(1), 2, 3])
        assert [await one for one in runs] == [2, 4, 6]
        with pytest.raises(TaskFailed, match="negative: no such order"):
            await (await shop.double.asubmit(-1))
        assert await (await shop.large.asubmit(shop.Order(id=7))) == "7" * 100_000
        delayed = await shop.double.asubmit(1, delay=timedelta(hours=1))
        with pytest.raises(TimeoutError):
            await delayed.awaited(timeout=0)
        assert await delayed.acancel("changed my mind") == "cancelled"
        assert await delayed.acancel() == "cancelled"
        with pytest.raises(TaskFailed, match=r"^cancelled: changed my mind$"):
            await delayed
        unexplained = await shop.double.asubmit(1, delay=timedelta(hours=1))
        assert await unexplained.acancel() == "cancelled"
        with pytest.raises(TaskFailed, match=r"^cancelled: the run was cancelled$"):
            await unexplained
        waiting = await shop.waits.asubmit(3)
        await waiting.asignal("approved", shop.Order(id=9))
        assert await waiting == "3 by 9"
        with pytest.raises(Conflict) as ended:
            await waiting.asignal("approved", shop.Order(id=9))
        assert ended.value.code == "run_ended"
        with pytest.raises(NotFound):
            await shop.double.find(new_id()).astatus()
        said = await shop.speaks.asubmit(600)
        assert [one.chunk async for one in said.astream()] == list(range(600))


@pytest.mark.usefixtures("_over_http")
async def test_the_large_result_of_a_workflow_is_read_however_many_its_steps_have(serve: Serve) -> None:
    """The API's answer has links of a hundred outputs."""
    async with serve(shop.app), asyncio.timeout(SECONDS):
        assert await (await shop.gathers_much.asubmit(MAX_LINKS)) == "7" * 100_000


@pytest.mark.usefixtures("_over_http")
async def test_arguments_that_the_model_reads_are_taken_whatever_json_schema_allows(
    running: Running, key: str, serve: Serve
) -> None:
    """A time without a zone, a duration of 1.5 s, and a pattern that only Python knows."""
    async with serve(shop.app), asyncio.timeout(SECONDS):
        event = shop.Event(at=datetime(2026, 3, 29, 2, 30), lasts=timedelta(seconds=1.5))  # noqa: DTZ001 - it is the test
        assert await (await shop.event_of.asubmit(event)) == "2026-03-29T02:30:00 for 1.5 s"
        assert await (await shop.word_of.asubmit(shop.Patterned(word="bee"))) == "bee"
    async with AsyncClient(running.url, key) as client:
        for template, payload, path in (
            ("web.event_of", {"at": "tomorrow", "lasts": "PT1S"}, "/at"),
            ("web.event_of", {"at": "2026-03-29T02:30:00", "lasts": "long"}, "/lasts"),
            ("web.event_of", {"at": 7, "lasts": "PT1S"}, "/at"),
            ("web.word_of", {"word": "ant"}, "/word"),
        ):
            with pytest.raises(ApiError, match=f"invalid_payload: .* at {path}: "):
                await client.submit(template, payload)


@pytest.mark.usefixtures("_over_http")
async def test_a_result_whose_output_is_gone_is_named_as_missing(serve: Serve, rows: Connection) -> None:
    async with serve(shop.app), asyncio.timeout(SECONDS):
        run = await shop.large.asubmit(shop.Order(id=7))
        assert await run == "7" * 100_000
        await rows.execute("DELETE FROM output WHERE name = 'result.json'")
        with pytest.raises(ObjectMissing, match=f"the run {run.id} has no output result.json"):
            await shop.large.find(run.id)


@pytest.mark.usefixtures("_over_http")
async def test_a_key_starts_one_run_of_its_task(rows: Connection) -> None:
    runs = [await shop.double.asubmit(4, key="order-17") for _ in range(2)]
    assert runs[0] == runs[1]
    assert await shop.waits.asubmit(4, key="order-17") != runs[0]
    with pytest.raises(Invalid):
        await shop.double.asubmit(5, key="order-17")
    assert await shop.once.asubmit(4, key="k") == await shop.once.asubmit(4, key="k")
    assert await rows.fetchval("SELECT count(*) FROM job") == 3


@pytest.mark.usefixtures("_over_http")
async def test_a_key_with_a_delay_gives_the_first_run(rows: Connection) -> None:
    delay, tags = timedelta(hours=1), {"n": "1"}
    first = await shop.double.asubmit(4, key="k", delay=delay, tags=tags)
    assert await shop.double.asubmit(4, key="k", delay=delay, tags=tags) == first
    others: list[dict[str, Any]] = [
        {"delay": timedelta(hours=2), "tags": tags},
        {"tags": tags},
        {"delay": delay, "tags": {"n": "2"}},
        {"delay": delay, "tags": tags, "priority": "high"},
    ]
    for options in others:
        with pytest.raises(Invalid) as refused:
            await shop.double.asubmit(4, key="k", **options)
        assert refused.value.code == "idempotency_key_reused"
    waits = await rows.fetchval("SELECT scheduled_at - created_at FROM run JOIN job ON id = job_id")  # of the only run
    assert abs(waits - delay) < timedelta(minutes=1)  # two reads of the database's clock


async def test_only_a_delay_with_a_key_needs_an_api_that_counts_the_delay(
    running: Running, key: str, rows: Connection
) -> None:
    """An API of 0.1.0 does not know `delay_seconds`."""
    hour = timedelta(hours=1)
    async with fronting(running.url) as front:
        shop.app.use_api(front.url, key, timeout=SECONDS)
        try:
            await shop.double.asubmit(1, delay=hour)
            await shop.double.asubmit(1, key="k", delay=hour)
            await shop.double.asubmit(1, key="other", delay=timedelta(0))
            await shop.double.asubmit_many([shop.double.options(delay=hour).call(n) for n in (1, 2)])
        finally:
            await asyncio.to_thread(shop.app.close)
    starts = [{"scheduled_at", "delay_seconds"} & json.loads(body).keys() for body in front.bodies]
    assert starts == [{"scheduled_at"}, {"delay_seconds"}, set(), {"scheduled_at"}]


@pytest.mark.usefixtures("_over_http")
async def test_the_whole_key_counts_however_long_it_is(rows: Connection) -> None:
    keys = [*(f"{'k' * 199}{end}" for end in "12"), "k", "k ", " "]
    runs = [await shop.double_with_a_long_name.asubmit(4, key=key) for key in (*keys, *keys)]
    assert runs[:5] == runs[5:]
    assert len({run.id for run in runs}) == 5
    assert await rows.fetchval("SELECT count(*) FROM job") == 5


@pytest.mark.usefixtures("_over_http")
async def test_what_needs_the_database_is_refused_with_what_to_do(rows: Connection) -> None:
    with pytest.raises(InvalidArguments):
        await shop.double.asubmit("no number")  # type: ignore[call-overload]  # that is the test
    refused: dict[str, Any] = {
        "give a key= in place of id=": shop.double.asubmit(1, id=new_id()),
        "has a debounce": shop.later.asubmit(1),
        "give a key= of your own": shop.once.asubmit(1),
        "the same priority and delay": shop.double.asubmit_many([1, shop.double.options(priority="low").call(2)]),
        "and no keys": shop.double.asubmit_many([1, shop.double.options(key="k").call(2)]),
    }
    for words, submission in refused.items():
        with pytest.raises(Invalid, match=words) as error:
            await submission
        assert error.value.code == "not_over_http"
    async with rows.transaction():
        with pytest.raises(TransactionRefused, match="over HTTP"):
            await shop.double.asubmit_in(rows, 1)
    assert await rows.fetchval("SELECT count(*) FROM job") == 0


async def test_a_task_id_of_celery_is_refused_and_found_over_http(
    running: Running, key: str, rows: Connection, settings: Settings
) -> None:
    """What programs beside PostgreSQL have submitted is found by its task_id, too. That takes `jobs:read`."""
    program = Celery("beside")

    @program.task
    def add(x: int, y: int) -> int:
        return x + y

    def submit(*task_ids: str) -> list[str]:
        program.app.use(settings.model_copy(update={"tenant": "acme"}))
        results = [add.apply_async((1, 2), task_id=task_id) for task_id in task_ids]
        return [*(result.id for result in results), add.delay(1, 2).id]

    def read(ids: list[str], key: str) -> list[str]:
        program.app.use_api(running.url, key, timeout=SECONDS)
        with pytest.raises(Invalid, match="without task_id=") as refused:
            add.apply_async((1, 2), task_id="x")
        assert refused.value.code == "not_over_http"
        return [program.AsyncResult(task_id).state for task_id in ids]

    try:
        own = str(new_id())
        ids = await asyncio.to_thread(submit, own, str(uuid4()), 'order "17"\\: x')
        for task_id in ids[:3]:
            await asyncio.to_thread(program.AsyncResult(task_id).revoke)
        expected = ["REVOKED", "REVOKED", "REVOKED", "PENDING"]
        assert await asyncio.to_thread(read, [*ids, "nobody's", str(uuid4())], key) == [*expected, "PENDING", "PENDING"]
        limited = await create_key(rows, tenant_id="acme", client_id="limited", scopes=(RUNS_READ, RUNS_WRITE))
        assert await asyncio.to_thread(read, [own], limited.text) == ["REVOKED"]
        with pytest.raises(Forbidden):
            await asyncio.to_thread(read, [ids[1]], limited.text)
    finally:
        await asyncio.to_thread(program.app.close)
        made_apps.remove(program)


async def test_a_submission_whose_answer_was_lost_starts_one_run(running: Running, key: str, rows: Connection) -> None:
    async with fronting(running.url) as front:
        front.failures = ["503", "lose"]
        shop.app.use_api(front.url, key, timeout=SECONDS)
        try:
            run = await shop.double.asubmit(1)
        finally:
            await asyncio.to_thread(shop.app.close)
    assert [row["id"] for row in await rows.fetch("SELECT id FROM job")] == [run.id]


async def test_an_api_that_refuses_the_key_or_does_not_answer_is_told_apart(
    running: Running, key: str, rows: Connection
) -> None:
    reading = await create_key(rows, tenant_id="acme", client_id="reader", scopes=(RUNS_READ,))
    cases: list[tuple[str, str, float, type[Exception]]] = [
        (running.url, f"{key[:-4]}0000", 60.0, Unauthenticated),
        (running.url, reading.text, 60.0, Forbidden),
        ("http://127.0.0.1:1", key, 0.3, Unavailable),
    ]
    for url, used, seconds, error in cases:
        shop.app.use_api(url, used, timeout=seconds)
        try:
            with pytest.raises(error) as raised:
                await shop.double.asubmit(1)
            assert "key=" not in str(raised.value)  # the request's own key would start another run
        finally:
            await asyncio.to_thread(shop.app.close)


def test_an_app_goes_back_to_the_database(settings: Settings) -> None:
    shop.app.use_api("http://127.0.0.1:1", "lh_key")
    assert now(shop.app.connections.is_over_http)
    shop.app.use(settings)
    assert not shop.app.connections.is_over_http
    shop.app.connections.use(None)
