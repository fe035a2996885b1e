"""Bulk operations: what a filter finds is cancelled, retried or deleted, each job once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
import time_machine

from leasehold import App
from leasehold.api.auth import security
from leasehold.api.jobs.schemas import OperationAnswer, OperationPreview, RefusalList
from leasehold.app.calls import Call
from leasehold.app.writing import write
from leasehold.broker import outbox
from leasehold.db.database import Connection, connect
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import TooMany
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.domain.json_digest import json_digest
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.limits.admission import Admission, Paid
from leasehold.pipelines.operations import steps
from leasehold.pipelines.operations.batches import Acting, Outcome, act_on
from leasehold.pipelines.operations.context import open_operation_context
from leasehold.pipelines.operations.pipeline import Action, Operation
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import concurrency, debounce, workers
from leasehold.transitions.debounce import Debounced
from leasehold.worker.attempts.inline import InlineAttempt
from leasehold.worker.maintenance import duties
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.jobs.conftest import KINDS, TENANT_SCOPES, MakeClient, Maker
from tests.support.broker_room import BROKER_ROOM
from tests.support.lock_waits import until_waiting

SECONDS = 60.0
shop = App("shop")


@shop.task
def ordered(number: int) -> int:
    return number


@asynccontextmanager
async def operating(settings: Settings, code: Pipelines | None = None, /, **changes: Any) -> AsyncIterator[Worker]:
    """A worker that does operations and nothing else: what they retry stays pending."""
    served = {"worker_queues": "operations", "poll_seconds": 0.1, "sweep_seconds": 0.2, "renew_seconds": 0.5}
    async with Worker(settings.model_copy(update=served | changes), code) as worker:
        yield worker


async def submit(client: httpx2.AsyncClient, action: str, filter: str, **more: Any) -> str:  # noqa: A002 - its name
    answer = await client.post("/v1/operations", json={"action": action, "filter": filter} | more)
    assert answer.status_code == 202, answer.text
    OperationAnswer.model_validate(answer.json())
    return str(answer.json()["id"])


async def read(client: httpx2.AsyncClient, operation: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/operations/{operation}")
    assert answer.status_code == 200, answer.text
    OperationAnswer.model_validate(answer.json())
    body: dict[str, Any] = answer.json()
    return body


async def ended(client: httpx2.AsyncClient, operation: str) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        while (body := await read(client, operation))["status"] not in ("succeeded", "failed", "cancelled"):
            await asyncio.sleep(0.05)
    return body


async def statuses(rows: Connection, job_ids: list[UUID]) -> list[str]:
    """A job that waits for a worker, the platform's or an external one, counts as pending."""
    waits = {"queued": "pending", "waiting_worker": "pending"}
    by_id = {
        row["id"]: waits.get(row["status"], row["status"]) for row in await rows.fetch("SELECT id, status FROM job")
    }
    return [by_id[job_id] for job_id in job_ids]


async def failed(maker: Maker, kind: str = "run", number: int = 1, **more: Any) -> list[UUID]:
    made = [await maker.make(kind, **more) for _ in range(number)]
    for job_id in made:
        await maker.fail(job_id)
    return made


