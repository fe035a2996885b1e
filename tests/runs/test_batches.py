"""Many runs in one request: all of them or none, each as if it had been started alone."""

from __future__ import annotations

import pytest

from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, count, serving
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client, step_of
from tests.runs.test_limits import template


async def test_a_batch_of_runs_is_done_like_any_others(client: Client, worker: Worker) -> None:
    payloads = [{"payload": {}, "scope_id": f"s{number}"} for number in range(50)]
    answer = await client.post("/v1/runs/batch", template="scripted", scope="user", runs=payloads)
    assert answer.status_code == 202, answer.text
    said = answer.json()
    assert (said["template"], len(set(said["ids"]))) == ("scripted", 50)
    for place, run in enumerate(said["ids"]):
        done = await client.until(run, "succeeded")
        assert (done["scope"], done["scope_id"]) == ("user", f"s{place}")


async def test_one_payload_that_does_not_fit_refuses_them_all_and_is_named(client: Client, rows: Connection) -> None:
    runs = [{"payload": {}}, {"payload": {"surprise": 1}}]
    answer = await client.post("/v1/runs/batch", template="scripted", runs=runs)
    problem(answer, 422, "invalid_payload")
    assert answer.json()["detail"].startswith("runs[1]: ")
    assert await count(rows, "job") == 0


@pytest.mark.parametrize("runs", [[], [{"payload": {}}] * 1001, [{"surprise": 1}]])
async def test_a_batch_has_one_to_a_thousand_runs(client: Client, runs: list[dict[str, object]]) -> None:
    problem(await client.post("/v1/runs/batch", template="scripted", runs=runs), 422, "invalid_request")


async def test_a_batch_that_is_repeated_with_its_key_makes_its_runs_once(client: Client, rows: Connection) -> None:
    body = {"template": "scripted", "runs": [{"payload": {}}] * 3}
    answers = [
        await client.http.post("/v1/runs/batch", json=body, headers={"Idempotency-Key": "once"}) for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert await count(rows, "job") == 3
    other = body | {"runs": [{"payload": {}}] * 2}
    again = await client.http.post("/v1/runs/batch", json=other, headers={"Idempotency-Key": "once"})
    problem(again, 422, "idempotency_key_reused")


async def test_every_run_of_a_batch_counts_as_a_submission(runs_settings: Settings, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="t", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_key": 10})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        body = {"template": "scripted", "runs": [{"payload": {}}] * 8}
        assert (await http.post("/v1/runs/batch", json=body)).headers["RateLimit"].startswith('"submissions";r=2;')
        problem(await http.post("/v1/runs/batch", json=body), 429, "rate_limited")


async def test_a_limit_holds_for_a_batch(client: Client, worker: Worker, rows: Connection) -> None:
    await client.http.put("/v1/limits", json={"tenant_id": "acme", "key": "template:scripted", "at_most": 2})
    answer = await client.post("/v1/runs/batch", template="scripted", runs=[{"payload": {}}] * 10)
    for run in answer.json()["ids"]:
        assert step_of(await client.until(run, "succeeded"), "first")["state"] == "succeeded"


async def test_runs_that_stand_in_each_others_way_are_started_one_by_one(client: Client) -> None:
    await template(client, "queue_same_scope")
    problem(await client.post("/v1/runs/batch", template="scoped", runs=[{}]), 422, "batch_not_supported")
