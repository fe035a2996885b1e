"""Whatever creates does so once for an Idempotency-Key, however often it is asked, and its first answer stands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.http import early, idempotent
from leasehold.api.runs import creating
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.runs.conftest import Client

STEPS = [{"id": "only", "queue": "q"}]
_END = datetime.now(UTC) - timedelta(days=1)
PAST = {"start": (_END - timedelta(hours=2)).isoformat(), "end": _END.isoformat()}
#: What is asked for, and another request of the same kind. `{...}`: an id of what is there.
CREATES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "createRun": ("/v1/runs", {"template": "there"}, {"template": "scripted"}),
    "createRuns": ("/v1/runs/batch", {"template": "there", "runs": [{}]}, {"template": "there", "runs": [{}, {}]}),
    "createTemplate": ("/v1/templates", {"type": "new", "steps": STEPS}, {"type": "other", "steps": STEPS}),
    "createWebhook": ("/v1/webhooks", {"url": "https://127.0.0.1/"}, {"url": "https://127.0.0.2/"}),
    "rotateWebhookSecret": ("/v1/webhooks/{webhook}/rotate", {}, None),
    "rotateCallbackSecret": ("/v1/callbacks/secret", {}, None),
    "rerunRun": ("/v1/runs/{run}/rerun", {}, None),
    "replayDeadLetters": ("/v1/dead-letters/replay", {"code": "broken"}, {"code": "broken", "canary": True}),
    "createSchedule": (
        "/v1/schedules",
        {"template": "there", "cron": "@daily"},
        {"template": "there", "cron": "@hourly"},
    ),
    "runScheduleNow": ("/v1/schedules/{schedule}/run-now", {}, None),
    "backfillSchedule": ("/v1/schedules/{schedule}/backfill", PAST, PAST | {"end": PAST["start"]}),
}


@pytest.fixture
def runs_settings(runs_settings: Settings) -> Settings:
    key = SecretStr(Fernet.generate_key().decode())
    return runs_settings.model_copy(update={"sealing_keys": key, "egress_allow": "127.0.0.0/8"})


async def world(client: Client) -> dict[str, str]:
    assert (await client.post("/v1/templates", type="there", steps=STEPS)).status_code == 201
    hook = await client.post("/v1/webhooks", url="https://127.0.0.3/")
    schedule = await client.post("/v1/schedules", template="there", cron="0 * * * *")
    return {"run": await client.start("there"), "webhook": hook.json()["id"], "schedule": schedule.json()["id"]}


@pytest.mark.parametrize("operation", CREATES)
async def test_what_is_asked_for_again_is_answered_again_and_made_once(client: Client, operation: str) -> None:
    path, body, other = CREATES[operation]
    at = path.format(**await world(client))
    asked = [client.http.post(at, json=body, headers={"Idempotency-Key": "k"}) for _ in range(4)]
    answers = await asyncio.gather(*asked)
    for answer in answers:
        if answer.status_code != 409:
            assert answer.is_success, answer.text
        else:
            problem(answer, 409, "idempotency_key_in_flight")
    first = next(answer for answer in answers if answer.is_success)
    again = await client.http.post(at, json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert {answer.text for answer in answers if answer.is_success} == {first.text}
    if other is not None:
        wrong = await client.http.post(at, json=other, headers={"Idempotency-Key": "k"})
        problem(wrong, 422, "idempotency_key_reused")


async def test_a_key_that_was_used_for_one_thing_is_refused_for_another_of_its_kind(client: Client) -> None:
    first = await world(client)
    hook = await client.post("/v1/webhooks", url="https://127.0.0.4/")
    schedule = await client.post("/v1/schedules", template="there", cron="0 * * * *")
    second = {"run": await client.start("there"), "webhook": hook.json()["id"], "schedule": schedule.json()["id"]}
    for operation, (path, body, _) in CREATES.items():
        if path.format(**first) != path:
            headers = {"Idempotency-Key": operation}
            assert (await client.http.post(path.format(**first), json=body, headers=headers)).is_success
            again = await client.http.post(path.format(**second), json=body, headers=headers)
            problem(again, 422, "idempotency_key_reused")


async def test_an_answer_stands_whatever_has_changed_since(client: Client) -> None:
    made = await client.http.post(
        "/v1/templates", json={"type": "new", "steps": STEPS}, headers={"Idempotency-Key": "t"}
    )
    assert made.status_code == 201
    await client.http.patch("/v1/templates/new/1", json={"enabled": False})
    again = await client.http.post(
        "/v1/templates", json={"type": "new", "steps": STEPS}, headers={"Idempotency-Key": "t"}
    )
    assert (again.status_code, again.json()) == (201, made.json())
    problem(await client.post("/v1/templates", type="new", steps=STEPS), 409, "template_exists")


async def test_a_repeated_act_on_a_run_gets_the_first_answer_although_the_run_is_gone(
    client: Client, rows: Any
) -> None:
    """Without a stored answer the request is judged as it is now."""
    run = (await world(client))["run"]
    acts = {"rerun": None, "signals/go": {"payload": 1}}

    async def act(name: str, run: str = run) -> httpx2.Response:
        return await client.http.post(f"/v1/runs/{run}/{name}", json=acts[name], headers={"Idempotency-Key": name})

    first = {name: await act(name) for name in acts}
    assert {name: answer.status_code for name, answer in first.items()} == dict.fromkeys(acts, 202)
    await rows.execute("DELETE FROM job WHERE id = $1", UUID(run))
    count = await rows.fetchval("SELECT count(*) FROM job")
    for name, answer in first.items():
        again = await act(name)
        assert (again.status_code, again.json()) == (202, answer.json()), name
        problem(await act(name, str(uuid4())), 422, "idempotency_key_reused")
    assert await rows.fetchval("SELECT count(*) FROM job") == count
    await rows.execute("DELETE FROM idempotency")
    for name in acts:
        problem(await act(name), 404, "run_not_found")


@pytest.mark.parametrize(
    "operation", ["rerunRun", "signalRun", "runScheduleNow", "backfillSchedule", "createWebhook", "createSchedule"]
)
async def test_a_key_that_expires_between_two_looks_is_to_be_sent_again(
    client: Client, rows: Any, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The answer was stored when the API asked, and is not any more when the work would begin: nothing was checked."""
    path, body, _ = (CREATES | {"signalRun": ("/v1/runs/{run}/signals/go", {}, None)})[operation]
    at = path.format(**await world(client))

    async def is_answered(*_: Any) -> bool:
        return True

    monkeypatch.setattr(idempotent, "is_answered", is_answered)
    count = await rows.fetchval("SELECT count(*) FROM job")
    problem(await client.http.post(at, json=body, headers={"Idempotency-Key": "k"}), 409, "idempotency_key_in_flight")
    assert await rows.fetchval("SELECT count(*) FROM job") == count
    monkeypatch.undo()
    assert (await client.http.post(at, json=body, headers={"Idempotency-Key": "k"})).is_success


