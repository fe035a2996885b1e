"""Two cells: each serves its tenants, and sends others to their cell."""

from __future__ import annotations

import asyncio

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from leasehold.client import ApiError, AsyncClient, Client
from leasehold.client.external import ExternalWorker, Refused
from leasehold.client.requests import KeyAuth
from leasehold.security.credentials import parse_key
from leasehold.settings import Settings
from leasehold.telemetry.redaction import redact
from tests.api.conftest import client_of, serving
from tests.cells.conftest import Two
from tests.console.conftest import HTML


async def test_a_key_names_its_cell_and_another_cell_tells_the_address_before_it_does_anything(two: Two) -> None:
    key = await two.b.key()
    assert key.startswith("lh_b_")
    async with client_of(two.a.running.url, key) as client:
        answer = await client.post("/v1/runs", json={"template": "noop", "payload": {}})
        assert answer.status_code == 421
        assert answer.json()["code"] == "wrong_cell"
        assert answer.headers["leasehold-cell-address"] == two.b.running.url
        assert key[-43:] not in answer.text
    async with client_of(two.b.running.url, key) as client:
        assert (await client.get("/v1/runs")).status_code == 200


async def test_a_key_of_the_right_cell_with_a_wrong_secret_is_refused_like_any_other(two: Two) -> None:
    key = await two.b.key()
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    async with client_of(two.b.running.url, wrong) as client:
        answer = await client.get("/v1/runs")
    assert (answer.status_code, answer.json()["code"]) == (401, "invalid_api_key")


async def test_a_key_of_a_cell_that_nobody_knows_is_refused_like_any_other(two: Two) -> None:
    unknown = (await two.b.key()).replace("lh_b_", "lh_zz_")
    async with client_of(two.a.running.url, unknown) as client:
        answer = await client.get("/v1/runs")
    assert (answer.status_code, answer.json()["code"]) == (401, "invalid_api_key")


async def test_keys_from_before_the_cells_work_on(two: Two) -> None:
    key = (await two.a.key()).replace("lh_a_", "lh_")
    async with client_of(two.a.running.url, key) as client:
        assert (await client.get("/v1/runs")).status_code == 200


async def test_a_tenant_that_the_map_places_elsewhere_is_sent_there_from_the_next_request_on(two: Two) -> None:
    """The key is remembered in the process; the map is not."""
    key = await two.a.key()
    await two.b.take_over(key)
    async with client_of(two.a.running.url, key) as old, client_of(two.b.running.url, key) as new:
        assert (await old.get("/v1/runs")).status_code == 200
        two.place(acme="b")
        answer = await old.get("/v1/runs")
        assert (answer.status_code, answer.headers["leasehold-cell-address"]) == (421, two.b.running.url)
        assert (await new.get("/v1/runs")).status_code == 200
        two.place(acme="a")
        assert (await old.get("/v1/runs")).status_code == 200
        assert (await new.get("/v1/runs")).status_code == 421


async def test_a_cell_that_refuses_a_moved_tenant_has_written_nothing(two: Two) -> None:
    """Not even that the key was used: the rows of a tenant that moved stay as the move has read them."""
    key = await two.a.key()
    two.place(acme="b")
    async with client_of(two.a.running.url, key) as client:
        assert (await client.post("/v1/runs", json={"template": "noop", "payload": {}})).status_code == 421
    connection = await asyncpg.connect(two.a.database_url)
    try:
        used = await connection.fetchval("SELECT last_used_at FROM api_key")
        runs = await connection.fetchval("SELECT count(*) FROM job")
    finally:
        await connection.close()
    assert (used, runs) == (None, 0)


async def test_the_rows_of_a_tenant_that_is_still_being_moved_here_admit_nobody(two: Two) -> None:
    """The map alone moves a tenant. Another one that lives here changes nothing."""
    key = await two.a.key()
    await two.b.take_over(key)
    for tenants in ({}, {"other": "b"}):
        two.place(**tenants)
        async with client_of(two.b.running.url, key) as client:
            answer = await client.get("/v1/runs")
        assert (answer.status_code, answer.headers.get("leasehold-cell-address")) == (421, two.a.running.url)
    two.place(acme="b")
    async with client_of(two.b.running.url, key) as client:
        assert (await client.get("/v1/runs")).status_code == 200
        two.place(other="b")  # the key is remembered
        assert (await client.get("/v1/runs")).status_code == 421


