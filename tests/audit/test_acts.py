"""Each operation that changes something leaves its row in the audit, in the transaction of the act."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import orjson
import pytest
from cryptography.fernet import Fernet
from prometheus_client import REGISTRY
from pydantic import SecretStr

from leasehold.db import audit, audit_tables
from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.test_conversion_result import TARGETS, convert
from tests.security.test_limits import _IMAGE, MAKES_NOTHING, SUBMITS, TENANT, Request, Way, World, changing, world
from tests.support.file_service import serving_files


async def of_run(world: World, verb: str = "") -> str:
    return f"/v1/jobs/{await world.run()}{verb}"


async def cancelling_job(world: World) -> Request:
    at = await of_run(world, "/cancel")
    return lambda: world.post(at, reason="enough")


async def deleting_job(world: World) -> Request:
    at = await of_run(world)
    return lambda: world.http.delete(at)


def cancelling_generation(kind: str) -> Way:
    async def prepare(world: World) -> Request:
        path = "images" if kind == "images" else "video"
        task = (await world.post(f"/v1/{path}/generations", **_IMAGE)).json()["data"]["task_id"]
        return lambda: world.post(f"/v1/{path}/cancel", task_id=task)

    return prepare


async def cancelling_conversion(world: World) -> Request:
    form = {"user_id": "u", "model_id": "1", "version": "0001", "platform": "720"}
    answer = await world.http.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"model")})
    return lambda: world.post(f"/api/v1/jobs/{answer.json()['job_id']}/cancel")


async def deleting_media(world: World) -> Request:
    ticket = await world.uploaded()
    assert (await world.post("/complete-upload", **ticket.completion)).status_code == 202
    return lambda: world.http.delete(f"/media/{ticket.media_id}")


async def promoting(world: World) -> Request:
    path = await convert(world.http, world.rows, world.running)
    return lambda: world.post(f"{path}/promote", **TARGETS)


async def disabling(world: World) -> Request:
    return lambda: world.http.patch("/v1/templates/another/1", json={"enabled": False})  # createTemplate has left it


#: What no other table says how to do.
WAYS: dict[str, Way] = {
    "cancelJob": cancelling_job,
    "deleteJob": deleting_job,
    "cancelImages": cancelling_generation("images"),
    "cancelVideo": cancelling_generation("video"),
    "cancelConversion": cancelling_conversion,
    "deleteMedia": deleting_media,
    "promoteConversion": promoting,
    "enableTemplate": disabling,
}
#: The row that each operation leaves.
ACTIONS = {
    "cancelRun": "job.cancelled",
    "cancelJob": "job.cancelled",
    "cancelImages": "job.cancelled",
    "cancelVideo": "job.cancelled",
    "cancelConversion": "job.cancelled",
    "deleteJob": "job.deleted",
    "deleteMedia": "media.deleted",
    "retryRun": "job.retried",
    "retryJob": "job.retried",
    "replayDeadLetter": "job.retried",
    "replayDeadLetters": "job.retried",
    "rerunRun": "job.repeated",
    "createOperation": "operation.submitted",
    "signalRun": "job.signalled",
    "settleJob": "job.settled",
    "settleJobs": "job.settled",
    "promoteConversion": "job.promoted",
    "createTemplate": "template.written",
    "enableTemplate": "template.disabled",
    "deleteTemplate": "template.deleted",
    "createSchedule": "schedule.created",
    "changeSchedule": "schedule.changed",
    "deleteSchedule": "schedule.deleted",
    "runScheduleNow": "schedule.run_now",
    "backfillSchedule": "schedule.backfilled",
    "saveView": "view.saved",
    "deleteView": "view.deleted",
    "createWebhook": "webhook.created",
    "changeWebhook": "webhook.changed",
    "rotateWebhookSecret": "webhook.rotated",
    "deleteWebhook": "webhook.deleted",
    "rotateCallbackSecret": "callback.rotated",
    "testWebhook": "webhook.tested",
    "redeliverWebhook": "webhook.redelivered",
    "createKey": "key.created",
    "rotateKey": "key.rotated",
    "expireKey": "key.expired",
    "revokeKey": "key.revoked",
    "changePerson": "person.disabled",
    "endSessions": "person.sessions_ended",
    "pauseQueue": "queue.paused",
    "resumeQueue": "queue.resumed",
    "drainWorker": "worker.drained",
    "setLimit": "limit.set",
    "liftLimit": "limit.lifted",
}
_SUBMISSION = "a submission: the job's own row and events say who asked for it, and when"
_PROTOCOL = "the protocol of external workers: the job's ledger has each lease, and who held it"
_READS = "it reads, by POST"
#: Operations that leave no row, each with its reason.
SPARED = {
    "createRun": _SUBMISSION,
    "createRuns": _SUBMISSION,
    "completeUpload": _SUBMISSION,
    "createConversion": _SUBMISSION,
    "generateImages": _SUBMISSION,
    "generateVideo": _SUBMISSION,
    "createUploadUrl": "the beginning of a submission",
    "uploadSourceImages": "the beginning of a submission",
    "claimExternal": _PROTOCOL,
    "heartbeatExternal": _PROTOCOL,
    "progressExternal": _PROTOCOL,
    "completeExternal": _PROTOCOL,
    "failExternal": _PROTOCOL,
    "acknowledgeCancelExternal": _PROTOCOL,
    "releaseExternal": _PROTOCOL,
    "announceExternalFiles": _PROTOCOL,
    "logExternal": _PROTOCOL,
    "emitExternal": _PROTOCOL,
    "postImagesQuery": _READS,
    "postVideoQuery": _READS,
    "hearProvider": "a provider's signal: it has no key, and only wakes a job",
}
#: Tables that an act that is refused may have written: bounds, caches of the moment, and other duties' own.
BESIDE = {
    "outbox",
    "outbox_batch",
    "audit",
    "audit_chain",
    "idempotency",
    "rate_bucket",
    "api_key",
    "leadership",
    "upload",
    "quarantine",
}
#: Promotion undoes its copies, and leaves the key's row to the next call. Before a webhook is made, older jobs are told
#: to report their ends (`job.notify`): without a webhook, they report to nobody.
UNDONE = {"promoteConversion": {"promoted_object", "conversion"}, "createWebhook": {"job"}}


def way_of(operation: str) -> Way:
    way = WAYS.get(operation) or (SUBMITS[operation][0] if operation in SUBMITS else MAKES_NOTHING[operation])
    assert way is not None, operation
    return way


def test_of_every_operation_it_is_known_which_row_it_leaves(settings: Settings) -> None:
    """A new operation that changes something leaves a row, and is named in ACTIONS; or it is named in SPARED."""
    assert changing(settings) == ACTIONS.keys() | SPARED.keys()
    assert not ACTIONS.keys() & SPARED.keys()


@pytest.fixture
async def acme(settings: Settings, rows: Connection) -> AsyncIterator[World]:
    with serving_files() as service:
        known = settings.model_copy(
            update={
                "generation_credentials": {"jimeng": SecretStr("id:secret")},
                "sealing_keys": SecretStr(Fernet.generate_key().decode()),
                "egress_allow": "127.0.0.0/8",
                "promote_url": service.url,
                "promote_token": SecretStr("service-token"),
            }
        )
        async with world(known, rows) as made:
            yield made


async def state(rows: Connection, without: set[str]) -> dict[str, Any]:
    """What all tables hold."""
    tables = [name for name in audit_tables.audit.metadata.tables if name not in BESIDE | without]
    return {
        name: await rows.fetchval(f"SELECT coalesce(sum(hashtextextended(t::text, 0)::numeric), 0) FROM {name} t")
        for name in tables
    }


async def at_rest(acme: World, rows: Connection, without: set[str]) -> dict[str, Any]:
    """As `state`, once nothing changes any more: what an act before admitted is written a moment after its answer."""
    while REGISTRY.get_sample_value("leasehold_http_requests_in_flight"):
        await asyncio.sleep(0.01)
    await acme.running.services.announcer.until_idle()
    before = await state(rows, without)
    while True:
        await asyncio.sleep(0.05)
        now = await state(rows, without)
        if now == before:
            return now
        before = now


async def audited(rows: Connection) -> list[dict[str, Any]]:
    return [dict(row) for row in await rows.fetch("SELECT * FROM audit ORDER BY at, id")]


_REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE disk_full; END';
CREATE TRIGGER refuse BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION refuse();
ALTER TABLE audit DISABLE TRIGGER refuse;
"""


