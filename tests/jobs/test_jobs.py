"""Every job is one, whatever its kind: listed, read, explained, followed, cancelled, retried and deleted alike."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx2
import pytest
import time_machine

from leasehold.actions.context import Actions
from leasehold.api.auth import security
from leasehold.api.jobs import dead_letters
from leasehold.api.jobs.schemas import EventPage, JobAnswer, JobList
from leasehold.db.database import Connection
from leasehold.settings import Settings
from leasehold.transitions import jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion
from tests.api.conftest import Running
from tests.api.driver import finish_all
from tests.api.media_api import TO_THE_SECOND, MediaApi, problem
from tests.factories import Rows, assert_history
from tests.jobs.conftest import KINDS, SCOPES, TENANT_SCOPES, MakeClient, Maker
from tests.support.lock_waits import until_waiting

every_kind = pytest.mark.parametrize("kind", KINDS)
#: What a request names a job by; the body that it needs.
REQUESTS = [
    ("GET", ""),
    ("GET", "/explain"),
    ("GET", "/events"),
    ("POST", "/cancel"),
    ("POST", "/retry"),
    ("DELETE", ""),
]


async def look(client: httpx2.AsyncClient, job_id: UUID) -> dict[str, Any]:
    answer = await client.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    JobAnswer.model_validate(body)
    return body


async def ids(client: httpx2.AsyncClient, q: str = "") -> list[str]:
    answer = await client.get("/v1/jobs", params={"q": q})
    assert answer.status_code == 200, answer.text
    JobList.model_validate(answer.json())
    return [job["id"] for job in answer.json()["jobs"]]


@every_kind
async def test_a_job_has_one_shape(maker: Maker, client: httpx2.AsyncClient, kind: str) -> None:
    await maker.make("media" if kind == "run" else "run")
    job_id = await maker.make(kind)
    body = await look(client, job_id)
    assert (body["id"], body["kind"], body["tenant_id"]) == (str(job_id), kind, "acme")
    assert body["waits_for"]
    assert await ids(client, f"kind:{kind}") == [str(job_id)]
    explained = (await client.get(f"/v1/jobs/{job_id}/explain")).json()
    assert explained["reasons"]
    await maker.fail(job_id)
    body = await look(client, job_id)
    assert (body["status"], body["error"]["code"]) == ("failed", "broken")
    assert [attempt["code"] for attempt in body["steps"][0]["attempts"]] == ["broken"]
    assert body["waits_for"] == []
    assert await ids(client, "status:failed code:broken") == [str(job_id)]


async def test_the_list_has_all_kinds_newest_first_by_pages(maker: Maker, client: httpx2.AsyncClient) -> None:
    made = [str(await maker.make(kind)) for kind in (*KINDS, *KINDS)]
    assert await ids(client) == made[::-1]
    pages = []
    cursor: dict[str, Any] = {}
    while True:
        body = (await client.get("/v1/jobs", params={"limit": 3} | cursor)).json()
        pages.append([job["id"] for job in body["jobs"]])
        if body["next_cursor"] is None:
            break
        cursor = {"cursor": body["next_cursor"]}
    assert [len(page) for page in pages] == [3, 3, 3, 1]
    assert [job for page in pages for job in page] == made[::-1]


async def test_a_credential_is_redacted_and_named(maker: Maker, client: httpx2.AsyncClient) -> None:
    body = await look(client, await maker.make("generation"))
    assert body["redacted"] == ["credential"]
    assert "credential" not in body["parameters"]
    assert body["parameters"]["prompt"] == "x"


@every_kind
async def test_events_come_by_pages_and_as_a_stream(maker: Maker, client: httpx2.AsyncClient, kind: str) -> None:
    job_id = await maker.make(kind)
    await maker.fail(job_id)
    whole = (await client.get(f"/v1/jobs/{job_id}/events")).json()
    EventPage.model_validate(whole)
    paged: list[Any] = []
    after: int | None = 0
    while after is not None:
        page = (await client.get(f"/v1/jobs/{job_id}/events", params={"after": after, "limit": 1})).json()
        paged += page["events"]
        after = page["next_after"]
    assert paged == whole["events"]
    stream = {"Accept": "text/event-stream"}
    followed = await client.get(f"/v1/jobs/{job_id}/events", headers=stream)
    assert followed.headers["content-type"].startswith("text/event-stream")
    assert followed.text.count("\nid: ") == len(paged)
    last = stream | {"Last-Event-ID": str(paged[-1]["seq"])}
    assert (await client.get(f"/v1/jobs/{job_id}/events", headers=last)).status_code == 204


@every_kind
async def test_a_job_that_waits_is_cancelled_at_once(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, kind: str
) -> None:
    job_id = await maker.make(kind)
    answer = await client.post(f"/v1/jobs/{job_id}/cancel", json={"reason": "no need"})
    assert (answer.status_code, answer.json()) == (202, {"id": str(job_id), "status": "cancelled"})
    assert (await look(client, job_id))["cancel"] == {"reason": "no need", "by": "client tests"}
    assert await ids(client, f"status:cancelled kind:{kind}") == [str(job_id)]
    problem(await client.post(f"/v1/jobs/{job_id}/cancel"), 409, "resource_invalid_state")
    await assert_history(Rows(rows), job_id)


async def test_the_cancel_of_a_generation_is_told_to_its_provider(maker: Maker, client: httpx2.AsyncClient) -> None:
    job_id = await maker.make("generation")
    await client.post(f"/v1/jobs/{job_id}/cancel")
    listed = (await client.get("/v1/jobs", params={"q": "template:generation_withdrawal"})).json()["jobs"]
    (withdrawal,) = [await look(client, UUID(job["id"])) for job in listed]
    assert withdrawal["parent"] == {"id": str(job_id), "relation": "made_for"}


@every_kind
async def test_a_failed_job_is_retried(maker: Maker, client: httpx2.AsyncClient, rows: Connection, kind: str) -> None:
    job_id = await maker.make(kind)
    problem(await client.post(f"/v1/jobs/{job_id}/retry"), 409, "resource_invalid_state")
    await maker.fail(job_id)
    answer = await client.post(f"/v1/jobs/{job_id}/retry")
    # The run's step is an external worker's, and the generation waits at its limits first.
    status = {"run": "waiting_worker", "generation": "pending"}.get(kind, "queued")
    assert (answer.status_code, answer.json()) == (202, {"id": str(job_id), "status": status})
    await maker.succeed(job_id)
    assert (await look(client, job_id))["status"] == "succeeded"
    await assert_history(Rows(rows), job_id)


async def test_a_retry_from_a_step_runs_it_again(maker: Maker, client: httpx2.AsyncClient) -> None:
    job_id = await maker.make("media")
    await settlements.complete(maker.rows, [Completion((await maker.claim(job_id)).lease, [], {"n": 1})])
    await maker.fail(job_id)
    problem(await client.post(f"/v1/jobs/{job_id}/retry", json={"from_step": "x"}), 422, "unknown_step")
    problem(await client.post(f"/v1/jobs/{job_id}/retry", json={"payload": {}}), 422, "payload_fixed")
    assert (await client.post(f"/v1/jobs/{job_id}/retry", json={"from_step": "resize"})).status_code == 202
    states = {step["id"]: step["state"] for step in (await look(client, job_id))["steps"]}
    assert states == {"resize": "pending", "compress": "blocked", "webp": "blocked"}


async def test_a_retried_generation_has_its_time_and_its_limits_again(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("generation", server_id="a100")
    await maker.fail(job_id)
    await rows.execute(
        "UPDATE job SET params = jsonb_set(params, '{deadline_at}', '\"2026-01-01T00:00:00+00:00\"') WHERE id = $1",
        job_id,
    )
    await rows.execute("DELETE FROM gate_job")
    with time_machine.travel(datetime.now(UTC) - timedelta(days=1), tick=True):  # an API whose clock is wrong
        assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    deadline_at = datetime.fromisoformat((await look(client, job_id))["parameters"]["deadline_at"])
    assert deadline_at > await rows.fetchval("SELECT clock_timestamp()")
    assert await rows.fetchval("SELECT count(*) FROM gate_job WHERE key = 'server:a100' AND tenant_id = '*'") == 1


async def test_a_conversion_is_not_retried_beside_the_next_of_its_user(
    maker: Maker, client: httpx2.AsyncClient
) -> None:
    job_id = await maker.make("conversion", user_id="me")
    await maker.fail(job_id)
    await maker.make("conversion", user_id="me")
    problem(await client.post(f"/v1/jobs/{job_id}/retry"), 409, "same_key_running")


@every_kind
async def test_an_ended_job_is_deleted_with_all_that_it_has(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, running: Running, kind: str
) -> None:
    job_id = await maker.make(kind)
    prefix = await rows.fetchval("SELECT output_prefix FROM job WHERE id = $1", job_id)
    await running.services.store.put(f"{prefix}/more.bin", b"x", content_type="text/plain", metadata={})
    await maker.fail(job_id)
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    for method, path in REQUESTS:
        gone = problem(await client.request(method, f"/v1/jobs/{job_id}{path}"), 410, "job_deleted")
        assert re.fullmatch(rf"The job was deleted at {TO_THE_SECOND}\.", gone["detail"]), gone["detail"]
    assert await ids(client, "status:failed") == []
    assert [stored.key async for stored in running.services.store.list(f"{prefix}/")] == []
    tables = ("job", "task", "run", "media", "conversion", "generation", "failure", "output")
    left = {table: await rows.fetchval(f"SELECT count(*) FROM {table}") for table in tables}
    assert left == dict.fromkeys(tables, 0)


async def test_a_deleted_picture_is_no_picture_any_more(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    media = MediaApi(client)
    ticket = await media.submitted()
    job_id = await rows.fetchval("SELECT job_id FROM media")
    await finish_all(rows, ticket.media_id)
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    problem(await media.look(ticket), 404, "media_not_found")


async def test_a_delete_is_done_although_the_database_goes_away_after_its_commit(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone is committed: an error would tell the client that the job is still there."""
    job_id = await maker.make("media")

    async def away(*_arguments: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(sweeps, "forget_jobs", away)
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_deleted")


async def test_a_job_with_a_lease_is_deleted_when_its_worker_has_settled(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    """The ledger says how the lease ended: a row that a worker holds a lease of never goes before that."""
    job_id = await maker.make("media")
    claimed = await maker.claim(job_id)
    for _ in range(2):
        answer = await client.delete(f"/v1/jobs/{job_id}")
        assert (answer.status_code, answer.json()) == (202, {"id": str(job_id), "status": "cancel_requested"})
    assert (await look(client, job_id))["deleting"]
    assert await sweeps.forgettable_jobs(rows) == []
    await settlements.acknowledge_cancel(rows, [claimed.lease])
    await assert_history(Rows(rows), job_id)
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_deleted")  # retention has not been here yet
    due = await sweeps.forgettable_jobs(rows)
    await sweeps.forget_jobs(rows, [job.job_id for job in due])
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_deleted")


async def test_a_job_that_is_deleted_is_not_retried_and_one_that_is_retried_is_not_deleted_at_once(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
    problem(await client.post(f"/v1/jobs/{job_id}/retry"), 410, "job_expired")
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() + interval '1 hour'")
    assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204  # cancelled first: nobody had a lease
    problem(await client.get(f"/v1/runs/{job_id}"), 404, "run_not_found")


async def test_a_job_past_its_retention_leaves_a_tombstone(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_expired")  # retention has not been here yet
    await sweeps.forget_jobs(rows, [job_id])
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_expired")


@every_kind
async def test_nothing_is_written_for_a_deletion_that_a_retry_has_forestalled(
    kind: str, maker: Maker, running: Running, rows: Connection
) -> None:
    """Retention has found the job, and somebody retries it before its rows go. What the kinds write of a job that goes
    (a remembered conversion, a deleted picture, a file that may still arrive) would be wrong of one that stays.
    """
    job_id = await maker.make(kind)
    await rows.execute(  # an output of an external worker, whose URL may outlive the job
        "INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)"
        " SELECT id, 'x', job_id, 'acme', step, 'runs/x', 1, repeat('0', 64), 'text/plain' FROM task"
        " WHERE job_id = $1 AND position = 0",
        job_id,
    )
    await rows.execute("UPDATE task SET queue = 'ext:q' WHERE job_id = $1", job_id)
    await maker.fail(job_id)
    written = {}
    for expiry in ("+ interval '1 hour'", "- interval '1 second'"):
        await rows.execute(f"UPDATE job SET expires_at = clock_timestamp() {expiry} WHERE id = $1", job_id)
        async with rows.transaction():
            for hook in running.services.actions.before_jobs_go:
                await hook(rows, [job_id])
            written[expiry[0]] = await rows.fetchval("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
    assert written == {"+": False, "-": True}  # a transaction that writes a row has an id


async def test_that_a_job_has_gone_is_told_to_its_own_tenant_alone(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    stranger = await client_with(*TENANT_SCOPES, tenant="other")
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
    for _ in ("before retention has been here", "after it"):
        problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_expired")
        problem(await stranger.get(f"/v1/jobs/{job_id}"), 404, "job_not_found")
        await sweeps.forget_jobs(rows, [job_id])
    assert await rows.fetchval("SELECT count(*) FROM job") == 0


async def test_a_dead_letter_goes_with_its_job(maker: Maker, client: httpx2.AsyncClient, rows: Connection) -> None:
    job_id = await maker.make("run")
    task_id = await rows.fetchval("SELECT id FROM task WHERE step = 'a'")
    problem(await client.post(f"/v1/dead-letters/{task_id}/replay"), 404, "dead_letter_not_found")  # not failed yet
    await maker.fail(job_id, "broken")

    async def found() -> list[Any]:
        letters = (await client.get("/v1/dead-letters")).json()["dead_letters"]
        groups = (await client.get("/v1/dead-letters/groups")).json()["groups"]
        return [letter["job_id"] for letter in letters] + [group["n"] for group in groups]

    assert await found() == [str(job_id), 1]
    await rows.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
    assert await found() == []
    problem(await client.post(f"/v1/dead-letters/{task_id}/replay"), 404, "dead_letter_not_found")
    answer = await client.post("/v1/dead-letters/replay", json={"code": "broken"})
    assert answer.json() == {"replayed": [], "refused": []}


async def test_a_replay_that_comes_too_late_for_its_job_changes_nothing(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has retried the job, or it has expired, after this one had found it: what the retry had written
    by then, such as the cancel of older runs, is rolled back.
    """
    job_id = await maker.make("run")
    await maker.fail(job_id, "broken")

    async def too_late(_actions: Any, connection: Connection, *_: Any, **__: Any) -> None:
        await connection.execute("UPDATE job SET priority = 0")

    monkeypatch.setattr(dead_letters, "revive", too_late)
    await rows.execute("UPDATE job SET priority = 2")
    answer = await client.post("/v1/dead-letters/replay", json={"code": "broken"})
    assert answer.json() == {"replayed": [], "refused": []}
    assert await rows.fetchval("SELECT priority FROM job") == 2


async def test_a_failure_that_a_workflow_handles_is_no_dead_letter(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id, "broken")
    task_id = await rows.fetchval("UPDATE task SET contained = true WHERE status = 'failed' RETURNING id")
    assert (await client.get("/v1/dead-letters")).json()["dead_letters"] == []
    problem(await client.post(f"/v1/dead-letters/{task_id}/replay"), 404, "dead_letter_not_found")
    await rows.execute("UPDATE task SET contained = false WHERE id = $1", task_id)
    assert (await client.post(f"/v1/dead-letters/{task_id}/replay")).status_code == 202


async def test_a_key_without_a_scope_of_jobs_sees_and_replays_dead_letters_of_runs_alone(
    maker: Maker, client_with: MakeClient, rows: Connection
) -> None:
    """As in the releases whose dead letters were those of runs."""
    failed = {kind: await maker.make(kind) for kind in ("run", "media")}
    tasks = {}
    for kind, job_id in failed.items():
        await maker.fail(job_id, "broken")
        tasks[kind] = await rows.fetchval("SELECT id FROM task WHERE job_id = $1 AND status = 'failed'", job_id)
    narrow = await client_with(*(scope for scope in TENANT_SCOPES if not scope.startswith("jobs:")))
    letters = (await narrow.get("/v1/dead-letters")).json()["dead_letters"]
    assert [letter["job_id"] for letter in letters] == [str(failed["run"])]
    problem(await narrow.post(f"/v1/dead-letters/{tasks['media']}/replay"), 404, "dead_letter_not_found")
    assert (await narrow.post(f"/v1/dead-letters/{tasks['run']}/replay")).status_code == 202
    await maker.fail(failed["run"], "broken")
    answer = await narrow.post("/v1/dead-letters/replay", json={"code": "broken"})
    assert answer.json() == {"replayed": [str(failed["run"])], "refused": []}


async def test_a_link_to_a_job_that_went_says_so_for_a_day(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, settings: Settings
) -> None:
    job_id = await maker.make("run")
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    for hours, status, code in ((23, 410, "job_deleted"), (25, 404, "job_not_found")):
        await rows.execute("UPDATE tombstone SET at = clock_timestamp() - make_interval(hours => $1)", hours)
        await jobs.forget_tombstones(rows, settings.tombstone_hours)
        problem(await client.get(f"/v1/jobs/{job_id}"), status, code)


@pytest.mark.parametrize(
    ("act", "status", "sentence"),
    [
        ("UPDATE job SET status = 'cancelled' WHERE id = $1", 409, "The job is cancelled"),
        ("UPDATE job SET keep_seconds = 0, expires_at = clock_timestamp() WHERE id = $1", 410, "The job was deleted"),
    ],
)
async def test_who_retries_beside_another_hears_what_the_other_has_made_of_the_job(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, act: str, status: int, sentence: str
) -> None:
    """The retry has read the job as failed, and waits for its row. It once said that the job is failed."""
    job_id = await maker.make("run")
    await maker.fail(job_id)
    async with asyncio.timeout(60):
        async with rows.transaction():
            await rows.execute(act, job_id)
            second = asyncio.create_task(client.post(f"/v1/jobs/{job_id}/retry"))
            await until_waiting(rows)
        answer = await second
    assert (answer.status_code, answer.json()["detail"].startswith(sentence)) == (status, True), answer.text


async def test_who_deletes_a_job_that_has_just_gone_hears_that_it_was_deleted_and_is_not_in_the_audit(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    async with asyncio.timeout(60):
        async with rows.transaction():
            await rows.execute("UPDATE job SET keep_seconds = 0, expires_at = clock_timestamp() WHERE id = $1", job_id)
            await sweeps.forget_jobs(rows, [job_id])
            deleting = asyncio.create_task(client.delete(f"/v1/jobs/{job_id}"))
            await until_waiting(rows)
        problem(await deleting, 410, "job_deleted")
    assert await rows.fetchval("SELECT count(*) FROM audit WHERE action = 'job.deleted'") == 0


@pytest.mark.parametrize("sends_webhooks", [True, False])
async def test_a_job_that_ends_while_it_is_deleted_is_deleted_at_once(
    maker: Maker,
    client: httpx2.AsyncClient,
    rows: Connection,
    monkeypatch: pytest.MonkeyPatch,
    sends_webhooks: bool,
) -> None:
    async def nothing_to_send(*_arguments: object, **_options: object) -> list[object]:
        return []

    if not sends_webhooks:
        monkeypatch.setattr(Actions, "dispatch", nothing_to_send)
    job_id = await maker.make("run")
    async with asyncio.timeout(60):
        async with rows.transaction():
            await maker.fail(job_id)
            deleting = asyncio.create_task(client.delete(f"/v1/jobs/{job_id}"))
            await until_waiting(rows)
        assert (await deleting).status_code == 204
    problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_deleted")
    assert await rows.fetchval("SELECT count(*) FROM job WHERE id = $1", job_id) == 0
    assert await rows.fetchval("SELECT count(*) FROM audit WHERE action = 'job.deleted'") == 1


async def test_a_stranger_finds_no_job_and_changes_none(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient
) -> None:
    stranger = await client_with(*TENANT_SCOPES, tenant="other")
    for kind in KINDS:
        job_id, gone = await maker.make(kind), await maker.make(kind)
        await client.delete(f"/v1/jobs/{gone}")
        for one in (job_id, gone):
            for method, path in REQUESTS:
                problem(await stranger.request(method, f"/v1/jobs/{one}{path}"), 404, "job_not_found")
        for q in ("", f"kind:{kind}", "tenant:acme", str(job_id)):
            assert await ids(stranger, q) == []
        assert (await look(client, job_id))["status"] in ("pending", "queued", "waiting_worker")


@every_kind
async def test_the_kind_s_own_scope_and_that_of_the_deed_are_both_needed(
    maker: Maker, client_with: MakeClient, kind: str
) -> None:
    job_id = await maker.make(kind)
    scopes = maker_scopes(kind)
    without_kind = await client_with(*(TENANT_SCOPES - scopes))
    for method, path in REQUESTS:
        problem(await without_kind.request(method, f"/v1/jobs/{job_id}{path}"), 404, "job_not_found")
    assert await ids(without_kind) == []
    without_jobs = await client_with(*(scope for scope in TENANT_SCOPES if not scope.startswith("jobs:")))
    for method, path in REQUESTS:
        problem(await without_jobs.request(method, f"/v1/jobs/{job_id}{path}"), 403, "insufficient_scope")
    reads = {scope for scope in scopes if scope.endswith(":read")} | {security.WEBHOOKS_WRITE}
    only_reads = await client_with(*reads, security.JOBS_READ, security.JOBS_OPERATE, security.JOBS_DELETE)
    assert (await only_reads.get(f"/v1/jobs/{job_id}")).status_code == 200
    if kind != "webhook":
        for method, path in REQUESTS[3:]:
            problem(await only_reads.request(method, f"/v1/jobs/{job_id}{path}"), 403, "insufficient_scope")


def maker_scopes(kind: str) -> frozenset[str]:
    area = {"run": "runs", "webhook": "webhooks"}.get(kind, kind)
    return frozenset(scope for scope in SCOPES if scope.startswith(f"{area}:"))


async def test_an_operator_sees_and_stops_jobs_of_all_tenants(maker: Maker, client_with: MakeClient) -> None:
    operator = await client_with(*SCOPES, tenant="ops")
    job_id = await maker.make("media")
    assert await ids(operator) == [str(job_id)]
    assert await ids(operator, "tenant:acme") == [str(job_id)]
    assert await ids(operator, "tenant:ops") == []
    answer = await operator.post(f"/v1/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    assert (await look(operator, job_id))["tenant_id"] == "acme"


async def test_nothing_has_changed_since(maker: Maker, client: httpx2.AsyncClient) -> None:
    job_id = await maker.make("run")
    answer = await client.get(f"/v1/jobs/{job_id}")
    again = await client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
