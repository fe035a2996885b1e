"""`callback_url` of a submission: each end of that job is sent there, signed, and to nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import httpx2
import pytest
from pydantic import SecretStr

from leasehold.actions import ending
from leasehold.actions.context import Target
from leasehold.api.jobs.schemas import JobAnswer
from leasehold.db.database import Connection, connect
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.kinds.job_kinds import reported_jobs_of
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.settings import Settings
from leasehold.transitions import quarantine, settlements, sweeps, webhooks
from leasehold.worker.worker import Worker
from tests.api.conftest import Running
from tests.api.media_api import MediaApi, problem
from tests.jobs.conftest import MakeClient, Maker
from tests.runs.test_webhooks import Receiver, receiver, signed

__all__ = ["receiver"]  # a fixture
KINDS = ("media", "conversion", "generation", "run")
HOOK = "http://127.0.0.1/hook?token=sesame"


async def dispatched(running: Running, rows: Connection) -> list[dict[str, Any]]:
    """The parameters of all deliveries, once a worker has dispatched."""
    await webhooks.dispatch(rows, deliveries, 60, reported_jobs_of(running.services.kinds))
    return await dispatched_before(rows)


async def dispatched_before(rows: Connection) -> list[dict[str, Any]]:
    found = await rows.fetch("SELECT params FROM job WHERE pipeline = 'webhook' ORDER BY id")
    return [row["params"] for row in found]


async def job_of(client: httpx2.AsyncClient, job_id: UUID) -> dict[str, Any]:
    answer = await client.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    JobAnswer.model_validate(answer.json())
    assert "sesame" not in answer.text, "the URL may hold a secret"
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("kind", KINDS)
async def test_each_end_of_a_job_of_every_kind_is_sent_to_its_url(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, kind: str
) -> None:
    job_id, other = await maker.make(kind, callback_url=HOOK), await maker.make(kind)
    assert (await job_of(client, job_id))["callback"] == {"host": "127.0.0.1"}
    assert "callback" not in await job_of(client, other)
    await maker.fail(job_id)
    await maker.fail(other)
    assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    assert (await client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202
    sent = await dispatched(running, rows)
    assert [params["url"] for params in sent] == [HOOK, HOOK]
    events = [params["event"] for params in sent]
    assert [(event["type"], event["data"]["id"], event["data"]["kind"]) for event in events] == [
        ("job.failed", str(job_id), kind),
        ("job.cancelled", str(job_id), kind),
    ]
    shown = (await job_of(client, job_id))["callback"]["delivery"]
    last = await job_of(client, UUID(shown["id"]))
    assert (shown["status"], last["parent"]["id"]) == ("queued", str(job_id))
    assert (last["parameters"]["event"]["type"], last["redacted"]) == ("job.cancelled", ["url"])
    assert len(await dispatched(running, rows)) == 2, "each end is sent once"


async def test_jobs_that_end_together_are_each_sent_to_their_own_url(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    urls = {await maker.make("run", callback_url=url): url for url in (HOOK, f"{HOOK}/2", f"{HOOK}/3")}
    unheard = await maker.make("run")
    for job_id in (*urls, unheard):
        await client.post(f"/v1/jobs/{job_id}/cancel")
    sent = await dispatched(running, rows)
    assert {UUID(params["event"]["data"]["id"]): params["url"] for params in sent} == urls
    for job_id in urls:
        shown = (await job_of(client, job_id))["callback"]["delivery"]
        assert (await job_of(client, UUID(shown["id"])))["parent"]["id"] == str(job_id)


async def test_a_job_is_sent_when_it_has_ended_and_not_before(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    job_id = await maker.make("run", callback_url=HOOK)
    assert await dispatched(running, rows) == []
    assert await rows.fetchval("SELECT count(*) FROM quarantine") == 0
    await client.post(f"/v1/jobs/{job_id}/cancel")
    assert [params["event"]["type"] for params in await dispatched(running, rows)] == ["job.cancelled"]


async def test_a_job_that_a_transaction_holds_delays_no_other_one(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, settings: Settings
) -> None:
    held, free, retried = [await maker.make("run", callback_url=HOOK) for _ in range(3)]
    for job_id in (held, free, retried):
        await maker.fail(job_id)
    holder = await connect(settings, "tests")
    try:
        async with holder.transaction():
            await holder.execute("SELECT 1 FROM job WHERE id = $1 FOR UPDATE", held)
            await rows.execute("SET lock_timeout = '2s'")  # who waits for the held row fails
            await webhooks.dispatch(rows, deliveries, 60, reported_jobs_of(running.services.kinds), job_id=retried)
            sent = await dispatched(running, rows)
            assert [params["event"]["data"]["id"] for params in sent] == [str(retried), str(free)]
    finally:
        await holder.close()
    assert [params["event"]["data"]["id"] for params in await dispatched(running, rows)][2:] == [str(held)]


async def test_a_failed_run_of_an_app_is_left_to_a_process_that_knows_what_follows(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """A process with other code would tell of the end, and the `on_failure` run would never follow."""
    report, pay, other = [
        Pipeline(name, steps=[Step("only", queue="q")], module="tests")
        for name in ("shop.report", "shop.pay", "bank.pay")
    ]
    pay.on_failure = report
    failed, succeeded = await maker.make("run", callback_url=HOOK), await maker.make("run", callback_url=HOOK)
    of_platform = await maker.make("run", callback_url=HOOK)
    await maker.fail(failed)
    await maker.succeed(succeeded)
    await maker.fail(of_platform)
    await rows.execute("UPDATE job SET pipeline = 'shop.pay' WHERE id = ANY($1::uuid[])", [failed, succeeded])

    async def told(pipeline: Pipeline) -> set[str]:
        kinds = reported_jobs_of(running.services.kinds)
        await webhooks.dispatch(rows, deliveries, 60, kinds, pipelines=[pipeline])
        return {params["event"]["data"]["id"] for params in await dispatched_before(rows)}

    assert await told(other) == {str(succeeded), str(of_platform)}
    paid = await maker.make("run", callback_url=HOOK)
    await maker.succeed(paid)
    await rows.execute("UPDATE job SET pipeline = 'shop.pay' WHERE id = $1", paid)
    assert await told(pay) == {str(succeeded), str(of_platform), str(failed), str(paid)}
    followers = await rows.fetch("SELECT params FROM job WHERE pipeline = 'shop.report'")
    assert [row["params"]["run_id"] for row in followers] == [str(failed)]


@pytest.mark.parametrize("many", [False, True])
async def test_a_failed_run_of_an_app_that_is_deleted_is_left_to_a_process_that_knows_what_follows(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, *, many: bool
) -> None:
    """The API has no code of the app. It hides the run at once; the row stays until the `on_failure` run is written."""
    await rows.execute("INSERT INTO known_handler (name, seen_at) VALUES ('shop.pay.only', clock_timestamp())")
    report, pay, other = [
        Pipeline(name, steps=[Step("only", queue="q")], module="tests")
        for name in ("shop.report", "shop.pay", "bank.pay")
    ]
    pay.on_failure = report
    failed = await maker.make("run", callback_url=HOOK)
    await maker.fail(failed)
    await rows.execute("UPDATE job SET pipeline = 'shop.pay' WHERE id = $1", failed)
    if many:
        services = running.services
        row = await rows.fetchrow("SELECT id, tenant_id, pipeline, notify FROM job WHERE id = $1", failed)
        assert row is not None
        target = Target(row, services.job_kinds.of("shop.pay", is_run=True), "q")
        assert await ending.delete_together(services.actions, rows, [target]) == [failed]
    else:
        assert (await client.delete(f"/v1/jobs/{failed}")).is_success
    assert (await client.get(f"/v1/jobs/{failed}")).status_code == 410

    async def told(pipeline: Pipeline) -> set[str]:
        kinds = reported_jobs_of(running.services.kinds)
        await webhooks.dispatch(rows, deliveries, 60, kinds, pipelines=[pipeline])
        return {params["event"]["data"]["id"] for params in await dispatched_before(rows)}

    assert await told(other) == set()
    assert await sweeps.forgettable_jobs(rows) == []
    assert await told(pay) == {str(failed)}
    followers = await rows.fetch("SELECT params FROM job WHERE pipeline = 'shop.report'")
    assert [follower["params"]["run_id"] for follower in followers] == [str(failed)]
    assert [job.job_id for job in await sweeps.forgettable_jobs(rows)] == [failed]


async def test_a_failed_run_that_is_deleted_after_its_code_has_gone_is_told_at_once_and_else_half_a_day_later(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    await rows.execute("INSERT INTO known_handler (name, seen_at) VALUES ('shop.pay.only', clock_timestamp())")
    ids = {}
    for task in ("shop.renamed", "shop.pay"):
        ids[task] = await maker.make("run", callback_url=HOOK)
        await maker.fail(ids[task])
        await rows.execute("UPDATE job SET pipeline = $2 WHERE id = $1", ids[task], task)
        assert (await client.delete(f"/v1/jobs/{ids[task]}")).is_success
    assert [params["event"]["data"]["id"] for params in await dispatched_before(rows)] == [str(ids["shop.renamed"])]
    assert [row["pipeline"] for row in await rows.fetch("SELECT pipeline FROM job WHERE notify")] == ["shop.pay"]
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '13 hours' WHERE notify")
    of_another_app = Pipeline("bank.pay", steps=[Step("only", queue="q")], module="tests")
    kinds = reported_jobs_of(running.services.kinds)
    await webhooks.dispatch(rows, deliveries, 60, kinds, pipelines=[of_another_app])
    assert [params["event"]["data"]["id"] for params in await dispatched_before(rows)][1:] == [str(ids["shop.pay"])]


async def test_the_end_of_a_run_whose_code_no_worker_has_any_more_is_told_before_the_run_is_deleted(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """As after a release that renames a task: what no worker tells by the end of retention, nobody could tell later."""
    failed, kept = [await maker.make("run", callback_url=HOOK) for _ in range(2)]
    for job_id in (failed, kept):
        await maker.fail(job_id)
    await rows.execute("UPDATE job SET pipeline = 'shop.renamed' WHERE id = ANY($1::uuid[])", [failed, kept])
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 s' WHERE id = $1", failed)
    of_another_app = Pipeline("bank.pay", steps=[Step("only", queue="q")], module="tests")
    kinds = reported_jobs_of(running.services.kinds)
    await webhooks.dispatch(rows, deliveries, 60, kinds, pipelines=[of_another_app])
    assert [params["event"]["data"]["id"] for params in await dispatched_before(rows)] == [str(failed)]


async def test_a_webhook_hears_of_the_job_too(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    await client.post("/v1/webhooks", json={"url": HOOK, "events": ["job.cancelled"]})
    job_id = await maker.make("run", callback_url=HOOK)
    await client.post(f"/v1/jobs/{job_id}/cancel")
    sent = await dispatched(running, rows)
    assert sorted("url" in params for params in sent) == [False, True]
    assert len({json.dumps(params["event"], sort_keys=True) for params in sent}) == 1


async def test_the_end_of_a_deleted_job_is_sent(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    job_id = await maker.make("run", callback_url=HOOK)
    assert (await client.delete(f"/v1/jobs/{job_id}")).is_success
    assert [params["event"]["type"] for params in await dispatched(running, rows)] == ["job.cancelled"]


async def test_retention_waits_for_the_message_about_a_job_that_was_deleted_while_it_ran(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    job_id = await maker.make("run", callback_url=HOOK)
    claimed = await maker.claim(job_id)
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 202
    await settlements.acknowledge_cancel(rows, [claimed.lease])
    assert await sweeps.forgettable_jobs(rows) == []
    assert [params["event"]["type"] for params in await dispatched(running, rows)] == ["job.cancelled"]
    assert [job.job_id for job in await sweeps.forgettable_jobs(rows)] == [job_id]


async def test_a_job_whose_message_nobody_can_write_is_kept_for_a_day(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run", callback_url=HOOK)
    await maker.fail(job_id)
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '23 hours'")
    assert await sweeps.forgettable_jobs(rows) == []
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '25 hours'")
    assert [job.job_id for job in await sweeps.forgettable_jobs(rows)] == [job_id]


@pytest.mark.parametrize("action", ["retry", "delete"])
async def test_the_end_of_a_job_that_is_set_aside_is_sent_before_the_job_changes(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, action: str
) -> None:
    """A failed dispatch sets the job aside for a while: the retry or the deletion does not wait for that."""
    job_id = await maker.make("run", callback_url=HOOK)
    await maker.fail(job_id)
    await quarantine.set_aside(rows, webhooks.DUTY, job_id, TimeoutError())
    assert await dispatched(running, rows) == []
    if action == "retry":
        assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    else:
        assert (await client.delete(f"/v1/jobs/{job_id}")).is_success
    assert [params["event"]["type"] for params in await dispatched(running, rows)] == ["job.failed"]


async def test_each_run_of_a_batch_is_sent_to_the_url_of_the_batch(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    await maker.make("run")  # makes the template
    body = {"template": "outside", "runs": [{}, {}], "callback_url": HOOK}
    ids = (await client.post("/v1/runs/batch", json=body)).json()["ids"]
    for run in ids:
        await client.post(f"/v1/jobs/{run}/cancel")
    sent = await dispatched(running, rows)
    assert sorted((params["event"]["data"]["id"], params["url"]) for params in sent) == sorted(
        (run, HOOK) for run in ids
    )


async def test_each_run_of_a_schedule_is_sent_to_the_url_of_the_schedule(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    await maker.make("run")  # makes the template
    body = {"template": "outside", "cron": "0 9 * * *", "scope": "user", "scope_id": "1", "callback_url": HOOK}
    made = (await client.post("/v1/schedules", json=body)).json()
    assert (made["callback_host"], "callback_url" in made) == ("127.0.0.1", False)
    at = f"/v1/schedules/{made['id']}"

    async def run_now() -> str:
        run: str = (await client.post(f"{at}/run-now")).json()["id"]
        await client.post(f"/v1/jobs/{run}/cancel")
        return run

    first = await run_now()
    wrong = await client.patch(at, json={"callback_url": "ftp://example.org"})
    problem(wrong, 422, "url_malformed")
    problem(await client.post("/v1/schedules", json=body | {"callback_url": "x"}), 422, "url_malformed")
    other = f"{HOOK}/other?token=secret"
    assert (await client.patch(at, json={"callback_url": other})).status_code == 200
    second = await run_now()
    assert (await client.patch(at, json={"cron": "0 8 * * *"})).json()["callback_host"] == "127.0.0.1"
    assert (await client.patch(at, json={"callback_url": None})).json()["callback_host"] is None
    await run_now()
    sent = await dispatched(running, rows)
    assert [(params["event"]["data"]["id"], params["url"]) for params in sent] == [(first, HOOK), (second, other)]
    details = await rows.fetch("SELECT details::text FROM audit WHERE action = 'schedule.changed'")
    assert len(details) == 3
    assert not any("secret" in row["details"] for row in details)


async def submitted(client: httpx2.AsyncClient, kind: str, url: str) -> httpx2.Response:
    if kind == "media":
        media = MediaApi(client)
        return await media.complete(await media.upload(), callback_url=url)
    if kind == "conversion":
        form = {"user_id": "u", "model_id": "1", "version": "0001", "platform": "720", "callback_url": url}
        return await client.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"x")})
    if kind == "generation":
        headers = {"X-Provider-Credential": "id:sesame"}
        body: dict[str, Any] = {"prompt": "x", "callback_url": url}
        return await client.post("/v1/images/generations", json=body, headers=headers)
    if kind == "batch":
        body = {"template": "outside", "runs": [{}], "callback_url": url}
        return await client.post("/v1/runs/batch", json=body)
    await client.post("/v1/templates", json={"type": "outside", "steps": [{"id": "a", "queue": "q"}]})
    return await client.post("/v1/runs", json={"template": "outside", "callback_url": url})


@pytest.mark.parametrize("kind", [*KINDS, "batch"])
async def test_a_url_that_could_never_get_a_message_is_refused_with_its_submission(
    client: httpx2.AsyncClient, rows: Connection, kind: str
) -> None:
    for url, code in (
        ("http://10.0.0.1/", "address_private"),
        ("http://[::1]/", "address_private"),
        ("http://169.254.169.254/latest", "address_private"),
        ("http://8.8.8.8:25/", "port_refused"),
        ("ftp://example.com/", "url_malformed"),
        ("http://a[b/", "url_malformed"),  # no name of a host: Python's own parser of URLs raises an error
        ("http://user:password@example.com/", "url_malformed"),
    ):
        problem(await submitted(client, kind, url), 422, code)
    problem(await submitted(client, kind, "https://example.com/" + "x" * 2000), 422, "invalid_request")
    assert await rows.fetchval("SELECT count(*) FROM job") == 0


async def test_a_url_without_a_readable_host_that_an_earlier_release_took_hides_nothing_else(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = (await submitted(client, "run", HOOK)).json()["id"]
    body = {"template": "outside", "cron": "0 9 * * *", "scope": "user", "scope_id": "1", "callback_url": HOOK}
    schedule_id = (await client.post("/v1/schedules", json=body)).json()["id"]
    await rows.execute("UPDATE job_callback SET url = 'http://a[b/'")
    await rows.execute("UPDATE schedule SET callback_url = 'http://a[b/'")
    await rows.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events, enabled, disabled_because)"
        " SELECT id, tenant_id, 'http://a[b/', ARRAY[]::bytea[], ARRAY['run.failed'], false, 'gone' FROM schedule"
    )
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["callback"] == {}
    (schedule,) = (await client.get("/v1/schedules")).json()["schedules"]
    assert (schedule["id"], schedule["callback_host"]) == (schedule_id, None)
    unsettled = (await client.get("/v1/unsettled", params={"what": "webhooks"})).json()
    assert [item["system"] for item in unsettled["items"]] == [None]
    assert (await client.delete(f"/v1/webhooks/{schedule_id}")).status_code == 204


async def test_a_submission_asks_no_name_server(client: httpx2.AsyncClient, rows: Connection) -> None:
    assert (await submitted(client, "run", "https://nowhere.invalid/")).status_code == 202
    assert await rows.fetchval("SELECT url FROM job_callback") == "https://nowhere.invalid/"


async def test_without_sealing_keys_a_callback_is_refused(
    client: httpx2.AsyncClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = running.services.settings.model_copy(update={"sealing_keys": SecretStr("")})
    monkeypatch.setattr(running.services, "settings", without)
    problem(await submitted(client, "run", HOOK), 503, "sealing_not_configured")


async def test_another_url_is_another_request(maker: Maker, client: httpx2.AsyncClient) -> None:
    await maker.make("run")  # makes the template
    body, key = {"template": "outside"}, {"Idempotency-Key": "k"}
    for url, status in ((HOOK, 202), (HOOK, 202), (f"{HOOK}2", 422)):
        answer = await client.post("/v1/runs", json=body | {"callback_url": url}, headers=key)
        assert answer.status_code == status, answer.text


@pytest.fixture
def worker_settings(running: Running, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a worker that delivers and does nothing else. Its deliverer reads the environment."""
    settings = running.services.settings
    for name in ("egress_allow", "sealing_keys", "database_url"):
        value = getattr(settings, name)
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        monkeypatch.setenv(f"LEASEHOLD_{name.upper()}", text)
    return settings.model_copy(update={"worker_queues": "webhooks", "poll_seconds": 0.1, "sweep_seconds": 0.2})