async def test_an_act_and_its_row_are_committed_together_or_not_at_all(acme: World, rows: Connection) -> None:
    await rows.execute(_REFUSE)
    for operation, action in ACTIONS.items():
        request = await way_of(operation)(acme)
        before, old = await at_rest(acme, rows, UNDONE.get(operation, set())), await audited(rows)
        await rows.execute("ALTER TABLE audit ENABLE TRIGGER refuse")
        refused = await request()
        await rows.execute("ALTER TABLE audit DISABLE TRIGGER refuse")
        assert refused.status_code == 503, (operation, refused.text)
        assert await state(rows, UNDONE.get(operation, set())) == before, operation
        accepted = await request()
        assert accepted.is_success, (operation, accepted.text)
        new = (await audited(rows))[len(old) :]
        assert {row["action"] for row in new} == {action}, operation
        for row in new:
            assert_complete(row, accepted, operation)
    for head in await audit.heads(rows):
        assert await audit.verify(rows, head) is None


def assert_complete(row: dict[str, Any], answer: httpx2.Response, operation: str) -> None:
    assert (row["actor_kind"], row["actor"], row["actor_tenant"]) == ("key", "tests", TENANT), operation
    assert len(row["key_prefix"]) == 12
    assert row["source_ip"] == "127.0.0.1"
    assert row["request_id"] == answer.headers["x-request-id"], operation
    assert row["target_kind"] == row["action"].partition(".")[0]
    assert row["target"]
    everybodys = row["action"].startswith(("queue.", "worker."))
    assert row["tenant_id"] == ("*" if everybodys else TENANT), operation
    assert not {"payload", "payload_template", "secret", "url", "params"} & orjson.loads(row["details"]).keys()