async def test_a_dry_run_counts_shows_examples_and_changes_nothing(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    broken = await failed(maker, "media", 12)
    await maker.make("media")
    wish = {"action": "retry", "filter": "kind:media", "dry_run": True}
    with time_machine.travel(datetime.now(UTC) - timedelta(minutes=10), tick=True):  # an API whose clock is wrong
        answer = await client.post("/v1/operations", json=wish)
    assert answer.status_code == 200
    OperationPreview.model_validate(answer.json())
    assert answer.json()["total"] == {"n": 12, "exact": True}
    assert answer.json()["rate"] == 2500
    assert [job["id"] for job in answer.json()["examples"]] == [str(job_id) for job_id in broken[:1:-1]]
    assert await rows.fetchval("SELECT count(*) FROM job WHERE pipeline = 'bulk_operation'") == 0
    assert set(await statuses(rows, broken)) == {"failed"}
    refused = await client.post("/v1/operations", json=wish, headers={"Idempotency-Key": "x" * 256})
    problem(refused, 422, "idempotency_key_malformed")


@pytest.mark.parametrize(("read", "kinds"), [((), []), (("media:read",), ["media"]), (("runs:read",), ["run"])])
async def test_a_dry_run_shows_no_job_that_the_key_may_not_read(
    maker: Maker, client_with: MakeClient, read: tuple[str, ...], kinds: list[str]
) -> None:
    """A summary has the job's error, its tags and its dedupe key."""
    await failed(maker, "media")
    await failed(maker, "run")
    narrow = await client_with("jobs:operate", "media:write", "runs:write", *read)
    wish = {"action": "retry", "filter": "status:failed", "dry_run": True}
    answer = (await narrow.post("/v1/operations", json=wish)).json()
    assert answer["total"] == {"n": 2, "exact": True}
    assert [job["kind"] for job in answer["examples"]] == kinds


async def test_an_operation_finds_jobs_whose_ids_have_another_time_than_their_rows(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """The clock of the program that made the id was wrong, or the id is no UUIDv7."""
    ids = [UUID(int=uuid4().int | 0xF << 124), id_of_instant(datetime.now(UTC) + timedelta(hours=2)), new_id()]
    await write(rows, [Call(ordered, {"number": 1}, id=job_id) for job_id in ids], "acme", 3600)
    later = await maker.make("run")
    wish = {"action": "cancel", "filter": "template:shop.ordered"}
    for q in (wish["filter"], "template:shop.ordered created:>0s"):
        preview = (await client.post("/v1/operations", json=wish | {"filter": q, "dry_run": True})).json()
        assert preview["total"] == {"n": 3, "exact": True}
        assert {job["id"] for job in preview["examples"]} == {str(job_id) for job_id in ids}
    operation = await submit(client, **wish)
    await write(rows, [Call(ordered, {"number": 2})], "acme", 3600)  # after the operation
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["status"], body["acted"], body["refused"]) == ("succeeded", 3, 0)
    assert await statuses(rows, ids) == ["cancelled"] * 3
    assert await rows.fetchval("SELECT count(*) FROM job WHERE status = 'cancelled'") == 3
    assert await statuses(rows, [later]) == ["pending"]


async def test_failed_jobs_of_every_kind_are_retried(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    broken = [job_id for kind in KINDS for job_id in await failed(maker, kind)]
    healthy = await maker.make("run")
    await maker.succeed(healthy)
    operation = await submit(client, "retry", "created:>0s")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["status"], body["acted"], body["refused"], body["percent"]) == ("succeeded", len(KINDS), 0, 100.0)
    assert body["total"] == {"n": len(KINDS), "exact": True}
    assert set(await statuses(rows, broken)) == {"pending"}
    assert await statuses(rows, [healthy]) == ["succeeded"]
    for job_id in broken:
        await assert_history(Rows(rows), job_id)
        events = (await client.get(f"/v1/jobs/{job_id}/events")).json()["events"]
        (replayed, *_) = [event for event in events if event["kind"] == "replayed"]
        assert (replayed["by"], replayed["operation"]) == ("client tests", operation)


async def test_unfinished_jobs_of_every_kind_are_cancelled(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    waiting = [await maker.make(kind) for kind in KINDS]
    (over,) = await failed(maker)
    operation = await submit(client, "cancel", "created:>0s", reason="enough")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["status"], body["acted"]) == ("succeeded", len(KINDS))
    assert set(await statuses(rows, waiting)) == {"cancelled"}
    assert await statuses(rows, [over]) == ["failed"]
    for job_id in waiting:
        cancel = (await client.get(f"/v1/jobs/{job_id}")).json()["cancel"]
        assert cancel == {"reason": "enough", "by": "client tests", "operation": operation}
    cancel = await rows.fetchval("SELECT cancel FROM job WHERE id = $1", waiting[0])
    assert (cancel["reason"], cancel["by"]) == ("enough", "client tests")
    withdrawals = "SELECT count(*) FROM job WHERE pipeline = 'generation_withdrawal'"
    assert await rows.fetchval(withdrawals) == 1, "the provider hears of it"


async def test_jobs_of_every_kind_are_deleted_also_unfinished_ones(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    doomed = [job_id for kind in KINDS for job_id in (*await failed(maker, kind), await maker.make(kind))]
    leased = await maker.make("run")
    await maker.claim(leased)
    operation = await submit(client, "delete", "created:>0s")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["status"], body["acted"]) == ("succeeded", len(doomed) + 1)
    for job_id in doomed:
        problem(await client.get(f"/v1/jobs/{job_id}"), 410, "job_deleted")
    assert await statuses(rows, [leased]) == ["cancel_requested"]
    assert await rows.fetchval("SELECT keep_seconds FROM job WHERE id = $1", leased) == 0


async def test_jobs_that_come_or_fail_later_are_not_touched(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    (before,) = await failed(maker)
    (again,) = await failed(maker)
    unfinished = await maker.make("run")
    operation = await submit(client, "retry", "kind:run")
    await maker.fail(unfinished)
    after = await failed(maker, number=3)
    await client.post(f"/v1/jobs/{again}/retry")
    await maker.fail(again)
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert body["acted"] == 1
    assert await statuses(rows, [before, again, unfinished, *after]) == ["pending", *["failed"] * 5]


async def test_a_filter_finds_its_jobs_in_many_batches(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    wanted = await failed(maker, number=30, tags={"batch": "7"})
    others = await failed(maker, number=3, tags={"batch": "8"})
    operation = await submit(client, "retry", "tag.batch:7 status:failed")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert body["acted"] == 30
    assert set(await statuses(rows, wanted)) == {"pending"}
    assert set(await statuses(rows, others)) == {"failed"}


async def test_a_job_that_is_refused_is_reported_and_holds_up_no_other(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    (blocked,) = await failed(maker, "conversion", user_id="me")
    (fine,) = await failed(maker, "conversion")
    await maker.make("conversion", user_id="me")
    odd = await failed(maker, "generation")
    await rows.execute("UPDATE job SET params = params - 'kind' WHERE id = $1", odd[0])  # of a release that is gone
    operation = await submit(client, "retry", "created:>0s")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["acted"], body["refused"]) == (1, 2)
    assert body["refused_by_code"] == {"same_key_running": 1, "unforeseen": 1}
    assert await statuses(rows, [fine, blocked, *odd]) == ["pending", "failed", "failed"]
    first = (await client.get(f"/v1/operations/{operation}/refusals", params={"limit": 1})).json()
    RefusalList.model_validate(first)
    second = await client.get(f"/v1/operations/{operation}/refusals", params={"cursor": first["next_cursor"]})
    found = {item["job_id"]: item["code"] for item in first["refusals"] + second.json()["refusals"]}
    assert found == {str(blocked): "same_key_running", str(odd[0]): "unforeseen"}
    assert second.json()["next_cursor"] is None


async def test_the_report_is_bounded_and_the_count_is_not(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    for _ in range(4):
        await failed(maker, "conversion", user_id="me")
    await maker.make("conversion", user_id="me")
    operation = await submit(client, "retry", "kind:conversion")
    async with operating(running.services.settings, operation_refusals=3):
        body = await ended(client, operation)
    assert body["refused_by_code"] == {"same_key_running": 4}
    assert await rows.fetchval("SELECT count(*) FROM operation_refusal") == 3


async def test_a_canary_that_fails_stops_the_operation_until_a_person_retries_it(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    broken = await failed(maker, number=5)
    operation = await submit(client, "retry", "kind:run", canary=2)
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while (await statuses(rows, broken)).count("pending") < 2:
                await asyncio.sleep(0.02)
        assert await statuses(rows, broken) == [*["failed"] * 3, *["pending"] * 2]
        await maker.succeed(broken[4])
        await maker.fail(broken[3])
        body = await ended(client, operation)
        assert (body["status"], body["error"]["code"]) == ("failed", "canary_failed")
        assert body["canary"] == {"jobs": 2, "passed": False}
        assert await statuses(rows, broken) == [*["failed"] * 4, "succeeded"]
        assert (await client.post(f"/v1/jobs/{operation}/retry")).status_code == 202
        body = await ended(client, operation)
    assert (body["status"], body["acted"]) == ("succeeded", 5)
    assert await statuses(rows, broken) == [*["pending"] * 3, "failed", "succeeded"]


async def test_a_canary_that_fails_stops_the_operation_although_the_worker_dies_as_it_finds_out(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """The worker has written into the note that the canary failed, but not that the operation failed."""
    broken = await failed(maker, number=3)
    operation = await submit(client, "retry", "kind:run", canary=1)
    async with operating(running.services.settings) as worker:
        async with asyncio.timeout(SECONDS):
            while await statuses(rows, broken[2:]) != ["pending"]:
                await asyncio.sleep(0.02)
        await worker.drain()
    await maker.fail(broken[2])
    noted = "UPDATE note SET value = jsonb_set(value, '{canary,passed}', 'false') WHERE value ? 'canary' RETURNING true"
    assert await rows.fetchval(noted)
    async with operating(running.services.settings):
        body = await ended(client, operation)
        assert (body["status"], body["error"]["code"]) == ("failed", "canary_failed")
        assert await statuses(rows, broken) == ["failed"] * 3
        assert (await client.post(f"/v1/jobs/{operation}/retry")).status_code == 202
        body = await ended(client, operation)
    assert (body["status"], body["canary"]) == ("succeeded", {"jobs": 1, "passed": False})
    assert await statuses(rows, broken) == [*["pending"] * 2, "failed"]


async def test_a_canary_that_succeeds_lets_the_others_go(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    broken = await failed(maker, number=5)
    operation = await submit(client, "retry", "kind:run", canary=1)
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while await statuses(rows, broken[4:]) != ["pending"]:
                await asyncio.sleep(0.02)
        await maker.succeed(broken[4])
        body = await ended(client, operation)
    assert (body["acted"], body["canary"]) == (5, {"jobs": 1, "passed": True})
    assert await statuses(rows, broken[:4]) == ["pending"] * 4


async def test_a_rate_and_the_time_of_a_canary_count_by_the_clock_of_the_database(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """The worker that goes on may have another clock than the worker that wrote the note."""
    broken = await failed(maker, number=3)
    operation = await submit(client, "retry", "kind:run", canary=1)
    with time_machine.travel(datetime.now(UTC) + timedelta(hours=1), tick=True):  # a worker whose clock is wrong
        async with operating(running.services.settings, operation_canary_seconds=600), asyncio.timeout(SECONDS):
            while await statuses(rows, broken[2:]) != ["pending"]:
                await asyncio.sleep(0.02)
    now = await rows.fetchval("SELECT clock_timestamp()")
    written = await rows.fetchval(
        "SELECT value FROM note WHERE task_id = (SELECT id FROM task WHERE job_id = $1)", operation
    )
    assert written["next_at"] < now.timestamp() + 60
    assert now.timestamp() < written["canary"]["until"] < now.timestamp() + 601
    await maker.succeed(broken[2])
    async with operating(running.services.settings, operation_canary_seconds=600):
        body = await ended(client, operation)
    assert (body["status"], body["acted"]) == ("succeeded", 3)


@pytest.mark.parametrize(("seconds", "code"), [(3600, "canary_refused"), (1, "canary_late")])
async def test_a_canary_that_is_refused_or_late_stops_the_operation(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, seconds: int, code: str
) -> None:
    broken = await failed(maker, "conversion", 3)
    if code == "canary_refused":
        broken += await failed(maker, "conversion", user_id="me")
        await maker.make("conversion", user_id="me")
    operation = await submit(client, "retry", "kind:conversion status:failed", canary=1)
    async with operating(running.services.settings, operation_canary_seconds=seconds):
        body = await ended(client, operation)
    assert (body["status"], body["error"]["code"]) == ("failed", code)
    assert (await statuses(rows, broken)).count("pending") == (code == "canary_late")


async def test_an_operation_is_aborted_and_paced(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    """At one job a second the third comes two seconds after the first."""
    broken = await failed(maker, number=30)
    operation = await submit(client, "retry", "kind:run", rate=1)
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while (await read(client, operation))["acted"] < 3:
                await asyncio.sleep(0.05)
        ((began, now),) = await rows.fetch(
            "SELECT started_at, clock_timestamp() FROM task WHERE job_id = $1", UUID(operation)
        )
        assert (now - began).total_seconds() > 1.9
        assert (await client.post(f"/v1/jobs/{operation}/cancel")).status_code == 202
        body = await ended(client, operation)
    assert body["status"] == "cancelled"
    assert (await statuses(rows, broken)).count("pending") == body["acted"] < 30


async def test_a_retry_without_a_rate_has_the_retry_rate_and_a_named_rate_wins(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = running.services.settings
    monkeypatch.setitem(vars(settings), "operation_retry_rate", 2)  # the settings are frozen
    broken = await failed(maker, number=40)
    slow = await submit(client, "retry", "kind:run")
    assert (await read(client, slow))["rate"] == 2
    async with operating(settings):
        async with asyncio.timeout(SECONDS):
            while not (await read(client, slow))["acted"]:
                await asyncio.sleep(0.05)
        assert (await client.post(f"/v1/jobs/{slow}/cancel")).status_code == 202
        assert (await ended(client, slow))["status"] == "cancelled"
        assert 0 < (await statuses(rows, broken)).count("pending") < 40
        quick = await submit(client, "retry", "kind:run", rate=1000)
        assert (await read(client, quick))["rate"] == 1000
        body = await ended(client, quick)
    assert body["status"] == "succeeded"
    assert set(await statuses(rows, broken)) == {"pending"}


async def test_an_operation_that_an_older_api_wrote_without_a_rate_has_the_retry_rate(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    broken = await failed(maker, number=40)
    operation = await submit(client, "retry", "kind:run")
    await rows.execute("UPDATE job SET params = params - 'rate' WHERE id = $1", UUID(operation))
    async with operating(running.services.settings, operation_retry_rate=2):
        async with asyncio.timeout(SECONDS):
            while not (await read(client, operation))["acted"]:
                await asyncio.sleep(0.05)
        assert (await client.post(f"/v1/jobs/{operation}/cancel")).status_code == 202
        await ended(client, operation)
    assert 0 < (await statuses(rows, broken)).count("pending") < 40


@pytest.mark.parametrize("action", ["retry", "cancel", "delete"])
async def test_the_hints_of_a_batch_are_published_at_once_and_not_by_the_relay(
    maker: Maker,
    client: httpx2.AsyncClient,
    running: Running,
    rows: Connection,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    """The relay would send the hints of half a second together: a burst that the jobs of others meet. A generation that
    is cancelled or deleted submits the job that tells its provider.
    """

    async def take_nothing(*_arguments: Any) -> list[Any]:
        return []

    async def split_nothing(*_arguments: Any) -> int:
        return 0

    monkeypatch.setattr(outbox, "take", take_nothing)
    monkeypatch.setattr(outbox, "split", split_nothing)
    target = await maker.make("generation")
    if action == "retry":
        await maker.fail(target)
    # What RabbitMQ cannot take yet, or confirms too late, is left to the relay, which is not there.
    hints = "SELECT (SELECT count(*) FROM outbox WHERE job_id <> $1) + (SELECT count(*) FROM outbox_batch)"
    async with operating(running.services.settings, **BROKER_ROOM) as worker:
        async with asyncio.timeout(SECONDS):
            while not worker.parts.broker.connected:
                await asyncio.sleep(0.02)
        for table in ("outbox", "outbox_batch"):  # what is locked is being published
            await rows.execute(f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} FOR UPDATE SKIP LOCKED)")
        operation = await submit(client, action, "created:>0s")
        body = await ended(client, operation)
        async with asyncio.timeout(SECONDS):
            while await rows.fetchval(hints, UUID(operation)):  # the operation's own is the API's
                await asyncio.sleep(0.05)
    assert body["acted"] == 1


async def test_retries_are_charged_and_wait_for_their_tenants_rate(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    broken = await failed(maker, number=8)
    operation = await submit(client, "retry", "kind:run")
    async with operating(running.services.settings, submissions_per_tenant=6):
        async with asyncio.timeout(SECONDS):
            while (await read(client, operation))["acted"] < 6:
                await asyncio.sleep(0.05)
    body = await read(client, operation)
    assert (body["refused"], body["status"]) == (0, "running")
    assert (await statuses(rows, broken)).count("pending") == body["acted"] < 8


async def test_a_job_that_somebody_holds_is_passed_over_and_acted_on_later(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, settings: Settings
) -> None:
    broken = await failed(maker, number=4)
    operation = await submit(client, "retry", "kind:run")
    holder = await connect(settings, "holder")
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("SELECT 1 FROM job WHERE id = $1 FOR UPDATE", broken[2])
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while (await read(client, operation))["acted"] < 3:
                await asyncio.sleep(0.05)
        assert await statuses(rows, broken) == ["pending", "pending", "failed", "pending"]
        await transaction.rollback()
        body = await ended(client, operation)
    await holder.close()
    assert (body["acted"], body["refused"]) == (4, 0)


@pytest.mark.parametrize("pace", [{"canary": 1}, {"rate": 1}])
async def test_jobs_that_somebody_held_keep_to_the_canary_and_the_rate_when_they_are_let_go(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, settings: Settings,
    pace: dict[str, int],
) -> None:  # fmt: skip
    broken = await failed(maker, number=8)
    operation = await submit(client, "retry", "kind:run", **pace)
    holder = await connect(settings, "holder")
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("SELECT 1 FROM job WHERE id = ANY($1::uuid[]) FOR UPDATE", broken)
    passed_over = (
        "SELECT jsonb_array_length(value -> 'busy') FROM note n JOIN task t ON t.id = task_id WHERE job_id = $1"
    )
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while await rows.fetchval(passed_over, UUID(operation)) != 8:
                await asyncio.sleep(0.02)
        await transaction.rollback()
        async with asyncio.timeout(SECONDS):
            while not (retried := (await statuses(rows, broken)).count("pending")):
                await asyncio.sleep(0.02)
        assert retried == 1 if "canary" in pace else retried < 8
        assert (await client.post(f"/v1/jobs/{operation}/cancel")).status_code == 202
        body = await ended(client, operation)
    await holder.close()
    assert (await statuses(rows, broken)).count("pending") == body["acted"] < 8


async def test_a_key_acts_on_its_kinds_its_tenant_and_with_its_scope_alone(
    maker: Maker, client_with: MakeClient, running: Running, rows: Connection
) -> None:
    (run,), (picture,) = await failed(maker, "run"), await failed(maker, "media")
    for scopes, wish in [
        (("jobs:operate", "runs:write"), {"action": "delete", "filter": "kind:run"}),
        (("jobs:delete", "runs:write"), {"action": "retry", "filter": "kind:run"}),
        (("jobs:operate", "runs:read"), {"action": "retry", "filter": "kind:run"}),
        (("jobs:operate", "runs:write"), {"action": "retry", "filter": "kind:media"}),
    ]:
        problem(await (await client_with(*scopes)).post("/v1/operations", json=wish), 403, "insufficient_scope")
    narrow = await client_with("jobs:operate", "jobs:read", "runs:write")
    stranger = await client_with(*TENANT_SCOPES, tenant="other")
    operations = [
        (narrow, await submit(narrow, "retry", "created:>0s")),
        (stranger, await submit(stranger, "retry", "created:>0s tenant:acme")),
        (stranger, await submit(stranger, "delete", "created:>0s")),
    ]
    async with operating(running.services.settings):
        acted = [(await ended(client, operation))["acted"] for client, operation in operations]
    assert acted == [1, 0, 0]
    assert await statuses(rows, [run, picture]) == ["pending", "failed"]
    problem(await stranger.get(f"/v1/operations/{operations[0][1]}"), 404, "operation_not_found")
    problem(await stranger.get(f"/v1/operations/{operations[0][1]}/refusals"), 404, "operation_not_found")
    assert len((await stranger.get("/v1/operations")).json()["operations"]) == 2


async def test_an_operator_of_the_fleet_acts_on_all_tenants(
    maker: Maker, client_with: MakeClient, running: Running, rows: Connection
) -> None:
    other = Maker(await client_with(*TENANT_SCOPES, tenant="other"), rows)
    broken = await failed(maker, number=3) + await failed(other, number=3) + await failed(maker, number=3)
    operator = await client_with(*TENANT_SCOPES, security.OPERATE, tenant="operators")
    operation = await submit(operator, "retry", "kind:run", canary=4)
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while (await statuses(rows, broken)).count("pending") < 4:
                await asyncio.sleep(0.02)
        for job_id in broken[:-5:-1]:
            await maker.succeed(job_id)
        body = await ended(operator, operation)
    assert body["acted"] == 9
    assert await statuses(rows, broken) == ["pending"] * 5 + ["succeeded"] * 4


async def test_only_an_operator_may_name_an_operation_on_other_tenants_jobs(
    maker: Maker, client_with: MakeClient, running: Running, rows: Connection
) -> None:
    """The operator's tenant has other keys, too: they must not read or act through the operator's operation."""
    blocked = await failed(maker, "conversion", user_id="me")
    await maker.make("conversion", user_id="me")
    operator = await client_with(*TENANT_SCOPES, security.OPERATE, tenant="operators")
    plain = await client_with(*TENANT_SCOPES, tenant="operators")
    far = await submit(operator, "retry", "kind:conversion")
    near = await submit(plain, "retry", "kind:conversion")
    elsewhere = await submit(operator, "cancel", "kind:run tenant:acme")
    async with operating(running.services.settings):
        assert (await ended(operator, far))["refused"] == 1
        await ended(plain, near)
        await ended(operator, elsewhere)
    refusals = (await operator.get(f"/v1/operations/{far}/refusals")).json()["refusals"]
    assert [refusal["job_id"] for refusal in refusals] == [str(job_id) for job_id in blocked]
    for operation in (far, elsewhere):
        for path in (
            f"/v1/operations/{operation}",
            f"/v1/operations/{operation}/refusals",
            *(f"/v1/jobs/{operation}{part}" for part in ("", "/events", "/logs", "/explain")),
        ):
            problem(await plain.get(path), 403, "insufficient_scope")
        for act in ("cancel", "retry"):
            problem(await plain.post(f"/v1/jobs/{operation}/{act}"), 403, "insufficient_scope")
        problem(await plain.delete(f"/v1/jobs/{operation}"), 403, "insufficient_scope")
    task = await rows.fetchval("UPDATE task SET status = 'failed' WHERE job_id = $1 RETURNING id", UUID(far))
    await rows.execute("UPDATE job SET status = 'failed' WHERE id = $1", UUID(far))
    problem(await plain.post(f"/v1/dead-letters/{task}/replay"), 403, "insufficient_scope")

    async def listed(client: httpx2.AsyncClient) -> list[str]:
        return [operation["id"] for operation in (await client.get("/v1/operations")).json()["operations"]]

    assert await listed(operator) == [elsewhere, near, far]
    assert await listed(plain) == [near]
    assert (await plain.get(f"/v1/operations/{near}/refusals")).status_code == 200


async def test_no_list_shows_an_operation_on_other_tenants_jobs_to_other_keys_of_the_operators_tenant(
    maker: Maker, client_with: MakeClient
) -> None:
    """Its error counts jobs of other tenants, and names the codes of their refusals."""
    operator = await client_with(*TENANT_SCOPES, security.OPERATE, tenant="operators")
    plain = await client_with(*TENANT_SCOPES, tenant="operators")
    far = [await submit(operator, "retry", text) for text in ("kind:run", "kind:run tenant:acme")]
    near = [
        await submit(operator, "retry", "kind:run tenant:operators"),
        await submit(plain, "retry", "kind:run"),
    ]
    for operation in (*far, *near):
        await maker.fail(UUID(operation), "canary_failed")

    async def seen(client: httpx2.AsyncClient) -> tuple[list[set[str]], list[int]]:
        """The operations in each list, and what the counts say."""
        letters = (await client.get("/v1/dead-letters", params={"kind": "operation"})).json()["dead_letters"]
        by_fingerprint = (
            await client.get("/v1/dead-letters", params={"fingerprint": letters[0]["fingerprint"]})
        ).json()["dead_letters"]
        (group,) = (await client.get("/v1/dead-letters/groups")).json()["groups"]
        lists = [{letter["job_id"] for letter in letters}, {letter["job_id"] for letter in by_fingerprint}]
        counts = [group["n"]]
        for q in ("", "kind:operation", "status:failed", "code:canary_failed", "queue:operations", "canary"):
            page = (await client.get("/v1/jobs", params={"q": q, "count": "true"})).json()
            lists.append({item["id"] for item in page["jobs"]} & {*far, *near})
            counts.append(page["count"]["n"])
        return lists, counts

    assert await seen(operator) == ([{*far, *near}] * 8, [4] * 7)
    assert await seen(plain) == ([{*near}] * 8, [2] * 7)
    for operation in far:  # nor a search by its id
        assert (await plain.get("/v1/jobs", params={"q": operation})).json()["jobs"] == []
    answer = (await plain.post("/v1/dead-letters/replay", json={"code": "canary_failed"})).json()
    assert (set(answer["replayed"]), answer["refused"]) == ({*near}, [])
    answer = (await operator.post("/v1/dead-letters/replay", json={"code": "canary_failed"})).json()
    assert (set(answer["replayed"]), answer["refused"]) == ({*far}, [])


async def test_a_run_of_a_template_that_took_the_name_before_there_were_operations_is_a_run(
    client: httpx2.AsyncClient, client_with: MakeClient, maker: Maker, rows: Connection
) -> None:
    mine = {"type": "mine", "steps": [{"id": "a", "queue": "q"}]}
    assert (await client.post("/v1/templates", json=mine)).status_code == 201
    await rows.execute(
        "UPDATE template SET type = $1::text, declaration = declaration || jsonb_build_object('type', $1::text)",
        "bulk_operation",
    )
    run = await maker.make("run", template="bulk_operation", payload={"action": "delete"})
    operation = await submit(client, "cancel", "created:>1h")
    narrow = await client_with(*(scope for scope in TENANT_SCOPES if scope != security.JOBS_DELETE))
    for key in (client, narrow):
        assert [body["id"] for body in (await key.get("/v1/operations")).json()["operations"]] == [operation]
        problem(await key.get(f"/v1/operations/{run}"), 404, "operation_not_found")
        assert (await key.get(f"/v1/jobs/{run}")).json()["kind"] == "run"
        ids = {job["id"] for job in (await key.get("/v1/jobs")).json()["jobs"]}
        assert ids == {str(run), operation}
    await maker.fail(run, "broken")
    (letter,) = (await narrow.get("/v1/dead-letters")).json()["dead_letters"]
    assert letter["job_id"] == str(run)
    assert (await narrow.post(f"/v1/jobs/{run}/retry")).status_code == 202


async def test_a_retry_of_an_operation_that_deletes_needs_what_a_delete_needs(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, rows: Connection
) -> None:
    """It goes on with its deletes."""
    operations = [await submit(client, action, "kind:run") for action in ("delete", "delete", "cancel")]
    for operation in operations:
        await maker.fail(UUID(operation), "canary_failed")
    letters = (await client.get("/v1/dead-letters?code=canary_failed")).json()["dead_letters"]
    task = next(letter["task_id"] for letter in letters if letter["job_id"] == operations[0])
    narrow = await client_with(*(scope for scope in TENANT_SCOPES if scope != security.JOBS_DELETE))
    problem(await narrow.post(f"/v1/jobs/{operations[0]}/retry"), 403, "insufficient_scope")
    problem(await narrow.post(f"/v1/dead-letters/{task}/replay"), 403, "insufficient_scope")
    answer = (await narrow.post("/v1/dead-letters/replay", json={"code": "canary_failed"})).json()
    assert answer["replayed"] == [operations[2]]
    assert {refusal["code"] for refusal in answer["refused"]} == {"insufficient_scope"}
    assert {refusal["job_id"] for refusal in answer["refused"]} == set(operations[:2])
    assert await statuses(rows, [UUID(operation) for operation in operations[:2]]) == ["failed", "failed"]
    assert (await client.post(f"/v1/jobs/{operations[0]}/retry")).status_code == 202


@pytest.mark.parametrize(
    ("kind", "also", "lacks"),
    [
        ("run", ("generation:write",), "runs:write"),
        ("generation", ("runs:write",), "generation:write"),
        ("generation", ("runs:write", "fleet:operate"), "generation:write"),
    ],
)
async def test_a_retry_of_an_operation_needs_the_scope_of_each_kind_on_which_it_acts(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, rows: Connection, *,
    kind: str, also: tuple[str, ...], lacks: str,
) -> None:  # fmt: skip
    """It goes on with the scopes of the key that submitted it."""
    operation, other = await submit(client, "retry", f"kind:{kind}"), await submit(client, "retry", "kind:media")
    for job_id in (operation, other):
        await maker.fail(UUID(job_id), "canary_failed")
    letters = (await client.get("/v1/dead-letters?code=canary_failed")).json()["dead_letters"]
    task = next(letter["task_id"] for letter in letters if letter["job_id"] == operation)
    narrow = await client_with("jobs:read", "jobs:operate", "media:write", *also)
    for path in (f"/v1/jobs/{operation}/retry", f"/v1/dead-letters/{task}/replay"):
        body = problem(await narrow.post(path), 403, "insufficient_scope")
        assert body["detail"] == f"To retry this operation, you need the scope {lacks}."
    answer = (await narrow.post("/v1/dead-letters/replay", json={"code": "canary_failed"})).json()
    assert answer["replayed"] == [other]
    assert [(refusal["job_id"], refusal["code"]) for refusal in answer["refused"]] == [
        (operation, "insufficient_scope")
    ]
    assert await statuses(rows, [UUID(operation)]) == ["failed"]
    narrow = await client_with("jobs:read", "jobs:operate", lacks)
    assert (await narrow.post(f"/v1/jobs/{operation}/retry")).status_code == 202


@pytest.mark.parametrize("way", ["retry", "letter", "letters"])
async def test_who_retries_an_operation_pays_for_the_rest_and_is_named(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, way: str
) -> None:
    """The key that submitted it may be revoked by now."""
    broken = await failed(maker, number=3)
    operation = await submit(client, "retry", "kind:run", canary=1)
    key = await create_key(
        rows, tenant_id="acme", client_id="second", scopes=["jobs:read", "jobs:operate", "runs:write"]
    )
    async with operating(running.services.settings), client_of(running.url, key.text) as second:
        async with asyncio.timeout(SECONDS):
            while await statuses(rows, broken[2:]) != ["pending"]:
                await asyncio.sleep(0.02)
        await maker.fail(broken[2], "of_the_canary")
        assert (await ended(client, operation))["error"]["code"] == "canary_failed"
        (letter,) = (await client.get("/v1/dead-letters?code=canary_failed")).json()["dead_letters"]
        path, body = {
            "retry": (f"/v1/jobs/{operation}/retry", {}),
            "letter": (f"/v1/dead-letters/{letter['task_id']}/replay", {}),
            "letters": ("/v1/dead-letters/replay", {"code": "canary_failed"}),
        }[way]
        assert (await second.post(path, json=body)).status_code == 202
        done = await ended(client, operation)
    assert (done["status"], done["acted"], done["by"]) == ("succeeded", 3, "client second")
    by = []
    for job_id in broken:
        events = (await client.get(f"/v1/jobs/{job_id}/events")).json()["events"]
        by.append(next(event["by"] for event in events if event["kind"] == "replayed"))
    assert by == ["client second", "client second", "client tests"]
    params = await rows.fetchval("SELECT params FROM job WHERE id = $1", UUID(operation))
    quota_key = await rows.fetchval("SELECT coalesce(quota_key, prefix) FROM api_key WHERE client_id = 'second'")
    assert (params["payer_key"], params["action"], params["filter"]) == (quota_key, "retry", "kind:run")
    retries = await rows.fetch("SELECT actor, details FROM audit WHERE action = 'job.retried'")
    assert [row["actor"] for row in retries] == ["second"]
    assert "other_payload" not in str(retries[0]["details"])


@pytest.mark.parametrize(
    ("wish", "position"),
    [
        ({"action": "retry", "filter": "status:succeeded"}, 1),
        ({"action": "cancel", "filter": "kind:media kind:run"}, 12),
        ({"action": "delete", "filter": "kind:nothing"}, 1),
        ({"action": "cancel", "filter": "kind:operation"}, 1),
        ({"action": "delete", "filter": "  "}, 1),
    ],
)
async def test_a_filter_that_cannot_be_used_is_pointed_at(
    client: httpx2.AsyncClient, wish: dict[str, Any], position: int
) -> None:
    for dry_run in (False, True):
        refused = await client.post("/v1/operations", json=wish | {"dry_run": dry_run})
        (place,) = problem(refused, 422, "invalid_filter")["errors"]
        assert (place["pointer"], place["position"]) == ("#/filter", position)


async def test_a_request_with_a_key_makes_one_operation_and_a_tenant_has_so_many(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection
) -> None:
    headers, wish = {"Idempotency-Key": str(uuid4())}, {"action": "cancel", "filter": "created:>1h"}
    answers = [await client.post("/v1/operations", json=wish, headers=headers) for _ in range(2)]
    assert answers[0].json()["id"] == answers[1].json()["id"]
    problem(
        await client.post("/v1/operations", json=wish | {"rate": 5}, headers=headers), 422, "idempotency_key_reused"
    )
    for _ in range(running.services.settings.operations_per_tenant - 1):
        await submit(client, "cancel", "created:>1h")
    problem(await client.post("/v1/operations", json=wish), 409, "too_many_operations")
    pages = (await client.get("/v1/operations", params={"limit": 9})).json()
    last = (await client.get("/v1/operations", params={"cursor": pages["next_cursor"]})).json()
    assert [body["id"] for body in last["operations"]] == [answers[0].json()["id"]]
    # An operation never acts on operations: this one would cancel the others.
    await client.post(f"/v1/jobs/{answers[0].json()['id']}/cancel")
    operation = await submit(client, "cancel", "created:>0s")
    async with operating(running.services.settings):
        assert (await ended(client, operation))["acted"] == 0


@pytest.mark.parametrize("action", ["retry", "delete"])
async def test_a_failure_is_delivered_although_the_job_is_retried_or_deleted_at_once(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, action: Action
) -> None:
    hook = {"url": "http://127.0.0.1/hook", "events": ["job.failed"]}
    assert (await client.post("/v1/webhooks", json=hook)).status_code == 201
    broken = await failed(maker, number=3)
    outcome = await act(running, rows, action, broken)
    assert sorted(outcome.acted) == broken
    sent = "SELECT params -> 'event' -> 'data' ->> 'id' AS job FROM job WHERE pipeline = 'webhook' ORDER BY 1"
    assert [row["job"] for row in await rows.fetch(sent)] == [str(job_id) for job_id in broken]


async def test_what_a_batch_has_ended_is_counted_and_announced_although_an_admission_after_it_fails(
    maker: Maker, client: httpx2.AsyncClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is committed, and is not repeated."""
    told: list[str] = []

    async def fails(*_arguments: object) -> None:
        told.append("admission")
        raise ConnectionResetError

    monkeypatch.setattr(steps, "concurrency", SimpleNamespace(admit=fails))
    monkeypatch.setattr(steps, "count_ended_jobs", lambda ends: told.extend(job.outcome for job in ends))
    monkeypatch.setattr(InlineAttempt, "announce", lambda _attempt, hints: told.extend("hint" for _ in hints))
    await maker.make("generation")
    operation = await submit(client, "cancel", "created:>0s")
    async with operating(running.services.settings):
        body = await ended(client, operation)
    assert (body["status"], body["acted"]) == ("succeeded", 1)
    assert sorted(told) == ["admission", "cancelled", "hint"], "the hint is that of the job that tells the provider"


async def test_jobs_with_limits_keys_and_scopes_are_retried_as_one_by_one(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, client_with: MakeClient
) -> None:
    """Beside jobs that nothing holds back: these are retried in one statement."""
    alone = {"type": "alone", "concurrency_policy": "reject_same_scope", "steps": [{"id": "a", "queue": "q"}]}
    assert (await client.post("/v1/templates", json=alone)).status_code == 201
    plain = await failed(maker, number=3)
    (keyed,) = await failed(maker, dedupe={"key": "k"})
    (scoped,) = await failed(maker, template="alone", scope="user", scope_id="7")
    await maker.make("run", template="alone", scope="user", scope_id="7")
    await maker.make("run", dedupe={"key": "k"})
    (limited,) = await failed(maker, "generation", server_id="a100")
    outcome = await act(running, rows, "retry", [*plain, keyed, scoped, limited])
    assert sorted(outcome.acted) == sorted([*plain, limited])
    codes = {refusal.job_id: refusal.code for refusal in outcome.refusals}
    assert codes == {keyed: "same_key_running", scoped: "same_scope_running"}
    assert await rows.fetchval("SELECT held FROM job WHERE id = $1", limited)
    for job_id in (*plain, limited):
        await assert_history(Rows(rows), job_id)
    more = await failed(maker, number=2)
    operator = await client_with(security.OPERATE)
    limit = await operator.put("/v1/limits", json={"key": "template:outside", "tenant_id": "acme", "at_most": 1})
    assert limit.is_success, limit.text
    assert sorted((await act(running, rows, "retry", more)).acted) == more
    held = await rows.fetch("SELECT held FROM job WHERE id = ANY($1)", more)
    assert [row["held"] for row in held] == [True, True], "a declared limit holds retried jobs, too"


async def test_retried_jobs_of_several_limits_lock_these_in_the_order_of_an_admission(
    maker: Maker, client_with: MakeClient, running: Running, rows: Connection, settings: Settings
) -> None:
    """Job by job, they would lock the last limit first, and deadlock with an admission at both."""
    made = await failed(maker, number=2)
    operator = await client_with(security.OPERATE)
    limit = await operator.put("/v1/limits", json={"key": "payload:outside:/n", "tenant_id": "acme", "at_most": 1})
    assert limit.is_success, limit.text
    keys = sorted((f"payload:outside:/n={json_digest(n)}", n) for n in range(2))
    for job_id, (_, n) in zip(sorted(made), reversed(keys), strict=True):
        await rows.execute("UPDATE job SET params = $2 WHERE id = $1", job_id, {"n": n})
    first, last = (ConcurrencyLimit("acme", key, at_most=1) for key, _ in keys)
    other = await connect(settings, "test")
    async with other.transaction():
        await concurrency.lock_limits(other, [first])
        acting = asyncio.create_task(act(running, rows, "retry", made))
        await until_waiting(other)
        await concurrency.lock_limits(other, [last])
    assert sorted((await acting).acted) == sorted(made)
    await other.close()
    waiting = await rows.fetch("SELECT key FROM gate_job WHERE job_id = ANY($1) ORDER BY key", made)
    assert [row["key"] for row in waiting] == [key for key, _ in keys]


async def test_retried_jobs_of_several_keys_lock_these_in_the_order_of_a_debounced_submission(
    maker: Maker, running: Running, rows: Connection, settings: Settings
) -> None:
    """Job by job, they would lock the last key first, and deadlock with a submission of both."""
    made = await failed(maker, number=2)
    by_hash = "SELECT key FROM unnest($1::text[]) AS a(key) ORDER BY hashtextextended('acme/outside/' || key, 0)"
    first, last = (row["key"] for row in await rows.fetch(by_hash, ["k", "l"]))
    for job_id, key in zip(sorted(made), (last, first), strict=True):
        await rows.execute("UPDATE job SET dedupe_key = $2 WHERE id = $1", job_id, key)
    other = await connect(settings, "test")
    async with other.transaction():
        await debounce.lock_keys(other, "acme", [Debounced(new_id(), "outside", first, {}, 0.0)])
        acting = asyncio.create_task(act(running, rows, "retry", made))
        await until_waiting(other)
        await debounce.lock_keys(other, "acme", [Debounced(new_id(), "outside", last, {}, 0.0)])
    assert sorted((await acting).acted) == sorted(made)
    await other.close()


@pytest.mark.parametrize("has_limit", [False, True])
async def test_retried_jobs_count_in_their_queues_also_before_a_limit_admits_them(
    maker: Maker, running: Running, rows: Connection, client_with: MakeClient, has_limit: bool
) -> None:
    broken = await failed(maker, number=3)
    if has_limit:
        operator = await client_with(security.OPERATE)
        limit = await operator.put("/v1/limits", json={"key": "template:outside", "tenant_id": "acme", "at_most": 9})
        assert limit.is_success, limit.text
    with pytest.raises(TooMany) as refused:
        await act(running, rows, "retry", broken, queue_depth_limit=2)
    assert refused.value.code == "queue_full"
    assert sorted((await act(running, rows, "retry", broken, queue_depth_limit=3)).acted) == sorted(broken)


async def test_a_retry_that_breaks_at_its_end_leaves_nothing_of_it_in_the_outcome(
    maker: Maker, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller would publish hints, and count ends, of what was rolled back. Together the jobs break, too."""
    fine, broken = await failed(maker, number=2)

    async def add_queues_of(_admission: Admission, _connection: Connection, _paid: Paid, job_id: UUID) -> None:
        if job_id == broken:
            raise KeyError("a value that nobody foresaw")

    monkeypatch.setattr(Admission, "add_queues_of", add_queues_of)
    outcome = await act(running, rows, "retry", [fine, broken])
    assert (outcome.acted, [(one.job_id, one.code) for one in outcome.refusals]) == ([fine], [(broken, "unforeseen")])
    query = "SELECT job_id FROM task WHERE id = ANY($1)"
    hinted = await rows.fetch(query, [hint.hint.task_id for hint in outcome.hints])
    assert {row["job_id"] for row in hinted} <= {fine}  # else the relay sends the hint
    assert len(outcome.hints) == len(hinted)
    assert await statuses(rows, [fine, broken]) == ["pending", "failed"]


async def failed_runs_of_code(maker: Maker, *names: str) -> list[UUID]:
    """A failed run of each name, of code that the API and the workers of this test lack."""
    broken = []
    for name in names:
        body = {"type": name, "steps": [{"id": "a", "queue": "q"}]}
        assert (await maker.client.post("/v1/templates", json=body)).status_code in (201, 409)
        broken += await failed(maker, template=name)
    await maker.rows.execute("DELETE FROM template WHERE type = ANY($1::text[])", names)
    return broken


async def a_worker_with(rows: Connection, handler: str) -> None:
    """The row of a worker that never claims, and that runs without presence."""
    await workers.register(rows, new_id(), host="h", pid=1, version="1", queues=["operations"], handlers=[handler])


def code_of(name: str) -> Pipelines:
    pipeline = Pipeline(name, module=__name__, steps=[Step("a", queue="q")])

    @pipeline.handles("a")
    async def a(_attempt: object) -> None:
        pass

    return Pipelines(pipeline)


@pytest.mark.parametrize(
    "change", [None, "present = true", "draining = true", "handlers = '{two.a}'", "queues = '{default}'"]
)
async def test_a_run_is_left_to_a_worker_that_has_its_code_and_refused_if_no_worker_has_it(
    maker: Maker, running: Running, rows: Connection, change: str | None
) -> None:
    one, outside = *await failed_runs_of_code(maker, "one"), *await failed(maker)
    await a_worker_with(rows, "one.a")
    if change is not None:
        await rows.execute(f"UPDATE worker SET {change}")
    outcome = await act(running, rows, "retry", [one, outside])
    assert outcome.acted == [outside]
    is_left = change in (None, "present = true")  # with or without presence
    assert outcome.left == ({one: "one.a"} if is_left else {})
    codes = {refusal.job_id: refusal.code for refusal in outcome.refusals}
    assert codes == ({} if is_left else {one: "template_not_found"})


@pytest.mark.parametrize("permitted", [("of_a_package",), ()])
async def test_a_job_of_a_kind_that_the_worker_lacks_is_left_only_if_the_operation_may_change_it(
    maker: Maker, running: Running, rows: Connection, permitted: tuple[str, ...]
) -> None:
    (broken,) = await failed(maker, "webhook")
    await rows.execute("UPDATE job SET pipeline = 'of_a_package' WHERE id = $1", broken)
    await a_worker_with(rows, "of_a_package.deliver")
    outcome = await act(running, rows, "retry", [broken], permitted)
    assert outcome.left == dict.fromkeys([broken] if permitted else [], "of_a_package.deliver")
    assert [refusal.code for refusal in outcome.refusals] == ([] if permitted else ["pipeline_not_served"])


async def test_two_workers_retry_together_the_runs_of_which_each_has_half_the_code(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note has no room for all that a worker leaves."""
    monkeypatch.setattr(steps, "_MAX_LEFT", 2)
    monkeypatch.setattr(duties, "_KNOWN_SECONDS", 0.1)  # how often a worker wakes what it has the code for
    broken = await failed_runs_of_code(maker, *["one", "two"] * 4)
    settings = running.services.settings
    async with operating(settings, code_of("one")), operating(settings, code_of("two")):
        operation = await submit(client, "retry", "kind:run", canary=1)
        async with asyncio.timeout(SECONDS):
            while "pending" not in (now := await statuses(rows, broken)):
                await asyncio.sleep(0.02)
        await maker.succeed(broken[now.index("pending")])
        body = await ended(client, operation)
    assert (body["status"], body["acted"], body["refused"]) == ("succeeded", 8, 0)
    assert sorted(await statuses(rows, broken)) == [*["pending"] * 7, "succeeded"]


async def test_runs_that_were_left_are_refused_once_no_worker_has_their_code(
    maker: Maker, client: httpx2.AsyncClient, running: Running, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_LEFT_SECONDS", 0.1)
    one, _two = await failed_runs_of_code(maker, "one", "two")
    await a_worker_with(rows, "one.a")
    operation = await submit(client, "retry", "kind:run")
    async with operating(running.services.settings):
        async with asyncio.timeout(SECONDS):
            while not await rows.fetchval("SELECT count(*) FROM unknown_task WHERE handler = 'one.a'"):
                await asyncio.sleep(0.02)
        body = await read(client, operation)
        assert (body["status"], body["refused_by_code"]) == ("running", {"template_not_found": 1})
        await rows.execute("UPDATE worker SET draining = true WHERE host = 'h'")
        body = await ended(client, operation)
    assert (body["status"], body["acted"], body["refused_by_code"]) == ("succeeded", 0, {"template_not_found": 2})
    refusals = (await client.get(f"/v1/operations/{operation}/refusals")).json()["refusals"]
    assert str(one) in {refusal["job_id"] for refusal in refusals}


async def act(
    running: Running,
    rows: Connection,
    action: Action,
    job_ids: list[UUID],
    pipelines: tuple[str, ...] = (),
    **bounds: int,
) -> Outcome:
    """One batch, in a transaction, without a worker."""
    settings = running.services.settings.model_copy(update=bounds)
    operation = Operation(
        action=action,
        filter="created:>0s",
        at=await rows.fetchval("SELECT clock_timestamp()"),
        of_tenant="acme",
        pipelines=pipelines,
        runs=True,
        client_id="tests",
    )
    registry = running.services.templates.pipelines
    async with open_operation_context(settings, registry) as context, rows.transaction():
        return await act_on(context, rows, Acting(uuid4(), operation), job_ids, "acme")