async def test_a_callback_is_signed_with_the_tenants_secrets_and_tried_again_under_its_id(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, worker_settings: Settings, receiver: Receiver,
    rows: Connection,
) -> None:  # fmt: skip
    await client.post("/v1/callbacks/secret")
    older, newer = [(await client.post("/v1/callbacks/secret")).json()["secret"] for _ in range(2)]
    theirs = (await (await client_with("webhooks:write", tenant="other")).post("/v1/callbacks/secret")).json()
    assert theirs["secret"] not in (older, newer)
    receiver.statuses = [500, 302, 200]
    job_id = await maker.make("run", callback_url=receiver.url)
    await client.post(f"/v1/jobs/{job_id}/cancel")
    async with Worker(worker_settings), asyncio.timeout(60):
        await receiver.hears_retries(3, rows)
        while (await job_of(client, job_id))["callback"]["delivery"]["status"] != "succeeded":
            await asyncio.sleep(0.05)
    assert len({headers["webhook-id"] for headers, _ in receiver.heard}) == 1
    headers, body = receiver.heard[-1]
    assert (json.loads(body)["type"], json.loads(body)["data"]["id"]) == ("job.cancelled", str(job_id))
    assert headers["webhook-signature"].split() == [signed(newer, headers, body), signed(older, headers, body)]


async def test_a_callback_is_signed_though_nobody_has_asked_for_the_secret_and_410_ends_it(
    maker: Maker, client: httpx2.AsyncClient, worker_settings: Settings, receiver: Receiver
) -> None:
    receiver.statuses = [410]
    job_id = await maker.make("run", callback_url=receiver.url)
    await client.post(f"/v1/jobs/{job_id}/cancel")
    async with Worker(worker_settings), asyncio.timeout(60):
        while (shown := (await job_of(client, job_id))["callback"].get("delivery", {})).get("status") != "failed":
            await asyncio.sleep(0.05)
        delivery = await job_of(client, UUID(shown["id"]))
        assert (delivery["error"]["code"], len(receiver.heard)) == ("callback_gone", 1)
        secret = (await client.post("/v1/callbacks/secret")).json()["secret"]
        receiver.statuses = [200]
        assert (await client.post(f"/v1/jobs/{shown['id']}/retry")).status_code == 202
        await receiver.hears(2)
    headers, body = receiver.heard[-1]
    newest, first = headers["webhook-signature"].split()
    assert newest == signed(secret, headers, body)
    assert first != newest