async def test_a_wrong_cell_needs_no_database_to_name_the_right_one(two: Two, settings: Settings) -> None:
    key = await two.b.key()
    away = {"cell": "a", "cells_file": str(two.a.path), "database_url": SecretStr("postgresql://x@127.0.0.1:1/none")}
    async with serving(settings.model_copy(update=away)) as running, client_of(running.url, key) as client:
        answer = await client.get("/v1/runs")
        assert (answer.status_code, answer.headers.get("leasehold-cell-address")) == (421, two.b.running.url)
        two.tell(two.a, other="a")  # from now on a key of `b` may be that of a tenant which moved here
        assert (await client.get("/v1/runs")).status_code == 503


async def test_new_and_rotated_keys_name_the_cell_that_makes_them(two: Two) -> None:
    key = await two.a.key()
    presented = parse_key(key)
    assert presented is not None
    async with client_of(two.a.running.url, key) as client:
        made = await client.post("/v1/keys", json={"client_id": "c", "scopes": ["runs:read"]})
        rotated = await client.post(f"/v1/keys/{presented.prefix}/rotate", json={})
    assert made.json()["key"].startswith("lh_a_")
    assert rotated.json()["key"].startswith("lh_a_")
    assert presented.secret not in redact(f"somebody wrote {key} into a message")


async def test_clients_follow_to_the_right_cell_and_stay_there(two: Two) -> None:
    key = await two.b.key()
    async with AsyncClient(two.a.running.url, key) as client:
        run = await client.submit("noop", {})
        assert (await client.get_run(run.id)).id == run.id
        assert [one.id async for one in client.runs()] == [run.id]
    with Client(two.a.running.url, key) as sync:
        assert (await asyncio.to_thread(sync.get_run, run.id)).id == run.id
    async with ExternalWorker(two.a.running.url, key, queues=["reports"]) as worker:
        assert not await worker.work_once(_never)


async def _never(_task: object) -> None:
    raise AssertionError("no task is due")


async def test_a_client_follows_once_and_two_cells_that_disagree_are_an_error(two: Two) -> None:
    """Each cell takes the other for the tenant's: a client that followed for ever would never say so."""
    key = await two.a.key()
    await two.b.take_over(key)
    two.tell(two.a, acme="b")
    two.tell(two.b, acme="a")
    async with AsyncClient(two.a.running.url, key) as client:
        with pytest.raises(ApiError) as refused:
            await client.submit("noop", {})
        assert refused.value.code == "wrong_cell"
    async with ExternalWorker(two.a.running.url, key, queues=["reports"]) as worker:
        with pytest.raises(Refused) as of_worker:
            await worker.work_once(_never)
        assert of_worker.value.code == "wrong_cell"


@pytest.mark.parametrize(
    ("address", "goes_to"),
    [
        ("https://b.example/api", "https://b.example/api/v1/runs?limit=1"),
        ("http://b.example", None),  # the key would leave https
        ("ftp://b.example", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_key_never_leaves_https(address: str, goes_to: str | None) -> None:
    flow = KeyAuth("https://a.example/base", "lh_key").auth_flow(
        httpx2.Request("GET", "https://a.example/base/v1/runs?limit=1")
    )
    first = next(flow)
    assert (str(first.url), first.headers["authorization"]) == (
        "https://a.example/base/v1/runs?limit=1",
        "Bearer lh_key",
    )
    try:
        second = flow.send(httpx2.Response(421, headers={"leasehold-cell-address": address}))
    except StopIteration:
        assert goes_to is None
    else:
        assert (str(second.url), second.headers["host"]) == (goes_to, "b.example")


async def test_a_person_whose_tenant_has_moved_is_told_where_the_console_is(two: Two) -> None:
    key = await two.a.key()
    async with httpx2.AsyncClient(base_url=two.a.running.url, headers=HTML, timeout=30) as browser:
        assert (await browser.post("/console/sign-in", data={"key": key})).status_code == 303
        two.place(acme="b")
        for path in ("/console/jobs", "/console/queues"):
            page = await browser.get(path)
            assert page.status_code == 421
            assert two.b.running.url in page.text