async def test_a_run_is_looked_for_among_the_stored_answers_only_where_a_limit_refuses_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation of the key finds the answer: an accepted request needs no query before that."""

    async def is_answered(*_: Any) -> bool:
        raise AssertionError

    for module in (creating, early, idempotent):
        monkeypatch.setattr(module, "is_answered", is_answered)
    keys = [{"Idempotency-Key": key} for key in ("a", "a", "b")]
    answers = [await client.http.post("/v1/runs", json={"template": "scripted"}, headers=key) for key in keys]
    ids = [answer.json()["id"] for answer in answers]
    assert ids[0] == ids[1] != ids[2]


async def test_a_webhooks_secret_is_not_among_the_kept_answers(client: Client, rows: Any) -> None:
    made = await client.http.post("/v1/webhooks", json={"url": "https://127.0.0.1/"}, headers={"Idempotency-Key": "w"})
    secret = made.json()["secret"]
    kept = await rows.fetchval("SELECT body FROM idempotency WHERE key = 'w'")
    assert secret.removeprefix("whsec_").encode() not in kept


async def test_of_every_operation_that_creates_it_is_known_how_it_is_repeated(running: Running) -> None:
    """A new one takes an Idempotency-Key, or is named here with the reason why it needs none."""
    async with client_of(running.url) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    takes = {
        said["operationId"]: any(one["name"] == "Idempotency-Key" for one in said.get("parameters", ()))
        for path in paths.values()
        for method, said in path.items()
        if method == "post" and {"201", "202"} & said["responses"].keys()
    }
    without = {name for name, takes_it in takes.items() if not takes_it}
    assert without <= {
        "completeUpload",  # one media has one job
        "cancelRun", "cancelJob", "cancelImages", "cancelVideo", "cancelConversion",  # asked twice, it happens once
        "drainWorker",
        "retryRun", "retryJob", "replayDeadLetter",  # what was revived is failed no more
        "settleJob", "settleJobs",  # what was settled is unknown no more
        "createKey", "rotateKey",  # the answer that is repeated would hold a secret: a list shows what was made twice
    }  # fmt: skip
