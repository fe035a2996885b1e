"""`job.*` webhooks tell of jobs of every kind; a webhook is tried, edited, and delivers again."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx2

from leasehold.db.database import Connection
from leasehold.kinds.job_kinds import reported_jobs_of
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.security.credentials import create_key
from leasehold.transitions import webhooks
from tests.api.conftest import Running, client_of, serving
from tests.api.media_api import problem
from tests.jobs.conftest import KINDS, MakeClient, Maker

EVENTS = ["job.succeeded", "job.failed", "job.cancelled", "job.expired"]
HOOK = "http://127.0.0.1/hook"


async def subscribe(client: httpx2.AsyncClient, *events: str) -> str:
    answer = await client.post("/v1/webhooks", json={"url": HOOK, "events": events or EVENTS})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def told(running: Running, rows: Connection) -> list[dict[str, Any]]:
    """The events of all deliveries, once a worker has dispatched."""
    await webhooks.dispatch(rows, deliveries, 60, reported_jobs_of(running.services.kinds))
    found = await rows.fetch("SELECT params FROM job WHERE pipeline = 'webhook' AND params ? 'event' ORDER BY id")
    return [row["params"]["event"] for row in found]


async def test_every_kind_s_end_is_told(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """Also of jobs that were there before the webhook, and of each end of a job that is retried. Not of jobs that had
    ended before.
    """
    await maker.fail(await maker.make("run"))
    before = [await maker.make(kind, tags={"n": "1"}) for kind in KINDS if kind != "webhook"]
    await subscribe(client)
    after = [await maker.make(kind) for kind in KINDS if kind != "webhook"]
    for job_id in (*before, *after):
        await maker.fail(job_id)
        await client.post(f"/v1/jobs/{job_id}/retry")
        await client.post(f"/v1/jobs/{job_id}/cancel")
    await rows.execute("UPDATE task SET available_at = clock_timestamp()")
    events = await told(running, rows)
    said = {(event["type"], event["data"]["id"], event["data"]["kind"]) for event in events}
    kinds = [kind for kind in KINDS if kind != "webhook"]
    wanted = {
        (name, str(job_id), kind)
        for jobs in (before, after)
        for job_id, kind in zip(jobs, kinds, strict=True)
        for name in ("job.failed", "job.cancelled")
    }
    assert said == wanted
    assert len(events) == len(wanted)
    assert {str(event["data"]["tags"]) for event in events} == {"{'n': '1'}", "{}"}


async def test_a_delivery_s_own_end_is_told_to_nobody(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """Else each delivery would make another, for ever."""
    hook = await subscribe(client)
    await client.post(f"/v1/webhooks/{hook}/test")
    await client.patch(f"/v1/webhooks/{hook}", json={"enabled": True})  # looks for jobs that are not told of yet
    (job_id,) = [row["id"] for row in await rows.fetch("SELECT id FROM job WHERE pipeline = 'webhook'")]
    await maker.fail(job_id)
    assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    await maker.fail(job_id)
    assert [event["type"] for event in await told(running, rows)] == ["webhook.test"]


async def test_a_run_is_told_by_both_names_to_who_asked_for_both(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    await subscribe(client, "run.failed", "job.failed")
    await maker.fail(await maker.make("run"))
    assert sorted(event["type"] for event in await told(running, rows)) == ["job.failed", "run.failed"]


async def test_a_webhook_is_edited(client: httpx2.AsyncClient) -> None:
    hook = await subscribe(client)
    changed = (await client.patch(f"/v1/webhooks/{hook}", json={"url": f"{HOOK}/2", "events": ["job.failed"]})).json()
    assert (changed["url"], changed["events"], changed["enabled"]) == (f"{HOOK}/2", ["job.failed"], True)
    problem(await client.patch(f"/v1/webhooks/{hook}", json={"url": "ftp://x"}), 422, "url_malformed")
    problem(await client.patch(f"/v1/webhooks/{hook}", json={}), 422, "invalid_request")
    problem(await client.patch(f"/v1/webhooks/{hook}", json={"events": []}), 422, "invalid_request")
    await client.patch(f"/v1/webhooks/{hook}", json={"enabled": False})
    still = (await client.patch(f"/v1/webhooks/{hook}", json={"url": HOOK})).json()
    assert (still["url"], still["enabled"]) == (HOOK, False)
    problem(await client.post(f"/v1/webhooks/{hook}/test"), 409, "webhook_disabled")


async def test_a_message_is_delivered_again_as_the_same_message(
    client: httpx2.AsyncClient, client_with: MakeClient, rows: Connection
) -> None:
    hook = await subscribe(client)
    first = (await client.post(f"/v1/webhooks/{hook}/test")).json()["id"]
    again = (await client.post(f"/v1/webhooks/{hook}/deliveries/{first}/redeliver")).json()["id"]
    third = (await client.post(f"/v1/webhooks/{hook}/deliveries/{again}/redeliver")).json()["id"]
    params = {str(row["id"]): row["params"] for row in await rows.fetch("SELECT id, params FROM job")}
    assert params[again]["message"] == params[third]["message"] == first
    assert params[first]["event"] == params[third]["event"]
    assert params[first]["event"]["type"] == "webhook.test"
    listed = (await client.get(f"/v1/webhooks/{hook}/deliveries")).json()["deliveries"]
    assert [one["id"] for one in listed] == [third, again, first]
    other = await subscribe(client)
    for path in (f"{other}/deliveries/{first}", f"{hook}/deliveries/{UUID(int=1)}"):
        problem(await client.post(f"/v1/webhooks/{path}/redeliver"), 404, "delivery_not_found")
    stranger = await client_with("webhooks:write", tenant="other")
    problem(await stranger.post(f"/v1/webhooks/{hook}/deliveries/{first}/redeliver"), 404, "webhook_not_found")


async def test_a_repeated_request_sends_once(client: httpx2.AsyncClient, rows: Connection) -> None:
    hook = await subscribe(client)
    key = {"Idempotency-Key": "k"}
    answers = [(await client.post(f"/v1/webhooks/{hook}/test", headers=key)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


async def test_a_new_webhook_watches_the_jobs_of_its_own_tenant_only(maker: Maker, rows: Connection) -> None:
    own, others = await maker.make("run"), await maker.make("run")
    await rows.execute("UPDATE job SET tenant_id = 'somebody-else' WHERE id = $1", others)
    await webhooks.watch(rows, "acme")
    assert await rows.fetchval("SELECT notify FROM job WHERE id = $1", own)
    assert not await rows.fetchval("SELECT notify FROM job WHERE id = $1", others)


async def hooks_of(rows: Connection, *ids: str) -> list[Any]:
    return list(await rows.fetch("SELECT * FROM webhook WHERE id = ANY($1::uuid[]) ORDER BY id", list(ids)))


async def test_what_is_done_to_a_webhook_is_done_to_no_other_and_is_in_the_audit(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, running: Running, rows: Connection
) -> None:
    stranger = await client_with("webhooks:write", tenant="other")
    beside, hook, foreign = await subscribe(client), await subscribe(client, "run.failed"), await subscribe(stranger)
    body = {"template": "outside", "payload": {"webhook_id": hook, "event": {"type": "run.failed", "data": {}}}}
    await maker.make("run")  # makes the template
    run = (await client.post("/v1/runs", json=body)).json()["id"]  # its parameters look like those of a delivery
    others, url = (beside, foreign), f"/v1/webhooks/{hook}"
    before, own = await hooks_of(rows, *others), await hooks_of(rows, hook)

    listed = (await client.get("/v1/webhooks")).json()["webhooks"]
    assert [item["id"] for item in listed] == [beside, hook]
    assert set(listed[0]) == {"id", "url", "events", "enabled", "disabled_because", "created_at"}
    for asked in (
        stranger.patch(url, json={"enabled": False}), stranger.post(f"{url}/rotate"), stranger.delete(url),
        stranger.get(f"{url}/deliveries"), stranger.post(f"{url}/test"),
    ):  # fmt: skip
        problem(await asked, 404, "webhook_not_found")
    assert await hooks_of(rows, hook) == own

    await webhooks.disable(rows, UUID(hook), "acme", HOOK, None, "it is gone")
    changed = (await client.patch(url, json={"events": ["job.failed"], "url": f"{HOOK}/2"})).json()
    assert (changed["enabled"], changed["disabled_because"]) == (False, "it is gone")
    assert (await client.patch(url, json={"enabled": True})).json()["disabled_because"] is None
    secret = (await client.post(f"{url}/rotate")).json()
    assert (secret["id"], len((await hooks_of(rows, hook))[0]["secrets"])) == (hook, 2)

    sent = await client.post(f"{url}/test")
    assert sent.status_code == 202
    first = sent.json()["id"]
    again = (await client.post(f"{url}/deliveries/{first}/redeliver")).json()["id"]
    kept = await rows.fetchval("SELECT array_agg(DISTINCT keep_seconds) FROM job WHERE pipeline = 'webhook'")
    assert kept == [running.services.settings.retention_days * 86_400]
    async with asyncio.timeout(60):  # the API itself tells the workers of a message; no worker or relay is here
        while await rows.fetchval("SELECT count(*) FROM outbox WHERE job_id = ANY($1::uuid[])", [first, again]):
            await asyncio.sleep(0.02)
    problem(await client.post(f"{url}/deliveries/{run}/redeliver"), 404, "delivery_not_found")
    deliveries_of_hook = (await client.get(f"{url}/deliveries")).json()["deliveries"]
    assert [item["id"] for item in deliveries_of_hook] == [again, first]
    await rows.execute("UPDATE job SET tenant_id = 'other' WHERE id = $1", UUID(first))
    problem(await client.post(f"{url}/deliveries/{first}/redeliver"), 404, "delivery_not_found")

    assert (await client.delete(url)).status_code == 204
    assert await hooks_of(rows, hook, *others) == before
    acts = await rows.fetch(
        "SELECT action, details::jsonb - 'changed' AS details FROM audit WHERE target = $1 ORDER BY seq", hook
    )
    edited = {"host": "127.0.0.1", "events": ["job.failed"]}
    assert [(act["action"], act["details"]) for act in acts] == [
        ("webhook.created", {"host": "127.0.0.1", "events": ["run.failed"]}),
        ("webhook.changed", edited | {"enabled": False}),
        ("webhook.changed", edited | {"enabled": True}),
        ("webhook.rotated", {}),
        ("webhook.tested", {"delivery": first}),
        ("webhook.redelivered", {"delivery": again, "message": first}),
        ("webhook.deleted", {"host": "127.0.0.1"}),
    ]


async def test_a_webhook_that_is_made_or_enabled_hears_of_the_jobs_that_are_there(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    first = await maker.make("run")
    hook = await subscribe(client)
    assert await rows.fetchval("SELECT notify FROM job WHERE id = $1", first)
    await client.patch(f"/v1/webhooks/{hook}", json={"enabled": False})
    second = await maker.make("run")
    await client.patch(f"/v1/webhooks/{hook}", json={"events": ["job.failed"]})
    assert not await rows.fetchval("SELECT notify FROM job WHERE id = $1", second)
    await client.patch(f"/v1/webhooks/{hook}", json={"enabled": True})
    assert await rows.fetchval("SELECT notify FROM job WHERE id = $1", second)


async def test_a_message_that_a_client_asks_for_is_charged_as_a_submission_and_its_answer_says_what_is_left(
    client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    hook = await subscribe(client)
    limited = running.services.settings.model_copy(update={"submissions_per_key": 2})
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=("webhooks:write",))
    async with serving(limited) as other, client_of(other.url, key.text) as http:
        for left in (1, 0):
            answer = await http.post(f"/v1/webhooks/{hook}/test")
            assert answer.headers["ratelimit"].startswith(f'"submissions";r={left};')
        problem(await http.post(f"/v1/webhooks/{hook}/test"), 429, "rate_limited")
