"""A `dedupe` key has one unfinished run of its template: who asks again meanwhile is answered with that run."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx2
import pytest

from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import client_of, count, serving
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client
from tests.runs.test_limits import template

ONE: dict[str, Any] = {"dedupe": {"key": "order-7"}}


async def end(client: Client, run: str, status: str) -> None:
    """The one task that waits, taken and settled."""
    (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=["q"], wait=5)).json()["tasks"]
    assert task["run_id"] == run
    verb, more = ("complete", {}) if status == "succeeded" else ("fail", {"retryable": False})
    held = {"worker_id": "w", "epoch": task["epoch"]}
    assert (await client.post(f"/v1/external/tasks/{task['task_id']}/{verb}", **held, **more)).status_code == 200
    assert (await client.look(run))["status"] == status


async def test_who_asks_again_while_the_first_run_lives_is_answered_with_it(client: Client, rows: Connection) -> None:
    await template(client, "allow")
    first = await client.submit("scoped", **ONE)
    assert first.status_code == 202
    again = await client.submit("scoped", payload={"other": 1}, **ONE)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert again.headers["Location"] == first.headers["Location"]
    assert again.json() == first.json() | {"status": "waiting_worker"}
    assert (await client.look(first.json()["id"]))["dedupe"] == {"key": "order-7"}
    assert await count(rows, "job") == 1


async def test_other_keys_templates_and_tenants_are_others(client: Client, stranger: Client, rows: Connection) -> None:
    for mine in (client, stranger):
        await template(mine, "allow")
    asked = [
        client.submit("scoped", **ONE), stranger.submit("scoped", **ONE), client.submit("scripted", **ONE),
        client.submit("scoped", dedupe={"key": "order-8"}), client.submit("scoped"), client.submit("scoped"),
    ]  # fmt: skip
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [202] * 6
    assert await count(rows, "job") == 6


@pytest.mark.parametrize("policy", ["allow", "queue_same_scope", "reject_same_scope", "replace_same_scope"])
async def test_of_twenty_at_once_one_run_is_made(client: Client, rows: Connection, policy: str) -> None:
    """Also where the template has a rule for runs of the same scope: they are not held against each other."""
    await template(client, policy)
    answers = await asyncio.gather(*(client.submit("scoped", **ONE) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [202]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert await count(rows, "job") == 1


@pytest.mark.parametrize("status", ["succeeded", "failed"])
async def test_once_the_run_has_ended_the_key_is_free(client: Client, status: str) -> None:
    await template(client, "allow")
    first = await client.start("scoped", **ONE)
    await end(client, first, status)
    second = await client.submit("scoped", **ONE)
    assert (second.status_code, second.json()["id"] == first) == (202, False)


async def test_a_retry_waits_for_nobody_and_is_refused_while_another_has_its_key(client: Client) -> None:
    await template(client, "allow")
    first = await client.start("scoped", **ONE)
    await end(client, first, "failed")
    second = await client.start("scoped", **ONE)
    said = problem(await client.post(f"/v1/runs/{first}/retry"), 409, "same_key_running")
    assert second in said["detail"]
    (refused,) = (await client.post("/v1/dead-letters/replay", template="scoped")).json()["refused"]
    assert (refused["run_id"], refused["code"]) == (first, "same_key_running")
    assert (await client.look(first))["status"] == "failed"
    await end(client, second, "succeeded")
    assert (await client.post(f"/v1/runs/{first}/retry")).status_code == 202
    again = await client.submit("scoped", **ONE)
    assert (again.status_code, again.json()["id"]) == (200, first)


async def test_retries_and_submissions_at_once_leave_one_run_alive(client: Client, rows: Connection) -> None:
    await template(client, "allow")
    for _ in range(5):
        first = await client.start("scoped", **ONE)
        await end(client, first, "failed")
        retry = client.post(f"/v1/runs/{first}/retry")
        answers = await asyncio.gather(retry, *(client.submit("scoped", **ONE) for _ in range(4)))
        assert {answer.status_code for answer in answers} <= {200, 202, 409}
        (alive,) = await rows.fetch("SELECT id FROM job WHERE finished_at IS NULL")
        assert {answer.json()["id"] for answer in answers if answer.is_success} == {str(alive["id"])}
        await end(client, str(alive["id"]), "succeeded")


async def test_an_answer_of_an_idempotency_key_stands_whatever_has_become_of_the_run(client: Client) -> None:
    await template(client, "allow")
    body = {"template": "scoped"} | ONE
    first = await client.start("scoped", **ONE)
    headers = {"Idempotency-Key": "k"}
    answers = [await client.http.post("/v1/runs", json=body, headers=headers)]
    await end(client, first, "succeeded")
    answers.append(await client.http.post("/v1/runs", json=body, headers=headers))
    assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(200, first)] * 2


async def test_a_run_that_is_there_already_costs_nothing(runs_settings: Settings, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="t", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_key": 2})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        first = await client.start(**ONE)
        items = {"template": "scripted", "runs": [ONE] * 3}
        for _ in range(5):
            assert (await client.submit(**ONE)).json()["id"] == first
        assert (await http.post("/v1/runs/batch", json=items)).json()["ids"] == [first] * 3
        await client.start()
        assert (await client.submit(**ONE)).json()["id"] == first
        problem(await client.submit(), 429, "rate_limited")


@pytest.mark.parametrize(
    ("bound", "code"),
    [("submissions_per_tenant", "rate_limited"), ("queue_depth_limit", "queue_full"),
     ("unfinished_per_tenant", "too_many_unfinished")],
)  # fmt: skip
async def test_a_request_with_an_idempotency_key_finds_the_run_that_is_there_already(
    runs_settings: Settings, rows: Connection, bound: str, code: str
) -> None:
    """The tenant may start no other run now."""
    key = await create_key(rows, tenant_id="acme", client_id="t", scopes=SCOPES)
    limited = runs_settings.model_copy(update={bound: 1})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        first = await Client(http).start(**ONE)

        async def ask(header: str, **of: object) -> httpx2.Response:
            body = {"template": "scripted"} | of
            return await http.post("/v1/runs", json=body, headers={"Idempotency-Key": header})

        for header in ("new", "new", "other"):
            answer = await ask(header, **ONE)
            assert (answer.status_code, answer.json()["id"]) == (200, first)
        problem(await ask("third", dedupe={"key": "another"}), 429, code)
        problem(await ask("fourth"), 429, code)
        early = (404, "template_not_found") if bound == "queue_depth_limit" else (429, code)  # it names the queues
        problem(await ask("fifth", template="nobody"), *early)
        problem(await ask("new", dedupe={"key": "another"}), 422, "idempotency_key_reused")


@pytest.mark.parametrize("idempotency_key", [None, "new"])
@pytest.mark.parametrize(
    ("bound", "code"),
    [("submissions_per_tenant", "rate_limited"), ("queue_depth_limit", "queue_full"),
     ("unfinished_per_tenant", "too_many_unfinished")],
)  # fmt: skip
async def test_a_batch_finds_the_runs_that_are_there_already(
    runs_settings: Settings, rows: Connection, bound: str, code: str, idempotency_key: str | None
) -> None:
    """The tenant may start no other run now."""
    key = await create_key(rows, tenant_id="acme", client_id="t", scopes=SCOPES)
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    async with (
        serving(runs_settings) as running,
        serving(runs_settings.model_copy(update={bound: 1})) as limited,
        client_of(running.url, key.text) as free,
        client_of(limited.url, key.text) as http,
    ):
        there = [await Client(free).start(dedupe={"key": name}) for name in ("a", "b")]
        await rows.execute(
            "INSERT INTO rate_bucket (key, full_at) VALUES ('submit:tenant:acme', clock_timestamp() + interval '60 s')"
        )

        async def ask(*names: str | None) -> httpx2.Response:
            runs: list[dict[str, object]] = [{} if name is None else {"dedupe": {"key": name}} for name in names]
            return await http.post("/v1/runs/batch", json={"template": "scripted", "runs": runs}, headers=headers)

        problem(await ask("a", "new"), 429, code)
        problem(await ask("a", None), 429, code)
        answer = await ask("a", "b", "a")
        assert answer.status_code == 202, answer.text
        assert (answer.json()["ids"], answer.json()["existing"]) == ([*there, there[0]], there)
        assert "ratelimit" not in answer.headers
    assert await count(rows, "job") == 2


async def test_a_rerun_is_a_fresh_run_without_the_key(client: Client) -> None:
    await template(client, "allow")
    first = await client.start("scoped", **ONE)
    again = await client.post(f"/v1/runs/{first}/rerun")
    assert again.status_code == 202
    assert "dedupe" not in await client.look(again.json()["id"])


async def test_runs_of_a_batch_have_keys_too(client: Client, rows: Connection) -> None:
    await template(client, "allow")
    there = await client.start("scoped", **ONE)
    items = [ONE, {"dedupe": {"key": "a"}}, {}, {"dedupe": {"key": "a"}}, {"dedupe": {"key": "b"}}]
    answer = await client.post("/v1/runs/batch", template="scoped", runs=items)
    assert answer.status_code == 202, answer.text
    ids = answer.json()["ids"]
    assert (ids[0], ids[1] == ids[3], len(set(ids))) == (there, True, 4)
    assert answer.json()["existing"] == [there]
    assert await count(rows, "job") == 4


async def test_batches_at_once_share_their_runs(client: Client, rows: Connection) -> None:
    await template(client, "allow")
    keys = [{"dedupe": {"key": str(number)}} for number in range(20)]
    batches = [client.post("/v1/runs/batch", template="scoped", runs=runs) for runs in (keys, keys[::-1]) * 4]
    answers = await asyncio.gather(*batches)
    assert [answer.status_code for answer in answers] == [202] * 8
    assert len({run for answer in answers for run in answer.json()["ids"]}) == 20
    assert await count(rows, "job") == 20


@pytest.mark.parametrize("dedupe", [{}, {"key": ""}, {"key": "k" * 201}, {"key": 7}, {"key": "k", "more": 1}, "k"])
async def test_a_key_is_a_short_text(client: Client, dedupe: object) -> None:
    problem(await client.submit(dedupe=dedupe), 422, "invalid_request")
    batch = await client.post("/v1/runs/batch", template="scripted", runs=[{"dedupe": dedupe}])
    problem(batch, 422, "invalid_request")


async def test_a_key_that_cannot_be_stored_is_refused(client: Client) -> None:
    problem(await client.submit(dedupe={"key": "a\x00b"}), 422, "text_not_storable")


async def test_the_database_lets_no_second_run_of_a_key_live(client: Client, rows: Connection) -> None:
    await template(client, "allow")
    first, second = await client.start("scoped", **ONE), await client.start("scoped")
    with pytest.raises(Exception, match="job_dedupe"):
        await rows.execute("UPDATE job SET dedupe_key = 'order-7' WHERE id = $1", UUID(second))
    assert first
