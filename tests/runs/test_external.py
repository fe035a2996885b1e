"""External workers hold leases like our own: fenced by epoch, taken over when they vanish, told of a cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest

from leasehold.api.auth.security import EXTERNAL_WORK, JOBS_READ
from leasehold.api.process.metrics import CONNECTIONS
from leasehold.api.runs import external as endpoints
from leasehold.client import ClientError, external
from leasehold.client.external import ExternalWorker, Refused, Task
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import Cancelled, Permanent, Retryable
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.telemetry.attempt_logs import MAX_FIELDS
from leasehold.transitions import external as transitions
from leasehold.transitions import sweeps
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of, value_of
from tests.api.media_api import problem
from tests.client.front import fronting
from tests.factories import Rows, assert_history
from tests.runs.conftest import SCOPES, Client, step_of
from tests.support.lock_waits import until_waiting

STEPS = [
    {"id": "outside", "queue": "reports", "retry": {"max_attempts": 2, "backoff_seconds": [0]}},
    {"id": "inside", "worker_type": "scripted.second"},
]


@pytest.fixture
async def template(client: Client) -> str:
    answer = await client.post("/v1/templates", type="mixed", steps=STEPS)
    assert answer.status_code == 201, answer.text
    return "mixed"


async def claim(client: Client, worker_id: str = "w1", **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/external/claim", worker_id=worker_id, queues=["reports"], **body)
    (task,) = answer.json()["tasks"]
    return dict(task) | {"held": {"worker_id": worker_id, "epoch": task["epoch"]}}


async def settle(client: Client, task: dict[str, Any], verb: str, **body: Any) -> Any:
    return await client.post(f"/v1/external/tasks/{task['task_id']}/{verb}", **(task["held"] | body))


async def test_the_answer_of_a_submission_and_of_a_retry_has_the_state_that_was_committed(
    client: Client, template: str
) -> None:
    """The first step is that of an external worker."""
    answer = await client.post("/v1/runs", template=template, payload={"number": 1})
    run = answer.json()["id"]
    assert (answer.status_code, answer.json()["status"]) == (202, "waiting_worker")
    task = await claim(client, wait=5)
    failed = await settle(client, task, "fail", code="broken", message="it broke", retryable=False)
    assert failed.status_code == 200, failed.text
    await client.until(run, "failed")
    answer = await client.post(f"/v1/runs/{run}/retry")
    assert (answer.status_code, answer.json()["status"]) == (202, "waiting_worker")
    assert (await client.look(run))["status"] == "waiting_worker"
    rerun = (await client.post(f"/v1/runs/{run}/rerun")).json()
    assert rerun["status"] == "waiting_worker"


async def test_the_answer_of_a_submission_says_whether_a_worker_may_claim_a_step(client: Client) -> None:
    steps = [{"id": "inside", "worker_type": "scripted.second"}]
    assert (await client.post("/v1/templates", type="inner", steps=steps)).status_code == 201
    body = {"template": "inner", "payload": {"number": 1}}
    assert (await client.post("/v1/runs", **body)).json()["status"] == "queued"
    assert (await client.post("/v1/runs", **body, dedupe={"key": "one"})).json()["status"] == "queued"
    later = (await client.post("/v1/runs", **body, scheduled_at="2100-01-01T00:00:00Z")).json()
    assert later["status"] == "pending"
    for answer in (later,):
        assert (await client.look(answer["id"]))["status"] == answer["status"]


async def test_a_task_outside_is_done_and_the_run_goes_on_inside(
    client: Client, worker: Worker, rows: Connection, template: str
) -> None:
    run = await client.start(template, payload={"number": 1})
    assert (await client.look(run))["status"] == "waiting_worker"
    task = await claim(client, wait=5)
    assert (task["run_id"], task["payload"], task["queue"]) == (run, {"number": 1}, "reports")
    assert (await settle(client, task, "progress", percent=40, summary="nearly")).status_code == 200
    assert step_of(await client.look(run), "outside")["percent"] == 40
    assert (await settle(client, task, "complete", result={"made": 1})).status_code == 200
    said = await client.until(run, "succeeded")
    assert said["result"]["outside"] == {"made": 1}
    await assert_history(Rows(rows), UUID(run))


async def test_the_step_inside_that_a_result_makes_due_is_announced_at_once(
    client: Client, rows: Connection, template: str
) -> None:
    """By the API itself: no worker is here, whose relay would do it later."""
    run = await client.start(template, payload={"number": 1})
    assert (await settle(client, await claim(client), "complete")).status_code == 200
    assert step_of(await client.look(run), "inside")["state"] == "pending"
    async with asyncio.timeout(60):
        while await rows.fetchval("SELECT count(*) FROM outbox"):
            await asyncio.sleep(0.02)


async def test_a_claim_carries_the_trace_of_its_run_if_it_has_one(
    client: Client, rows: Connection, template: str
) -> None:
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"template": template, "payload": {"number": 1}}
    assert (await client.http.post("/v1/runs", json=body, headers={"traceparent": theirs})).status_code == 202
    assert (await claim(client))["traceparent"].split("-")[1] == theirs.split("-")[1]
    run = await client.start(template)
    await rows.execute("UPDATE job SET trace = NULL WHERE id = $1", UUID(run))  # as that of a schedule's run
    assert (await claim(client))["traceparent"] is None


async def test_a_claim_waits_also_for_the_last_second(
    client: Client, running: Running, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "monotonic", lambda: 100.0)  # a second is left, however slow the machine is
    waiting = asyncio.create_task(claim(client, wait=1))
    async with asyncio.timeout(60):
        while not running.services.queues.waiting and not waiting.done():
            await asyncio.sleep(0.01)
        run = await client.start(template)
        assert (await waiting)["run_id"] == run


async def test_a_queue_that_a_claim_names_twice_counts_once(client: Client, template: str) -> None:
    for _ in range(3):
        await client.start(template, payload={"number": 1})
    body = {"worker_id": "w1", "queues": ["reports", "reports", "others"], "limit": 3}
    assert len((await client.post("/v1/external/claim", **body)).json()["tasks"]) == 3


async def test_a_queue_keeps_its_name_in_a_tenant_with_colons(running: Running, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="eu:acme", client_id="tests", scopes=[*SCOPES, JOBS_READ])
    async with client_of(running.url, key.text) as http:
        client = Client(http)
        assert (await client.post("/v1/templates", type="mixed", steps=STEPS)).status_code == 201
        run = await client.start("mixed", payload={"number": 1})
        (reason,) = (await http.get(f"/v1/runs/{run}/explain")).json()["reasons"]
        job = (await http.get(f"/v1/jobs/{run}")).json()
        assert {reason["queue"], job["steps"][0]["queue"], job["waits_for"][0]["queue"]} == {"reports"}
        assert (await claim(client))["queue"] == "reports"


#: Each report of a worker about its task, with what it needs beside the lease.
REPORTS: dict[str, dict[str, Any]] = {
    "heartbeat": {}, "progress": {"percent": 1}, "complete": {"result": {"late": True}}, "fail": {"message": "late"},
    "acknowledge-cancel": {}, "release": {},
    "files": {"files": [{"name": "late.txt", "content_type": "text/plain", "size": 4}]},
    "logs": {"first": 1, "lines": [{"message": "late"}]}, "stream": {"first": 1, "chunks": ["late"]},
}  # fmt: skip


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("wrong", ["its own older epoch", "a later epoch", "another worker's name"])
async def test_a_report_with_a_wrong_lease_is_refused_and_changes_nothing(
    client: Client,
    rows: Connection,
    template: str,
    wrong: str,
    cancelled: bool,
) -> None:
    """One half of the lease is right each time: the same worker has claimed the task again, or it is the same epoch."""
    run = await client.start(template)
    first = await claim(client)
    await rows.execute("UPDATE task SET lease_until = clock_timestamp() WHERE id = $1", UUID(first["task_id"]))
    await sweeps.expire_leases(rows, [], 5)
    second = await claim(client)
    assert second["epoch"] == first["epoch"] + 1
    if cancelled:
        assert (await client.post(f"/v1/runs/{run}/cancel")).json()["status"] == "cancel_requested"
    held = {
        "its own older epoch": first["held"],
        "a later epoch": second["held"] | {"epoch": second["epoch"] + 1},
        "another worker's name": second["held"] | {"worker_id": "w2"},
    }[wrong]
    before = await everything_of(rows, UUID(run))
    for verb, body in REPORTS.items():
        problem(await settle(client, second | {"held": held}, verb, **body), 409, "lease_lost")
    assert await everything_of(rows, UUID(run)) == before
    assert step_of(await client.look(run), "outside")["state"] == "running"
    if not cancelled:
        assert (await settle(client, second, "complete")).status_code == 200


async def everything_of(rows: Connection, run: UUID) -> list[Any]:
    """The rows of a run: its job, tasks, events, lines, chunks, progress, outputs, results and failures."""
    by_job = [await rows.fetch(f"SELECT * FROM {table} WHERE job_id = $1 ORDER BY 1, 2", run)
              for table in ("history", "job_log", "job_stream", "output", "task")]  # fmt: skip
    by_task = [
        await rows.fetch(f"SELECT x.* FROM {table} x JOIN task t ON t.id = x.task_id WHERE t.job_id = $1", run)
        for table in ("progress", "result", "failure")
    ]
    return [await rows.fetch("SELECT * FROM job WHERE id = $1", run), *by_job, *by_task]


async def test_a_failed_attempt_outside_is_tried_again_as_the_template_says(client: Client, template: str) -> None:
    run = await client.start(template)
    for _ in range(2):
        task = await claim(client, wait=5)
        assert (await settle(client, task, "fail", code="no_luck", message="bad weather")).status_code == 200
    said = await client.until(run, "failed")
    assert said["error"]["code"] == "no_luck"
    task_of_another = await client.start(template)
    assert task_of_another
    assert (await settle(client, await claim(client), "fail", code="hopeless", retryable=False)).status_code == 200
    assert (await client.until(task_of_another, "failed"))["error"]["code"] == "hopeless"


async def test_each_failure_outside_waits_as_long_as_the_template_says(client: Client, rows: Connection) -> None:
    retry = {"max_attempts": 4, "backoff_seconds": [10, 100, 1000]}
    steps = [{"id": "outside", "queue": "reports", "retry": retry}]
    assert (await client.post("/v1/templates", type="patient", steps=steps)).status_code == 201
    await client.start("patient")
    for longest in (10, 100, 1000):
        began = await rows.fetchval("SELECT clock_timestamp()")
        assert (await settle(client, await claim(client), "fail")).status_code == 200
        due_at, ended = (await rows.fetchrow("SELECT available_at, clock_timestamp() FROM task")) or (began, began)
        assert began + timedelta(seconds=longest / 2) <= due_at <= ended + timedelta(seconds=longest)
        await rows.execute("UPDATE task SET available_at = now()")


async def test_the_error_of_an_attempt_outside_shows_no_secret(client: Client, template: str) -> None:
    run = await client.start(template)
    message = "403 for https://store.example/a?X-Amz-Signature=0123456789abcdef, with Bearer\x00 abcdefgh12345678"
    assert (await settle(client, await claim(client), "fail", message=message, retryable=False)).status_code == 200
    shown = (await client.until(run, "failed"))["error"]["message"]
    assert shown.startswith("403 for https://store.example/a?X-Amz-Signature=")
    assert "0123456789abcdef" not in shown
    assert "abcdefgh12345678" not in shown


async def test_what_an_attempt_outside_logs_and_emits_shows_with_its_run(
    client: Client, worker: Worker, template: str
) -> None:
    run = await client.start(template, payload={"number": 1})
    task = await claim(client)
    line = {"message": "read", "level": "warning", "logger": "mill", "fields": {"rows": 7, "token": "lh_secret"}}
    lines = [line, {"message": "Bearer abcdefgh12345678", "at": "2026-11-22T10:30:00Z", "traceback": "Traceback: x"}]
    for _ in range(2):  # a repeated request is kept once
        answer = await settle(client, task, "logs", first=1, lines=lines)
        assert (answer.status_code, answer.json()) == (200, {"kept": 2, "cut": False})
    assert (await settle(client, task, "logs", first=3, lines=[{"message": "done"}])).json()["kept"] == 1
    for first, chunk in ((1, "to"), (2, {"ken": 1}), (2, {"ken": 1})):
        assert (await settle(client, task, "stream", first=first, chunks=[chunk])).json() == {"kept": 1, "cut": False}
    found = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [(line["n"], line["step"], line["message"]) for line in found][::2] == [
        (1, "outside", "read"), (found[2]["n"], "outside", "done")
    ]  # fmt: skip
    assert (found[0]["level"], found[0]["logger"], found[0]["fields"]["rows"]) == ("warning", "mill", 7)
    assert "abcdefgh12345678" not in found[1]["message"]
    assert (found[1]["traceback"], found[1]["at"][:16]) == ("Traceback: x", "2026-11-22T10:30")
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [(item["step"], item["chunk"]) for item in chunks] == [("outside", "to"), ("outside", {"ken": 1})]
    assert (await settle(client, task, "complete")).status_code == 200
    problem(await settle(client, task, "logs", first=4, lines=lines), 409, "lease_lost")
    await client.until(run, "succeeded")


async def test_a_line_has_a_time_that_every_reader_can_show(client: Client, template: str) -> None:
    """In UTC the outer ones of these lie in the year 10000 and in the year 0, which Python has not."""
    run = await client.start(template)
    task = await claim(client)
    for at in (
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
        "3000-01-01T00:00:00Z",
        "1969-12-31T23:59:59Z",
    ):
        problem(await settle(client, task, "logs", first=1, lines=[{"message": "x", "at": at}]), 422, "invalid_request")
    for first, at in enumerate(("1970-01-01T00:00:00Z", "2999-12-31T00:00:00Z", "2026-01-01T00:00:00+23:59"), 1):
        answer = await settle(client, task, "logs", first=first, lines=[{"message": "x", "at": at}])
        assert (answer.status_code, answer.json()["kept"]) == (200, 1), answer.text
    lines = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [line["at"][:16] for line in lines] == ["1970-01-01T00:00", "2999-12-31T00:00", "2025-12-31T00:01"]


async def test_a_later_attempt_outside_begins_its_stream_again(client: Client, template: str) -> None:
    run = await client.start(template)
    first = await claim(client)
    assert (await settle(client, first, "stream", first=1, chunks=["old"])).json()["kept"] == 1
    assert (await settle(client, first, "fail", message="again")).status_code == 200
    second = await claim(client, wait=5)
    for number, chunk in ((1, "new"), (2, "er")):
        assert (await settle(client, second, "stream", first=number, chunks=[chunk])).json()["kept"] == 1
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [(item["chunk"], item["superseded"], item["restarts"]) for item in chunks] == [
        ("old", True, False), ("new", False, True), ("er", False, False)
    ]  # fmt: skip


async def test_a_later_attempt_whose_first_chunk_was_refused_begins_its_stream_again(
    client: Client, template: str
) -> None:
    """The client counts a refused chunk. Nobody was told that the chunks before the next one are void."""
    run = await client.start(template)
    first = await claim(client)
    assert (await settle(client, first, "stream", first=1, chunks=["old"])).json()["kept"] == 1
    assert (await settle(client, first, "fail", message="again")).status_code == 200
    second = await claim(client, wait=5)
    refused = await settle(client, second, "stream", first=1, chunks=[2**70])
    problem(refused, 422, "integer_too_large")
    for number, chunk in ((2, "new"), (3, "er")):
        assert (await settle(client, second, "stream", first=number, chunks=[chunk])).json()["kept"] == 1
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [(item["chunk"], item["superseded"], item["restarts"]) for item in chunks] == [
        ("old", True, False), ("new", False, True), ("er", False, False)
    ]  # fmt: skip


async def test_an_attempt_outside_has_the_bounds_of_any_attempt(
    client: Client, running: Running, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted over its requests, whichever process of the API gets them."""
    narrow = running.services.settings.model_copy(update={"job_log_lines": 3, "stream_bytes": 1024})
    monkeypatch.setattr(running.services, "settings", narrow)
    run = await client.start(template)
    task = await claim(client)
    for first, kept, cut in ((1, 2, False), (3, 1, True), (3, 1, True), (5, 0, True)):
        answer = await settle(client, task, "logs", first=first, lines=[{"message": f"{first}"}, {"message": "and"}])
        assert answer.json() == {"kept": kept, "cut": cut}
    lines = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [line["message"] for line in lines[:3]] == ["1", "and", "3"]
    assert lines[3]["message"].startswith("The log is cut here: an attempt keeps 3 lines")
    assert [line.get("cut", False) for line in lines] == [False, False, False, True]
    assert len(lines) == 4
    for first, kept, cut in ((1, 1, False), (2, 0, True), (2, 0, True), (3, 0, True)):
        answer = await settle(client, task, "stream", first=first, chunks=["x" * 600])
        assert answer.json() == {"kept": kept, "cut": cut}
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [item.get("cut", False) for item in chunks] == [False, True]
    nul = await settle(client, await fresh(client), "stream", first=1, chunks=[{"a": "\x00"}])
    problem(nul, 422, "text_not_storable")


@pytest.mark.parametrize("logger", ["leasehold", "lease\x00hold"])  # NUL characters are removed
async def test_no_line_of_a_worker_outside_cuts_its_log(client: Client, template: str, logger: str) -> None:
    """A worker may pass on lines of its own, whatever they look like."""
    run = await client.start(template)
    task = await claim(client)
    line = {"message": "The log is cut here", "level": "warning", "logger": logger, "fields": {"cut": True}}
    for first in (1, 2):
        answer = await settle(client, task, "logs", first=first, lines=[line])
        assert answer.json() == {"kept": 1, "cut": False}
    repeated = await settle(client, task, "logs", first=2, lines=[line])
    assert repeated.json() == {"kept": 1, "cut": False}
    found = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [line.get("cut", False) for line in found] == [False, False]


async def fresh(client: Client) -> dict[str, Any]:
    await client.start("mixed")
    return await claim(client, wait=5)


async def test_the_reference_client_sends_what_a_handler_logs_and_emits(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through an outage, too; and before the task is settled."""
    monkeypatch.setattr(external, "_OUTAGE_SECONDS", 0.05)
    monkeypatch.setattr(external, "_OUTPUT_SECONDS", 0.01)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> dict[str, Any]:
        task.log("begin", rows=7)
        assert task.emit("to")
        while (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"] == []:
            await asyncio.sleep(0.02)
        front.failures = ["503", "break", "lose"]
        task.log("odd \udcff\x00", level="warning")
        task.emit({"ken": 1})
        while front.failures:
            await asyncio.sleep(0.02)
        front.failures = ["lose"]
        task.emit("end")
        with pytest.raises(TypeError):
            task.emit({1, 2})
        raise Permanent("broken", "it is broken")

    async with fronting(running.url) as front:
        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"], lease_seconds=60.0) as outside:
            async with asyncio.timeout(60):
                assert await outside.work_once(handle, wait=5)
    assert (await client.look(run))["status"] == "failed"
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [item["chunk"] for item in chunks] == ["to", {"ken": 1}, "end"]
    lines = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "begin"), ("warning", "odd ?"), ("error", "Permanent: it is broken")
    ]  # fmt: skip
    assert (lines[0]["fields"], "in handle" in lines[2]["traceback"]) == ({"rows": 7}, True)


#: The API refuses its integer.
HUGE: dict[str, Any] = {"number": 2**70}


async def test_an_item_that_the_api_refuses_takes_no_other_along_and_the_log_names_the_loss(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The items go in one request. Its long lines alone are more than a request may have."""
    monkeypatch.setattr(external, "_OUTPUT_SECONDS", 60.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> None:
        for number in range(25):
            task.log(f"{number} {'x' * 65_000}", **(HUGE if number in (7, 24) else {}))
            task.emit(HUGE if number == 17 else number)

    run = await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"]) as outside:
        assert await outside.work_once(handle, wait=5)
    lines = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    kept = [line["message"].split()[0] for line in lines if line["level"] == "info"]
    assert kept == [str(number) for number in range(25) if number not in (7, 24)]
    (loss,) = [line["message"] for line in lines if line["level"] == "warning"]
    assert loss.startswith("The API has refused output of this attempt: 422 integer_too_large")
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [item["chunk"] for item in chunks] == [number for number in range(25) if number != 17]


@pytest.mark.parametrize(
    ("failure", "count"),
    [
        ("refuse", 7),  # all four lines, two, and each of the four; then the line about the loss
        ("page", 2),  # not about the lines, so they are not divided
    ],
)
async def test_an_api_that_refuses_all_output_of_a_task_does_not_keep_it_from_its_end(
    client: Client,
    running: Running,
    rows: Connection,
    template: str,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    count: int,
) -> None:
    monkeypatch.setattr(external, "_OUTPUT_SECONDS", 60.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> None:
        for number in range(4):
            task.log(str(number))
        front.failures = [failure] * count

    async with fronting(running.url) as front:
        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"]) as outside:
            assert await outside.work_once(handle, wait=5)
        assert front.failures == []
    assert step_of(await client.look(run), "outside")["state"] == "succeeded"


@pytest.mark.parametrize(
    ("raised", "refusals", "state", "code", "retry_after"),
    [
        (Permanent("broken", "it is broken"), 1, "failed", "broken", None),
        (Retryable("busy", code="busy", after=timedelta(seconds=70)), 1, "retry", "busy", 70),
        (None, 1, "retry", "http_422", None),  # a result, which the next attempt may make otherwise
        (Permanent("broken", "it is broken"), 2, "running", None, None),
    ],
)
async def test_a_worker_works_on_after_a_settlement_that_the_api_refuses(
    client: Client,
    running: Running,
    rows: Connection,
    template: str,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception | None,
    refusals: int,
    state: str,
    code: str | None,
    retry_after: float | None,
) -> None:
    """The attempt fails with the refusal as its message. A failure stays as final as the handler said. If the API
    refuses that, too, the lease ends by itself.
    """
    monkeypatch.setattr(external, "_OUTPUT_SECONDS", 60.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(_task: Task) -> None:
        front.failures = ["refuse"] * refusals
        if raised is not None:
            front.failures.insert(0, "the log is sent")
            raise raised

    async with fronting(running.url) as front:
        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"]) as outside:
            assert await outside.work_once(handle, wait=5)
        assert front.failures == []
        failure = orjson.loads(front.bodies[-1])
    assert failure["message"] == "422 http_422: The API gave no reason."
    assert failure["retry_after"] == retry_after
    row = await rows.fetchrow(
        "SELECT t.status, f.code FROM task t LEFT JOIN failure f ON f.task_id = t.id"
        " WHERE t.job_id = $1 AND t.step = 'outside'",
        UUID(run),
    )
    assert tuple(row or ()) == (state, code)


@pytest.mark.parametrize(("unsettled", "ended_by"), [(["1", "2", "4", "5", "6"], "6"), (["1", "2", "4", "5"], "7")])
async def test_a_worker_that_can_settle_no_task_waits_after_each_and_ends_after_three(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unsettled: list[str], ended_by: str
) -> None:
    """A proxy lets the claims through, and refuses the settlements. The worker ran the whole queue for nothing."""
    claims = 0
    now: list[float] = []  # of the claims, as the sleeps let it pass
    slept = 0.0
    sleep = asyncio.sleep

    async def advance(seconds: float) -> None:
        nonlocal slept
        if seconds == 2:
            slept += seconds
        await sleep(0 if seconds == 2 else seconds)

    async def answer(path: str, **_body: Any) -> dict[str, Any]:
        nonlocal claims
        task_id, verb = path.split("/")[-2:]
        if verb == "claim":
            claims += 1
            now.append(slept)
            if claims == 7:
                raise Refused(403, "missing_scope", "no")
            return {"tasks": [{"task_id": str(claims), "step": "outside", "epoch": 1}]}
        if verb != "heartbeat" and task_id in unsettled:
            raise Refused(404, "http_404", f"not {task_id}")
        return {}

    async def handle(_task: Task) -> None:
        pass

    monkeypatch.setattr(asyncio, "sleep", advance)
    caplog.set_level(logging.WARNING)
    async with ExternalWorker("http://127.0.0.1:1", "lh_x_y", queues=["reports"]) as outside:
        monkeypatch.setattr(outside, "_request", answer)
        with pytest.raises(Refused, match=f"not {ended_by}" if ended_by == "6" else "missing_scope"):
            await outside.serve(handle)
    assert now == [0, 2, 4, 4, 6, 8, 8][: int(ended_by)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(unsettled)
    assert warnings[0] == "task 1 cannot be settled, and is left to the end of its lease: 404 http_404: not 1"


@pytest.mark.parametrize("refusals", [["forbidden"], ["refuse", "forbidden"]], ids=["at once", "after a refusal"])
async def test_a_worker_whose_key_the_api_refuses_for_a_settlement_ends(
    running: Running,
    client: Client,
    rows: Connection,
    template: str,
    monkeypatch: pytest.MonkeyPatch,
    refusals: list[str],
) -> None:
    monkeypatch.setattr(external, "_OUTPUT_SECONDS", 60.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def work(_task: Task) -> None:
        front.failures = list(refusals)

    async with fronting(running.url) as front:
        await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"]) as outside:
            with pytest.raises(Refused, match="403 missing_scope"):
                await outside.work_once(work, wait=5)


async def test_a_worker_that_stops_while_the_api_takes_no_settlement_releases_its_task(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has it at once, and no loss is charged."""
    monkeypatch.setattr(external, "_OUTAGE_SECONDS", 300.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))
    of_task = "SELECT status, losses, lease_owner FROM task WHERE job_id = $1 AND step = 'outside'"

    async def handle(task: Task) -> None:
        front.failures = ["503"]

    async with fronting(running.url) as front:
        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"], lease_seconds=3600.0) as outside:
            serving = asyncio.create_task(outside.serve(handle))
            async with asyncio.timeout(60):
                while not any(path.endswith("/complete") for _, path, _ in front.seen):
                    await asyncio.sleep(0.01)
                while front.failures:
                    await asyncio.sleep(0.01)
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
    task = await rows.fetchrow(of_task, UUID(run))
    assert task is not None
    assert tuple(task) == ("pending", 0, None)


@pytest.mark.parametrize("silent", ["stream", "logs"])
async def test_output_that_the_api_does_not_answer_leaves_time_to_release_the_task(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """The output took all of the time, so that the task waited for the end of its lease."""
    assert external._LAST_OUTPUT_SECONDS <= external._RELEASE_SECONDS / 2
    monkeypatch.setattr(external, "_LAST_OUTPUT_SECONDS", 0.01)
    asked: list[str] = []
    works = asyncio.Event()

    async def answer(path: str, **_body: Any) -> dict[str, Any]:
        verb = path.rpartition("/")[2]
        asked.append(verb)
        if verb == silent:
            await asyncio.Event().wait()
        return {"tasks": [{"task_id": "1", "step": "outside", "epoch": 1}], "cut": False}

    async def handle(task: Task) -> None:
        task.emit("a chunk")
        task.log("a line")
        works.set()
        await asyncio.Event().wait()

    async with ExternalWorker("http://127.0.0.1:1", "lh_x_y", queues=["reports"]) as outside:
        monkeypatch.setattr(outside, "_request", answer)
        serving = asyncio.create_task(outside.serve(handle))
        await works.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert asked[-1] == "release"


async def test_what_the_api_would_refuse_is_refused_where_the_handler_logs_or_emits_it(
    client: Client, running: Running, rows: Connection, template: str
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> None:
        with pytest.raises(ValueError, match="one of debug, info, warning, error, critical, not 'warn'"):
            task.log("odd", level="warn")
        with_nul: list[Any] = [{"a": ["\x00"]}, {"\x00": 1}, ["\\\x00"]]
        for chunk in with_nul:
            with pytest.raises(ValueError, match="NUL"):
                task.emit(chunk)
        fields: dict[str, Any] = {f"f{number}": number for number in range(40)}
        task.log("many", **fields)
        for level in ("debug", "info", "warning", "error", "critical"):
            task.log(level, level=level)
        task.emit("a\x00b")
        task.emit({"a": "\\u0000"})

    run = await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"]) as outside:
        assert await outside.work_once(handle, wait=5)
    first, *others = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert (first["message"], first["fields"]) == ("many", {f"f{number}": number for number in range(MAX_FIELDS)})
    assert [line["message"] for line in others] == [line["level"] for line in others]
    assert len(others) == 5
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [item["chunk"] for item in chunks] == ["ab", {"a": "\\u0000"}]


@pytest.mark.parametrize("foreign", ["page", "another object"])
async def test_a_worker_sends_heartbeats_also_after_an_answer_that_is_not_the_apis(
    client: Client, running: Running, rows: Connection, template: str, foreign: str
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(_task: Task) -> None:
        front.failures, before = [foreign], len(front.seen)
        while len([path for _, path, _ in front.seen[before:] if path.endswith("/heartbeat")]) < 2:
            await asyncio.sleep(0.02)

    async with fronting(running.url) as front:
        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"], lease_seconds=5.0) as outside:
            async with asyncio.timeout(60):
                assert await outside.work_once(handle, wait=5)
            front.failures = [foreign]
            with pytest.raises(Refused, match="is it a Leasehold API"):
                await outside.work_once(handle)
    assert step_of(await client.look(run), "outside")["state"] == "succeeded"


async def test_a_worker_of_a_cut_attempt_sends_no_more(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = running.services.settings.model_copy(update={"stream_chunks": 2})
    monkeypatch.setattr(running.services, "settings", narrow)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))
    fits: list[bool] = []

    async def handle(task: Task) -> None:
        for _ in range(4):
            fits.append(task.emit("x"))
            await task.flush()

    run = await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"]) as outside:
        assert await outside.work_once(handle, wait=5)
    assert fits == [True, True, True, False]
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [item.get("cut", False) for item in chunks] == [False, False, True]


async def test_a_worker_outside_hears_of_a_cancel_and_acknowledges_it(client: Client, template: str) -> None:
    run = await client.start(template)
    task = await claim(client)
    assert (await client.post(f"/v1/runs/{run}/cancel")).json()["status"] == "cancel_requested"
    assert (await settle(client, task, "heartbeat")).json()["cancel_requested"] is True
    assert (await settle(client, task, "acknowledge-cancel")).status_code == 200
    assert (await client.look(run))["status"] == "cancelled"


async def test_a_step_outside_that_runs_past_its_limit_has_timed_out(
    client: Client, rows: Connection, template: str
) -> None:
    run = await client.start(template)
    task = await claim(client)
    await rows.execute("UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '5 s' WHERE id = $1",
                       UUID(task["task_id"]))  # fmt: skip
    problem(await settle(client, task, "heartbeat"), 409, "lease_lost")
    assert step_of(await client.look(run), "outside")["error"]["code"] == "step_timeout"


async def late(rows: Connection, task: dict[str, Any]) -> None:
    """Its lease lasts for a minute yet."""
    await rows.execute("UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '5 s' WHERE id = $1",
                       UUID(task["task_id"]))  # fmt: skip


@pytest.mark.parametrize("verb", ["complete", "fail", "heartbeat"])
async def test_a_result_after_the_steps_limit_is_refused_whatever_the_lease(
    client: Client, rows: Connection, template: str, verb: str
) -> None:
    run = await client.start(template)
    task = await claim(client)
    await late(rows, task)
    problem(await settle(client, task, verb), 409, "lease_lost")
    step = step_of(await client.look(run), "outside")
    assert (step["state"], step["error"]["code"]) == ("retry", "step_timeout")
    problem(await settle(client, task, "complete"), 409, "lease_lost")
    await assert_history(Rows(rows), UUID(run))


@pytest.mark.parametrize("verb", ["heartbeat", "logs"])
async def test_a_report_looks_at_the_steps_limit_once_it_has_the_lock_of_the_job(
    client: Client, runs_settings: Settings, rows: Connection, template: str, verb: str
) -> None:
    """Whoever ends the step at the same moment holds this lock: a report that does not wait for it says "in time"."""
    run = await client.start(template)
    task = await claim(client)
    other = await connect(runs_settings, "test")
    async with other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", UUID(run))
        body = {"first": 1, "lines": [{"message": "x"}]} if verb == "logs" else {}
        report = asyncio.create_task(settle(client, task, verb, **body))
        await until_waiting(other)
        await other.execute(
            "UPDATE task SET started_at = started_at - interval '1 day' WHERE id = $1", UUID(task["task_id"])
        )
    problem(await report, 409, "lease_lost")
    assert await rows.fetchval("SELECT status FROM task WHERE id = $1", UUID(task["task_id"])) == "retry"
    await other.close()


async def test_a_steps_limit_is_kept_when_no_heartbeat_comes(
    client: Client, worker: Worker, rows: Connection, template: str
) -> None:
    run = await client.start(template)
    await late(rows, await claim(client))
    said = await client.until_step(run, "outside", "retry")
    assert step_of(said, "outside")["error"]["code"] == "step_timeout"
    await assert_history(Rows(rows), UUID(run))


async def test_a_step_past_its_limit_in_a_run_that_is_cancelled_has_stopped(
    client: Client, rows: Connection, template: str
) -> None:
    run = await client.start(template)
    task = await claim(client)
    await client.post(f"/v1/runs/{run}/cancel")
    await late(rows, task)
    problem(await settle(client, task, "complete"), 409, "lease_lost")
    assert (await client.look(run))["status"] == "cancelled"


async def test_a_claim_carries_what_the_steps_before_it_said_and_made(client: Client, rows: Connection) -> None:
    steps = [{"id": name, "queue": "reports", "needs": needs} for name, needs in
             (("first", []), ("other", []), ("last", ["first"]))]  # fmt: skip
    assert (await client.post("/v1/templates", type="chain", steps=steps)).status_code == 201
    await client.start("chain")
    for task in (await claim(client), await claim(client)):
        assert (task["results"], task["files"]) == ({}, [])
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)"
            " SELECT id, 'a.txt', job_id, tenant_id, step, 'jobs/a.txt', 3, 'ff', 'text/plain' FROM task WHERE id = $1",
            UUID(task["task_id"]),
        )
        assert (await settle(client, task, "complete", result={"of": task["step"]})).status_code == 200
    last = await claim(client)
    assert last["results"] == {"first": {"of": "first"}}
    (file,) = last["files"]
    assert (file["step"], file["name"], file["size"]) == ("first", "a.txt", 3)
    assert "X-Amz-Signature" in file["url"]


async def test_a_tenants_queue_is_its_own(client: Client, stranger: Client, template: str) -> None:
    await client.start(template)
    answer = await stranger.post("/v1/external/claim", worker_id="w1", queues=["reports"])
    assert answer.json()["tasks"] == []
    task = await claim(client)
    for verb in ("heartbeat", "complete"):
        problem(await stranger.post(f"/v1/external/tasks/{task['task_id']}/{verb}", **task["held"]), 409, "lease_lost")
    problem(await client.post(f"/v1/external/tasks/{uuid4()}/complete", worker_id="w", epoch=1), 409, "lease_lost")


#: How an attempt of the tenant `acme` ended -> the state that its own worker hears when it repeats the report.
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "complete": ({"result": {"made": 1}}, "succeeded"), "fail": ({"retry_after": 3600}, "retry"),
    "release": ({}, "pending"), "acknowledge-cancel": ({}, "cancelled"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
async def test_a_report_about_an_ended_attempt_of_another_tenant_is_refused_and_tells_nothing(
    client: Client, stranger: Client, template: str, end: str
) -> None:
    """A worker may repeat its own report, because the answer may be lost. Nobody else learns how the attempt ended."""
    run = await client.start(template)
    task = await claim(client)
    if end == "acknowledge-cancel":
        await client.post(f"/v1/runs/{run}/cancel")
    body, state = ENDS[end]
    for _ in ("the report", "its repetition"):
        answer = await settle(client, task, end, **body)
        assert (answer.status_code, answer.json()) == (200, {"status": state})
    for verb, body in REPORTS.items():
        problem(await settle(stranger, task, verb, **body), 409, "lease_lost")


@pytest.mark.parametrize(
    "body", [{"queues": []}, {"queues": ["NO"]}, {"worker_id": ""}, {"wait": 31}, {"lease_seconds": 1}, {"more": 1}]
)
async def test_a_claim_that_makes_no_sense_is_refused(client: Client, body: dict[str, Any]) -> None:
    answer = await client.post("/v1/external/claim", **({"worker_id": "w", "queues": ["reports"]} | body))
    problem(answer, 422, "invalid_request")


async def test_the_reference_client_works_fails_and_stops_as_it_should(
    client: Client, running: Running, rows: Connection, template: str
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> dict[str, Any]:
        if task.payload.get("fail"):
            raise Permanent("broken", "it is broken")
        while task.payload.get("work"):
            await task.progress(10)
            task.checkpoint()
            await asyncio.sleep(0.05)
        return {"by": task.step}

    async with ExternalWorker(running.url, key.text, queues=["reports"], lease_seconds=5.0) as outside:
        assert not await outside.work_once(handle)
        done = await client.start(template)
        assert await outside.work_once(handle, wait=5)
        assert (await client.look(done))["result"] == {"outside": {"by": "outside"}}
        failed = await client.start(template, payload={"fail": True})
        await outside.work_once(handle, wait=5)
        assert (await client.look(failed))["error"]["code"] == "broken"
        stopped = await client.start(template, payload={"work": True})
        working = asyncio.create_task(outside.work_once(handle, wait=5))
        await client.until_step(stopped, "outside", "running")
        await client.post(f"/v1/runs/{stopped}/cancel")
        await working
        assert (await client.look(stopped))["status"] == "cancelled"


@pytest.mark.parametrize(
    ("url", "key"),
    [("jobs.example.com", "lh_x_y"), ("localhost:1", "lh_x_y"), ("http://127.0.0.1:1", "lh_x_y\n"),
     ("http://127.0.0.1:1", "lh_x_y "), ("http://127.0.0.1:1\n", "lh_x_y")],
)  # fmt: skip
def test_a_worker_with_a_url_or_a_key_that_no_request_can_hold_is_refused_as_a_client_is(url: str, key: str) -> None:
    """It waited for ever, as if the API did not answer."""
    with pytest.raises(ClientError, match="the API") as refused:
        ExternalWorker(url, key, queues=["reports"])
    assert "lh_x_y" not in str(refused.value)


class Odd(Exception):
    """Its text is no UTF-8, as that of an error about a file name may be, and has a NUL."""

    def __str__(self) -> str:
        return "no file \udcff \x00"


class Unprintable(Exception):
    """Its text cannot be read."""

    def __str__(self) -> str:
        raise AttributeError("no detail")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Odd(), "handler_error"),
        (Unprintable(), "handler_error"),
        (Permanent("Not A Code", "x" * 5000), "handler_error"),
        (Retryable("later", code="later", after=timedelta(days=800)), "later"),
        ({"value": {1, 2}}, "handler_error"),
        ({"value": float("nan")}, "handler_error"),
        ({"value": "\udcff"}, "handler_error"),
        (["a", "list"], "invalid_request"),
        ({"large": "x" * 2_000_000}, None),
    ],
)
async def test_whatever_a_handler_gives_its_worker_settles_the_task_and_works_on(
    client: Client, running: Running, rows: Connection, template: str, outcome: Any, code: str | None
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def handle(task: Task) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    run = await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"], lease_seconds=5.0) as outside:
        assert await outside.work_once(handle, wait=5)
    ((kind, stored),) = await rows.fetch(
        "SELECT kind, data->>'code' FROM history WHERE job_id = $1 AND step = 'outside' ORDER BY seq DESC LIMIT 1",
        UUID(run),
    )
    assert kind in ("failed", "retried")
    assert code in (stored, None)


@pytest.mark.parametrize(
    ("stop", "code", "retryable"),
    [(Cancelled(), "handler_cancelled", False), (asyncio.CancelledError(), "handler_error", True)],
)
async def test_a_handler_outside_that_stops_without_being_asked_has_failed_and_its_worker_works_on(
    client: Client,
    running: Running,
    rows: Connection,
    template: str,
    stop: BaseException,
    code: str,
    *,
    retryable: bool,
) -> None:
    """Its worker ended, or left the task to its lease."""
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async def stops(_task: Task) -> None:
        raise stop

    run = await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"], lease_seconds=3600.0) as outside:
        assert await outside.work_once(stops, wait=5)
        row = await rows.fetchrow("SELECT code, cause FROM failure")
        assert tuple(row or ()) == (code, "error")
        assert await outside.work_once(stops, wait=5 if retryable else 0) is retryable
    said = await client.until(run, "failed")
    assert said["error"]["code"] == code


async def test_an_external_worker_settles_through_an_outage_and_a_refused_heartbeat(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done once is not done again for a request that was lost."""
    monkeypatch.setattr(external, "_OUTAGE_SECONDS", 0.05)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))
    calls: list[str] = []

    async with fronting(running.url) as front:

        async def handle(task: Task) -> dict[str, Any]:
            calls.append(task.id)
            front.failures = ["refuse"]  # a heartbeat
            while front.failures:
                await asyncio.sleep(0.05)
            front.failures = ["503", "break", "429", "lose"]
            return {"done": True}

        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"], lease_seconds=5.0) as outside:
            assert await outside.work_once(handle, wait=5)
        assert front.failures == []
    assert (await client.look(run))["result"] == {"outside": {"done": True}}
    assert len(calls) == 1


async def test_a_heartbeat_that_nobody_answers_does_not_cost_the_lease(
    client: Client, running: Running, rows: Connection, template: str
) -> None:
    """One process of the API stands still, and others answer. The worker waited for it until the lease had passed."""
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))

    async with fronting(running.url) as front:

        async def handle(task: Task) -> dict[str, Any]:
            front.failures = ["silent"]
            renewed = "SELECT lease_until > $2 FROM task WHERE id = $1 AND status = 'running'"
            first_until = await rows.fetchval("SELECT lease_until FROM task WHERE id = $1", UUID(task.id))
            while not await rows.fetchval(renewed, UUID(task.id), first_until):  # no sweep runs beside it
                task.checkpoint()
                await asyncio.sleep(0.05)
            assert front.failures == []
            return {"done": True}

        run = await client.start(template)
        async with ExternalWorker(front.url, key.text, queues=["reports"], lease_seconds=5.0) as outside:
            async with asyncio.timeout(20):
                assert await outside.work_once(handle, wait=5)
    assert (await client.look(run))["result"] == {"outside": {"done": True}}
    assert await rows.fetchval("SELECT losses FROM task WHERE job_id = $1 AND step = 'outside'", UUID(run)) == 0


async def test_a_task_that_is_given_back_costs_no_attempt(client: Client, rows: Connection) -> None:
    steps = [{"id": "outside", "queue": "reports", "retry": {"max_attempts": 1}}]
    assert (await client.post("/v1/templates", type="once", steps=steps)).status_code == 201
    run = await client.start("once")
    for _ in range(3):
        task = await claim(client, wait=5)
        assert task["attempt"] == 1
        for _ in range(2):  # the second answers what the first did
            assert (await settle(client, task, "release")).json() == {"status": "pending"}
    task = await claim(client, "w2", wait=5)
    assert (await settle(client, task, "complete", result={"made": 1})).status_code == 200
    assert (await client.look(run))["result"] == {"outside": {"made": 1}}
    await assert_history(Rows(rows), UUID(run))


async def test_a_task_that_is_given_back_in_a_cancelled_run_has_stopped(client: Client, template: str) -> None:
    run = await client.start(template)
    task = await claim(client)
    await client.post(f"/v1/runs/{run}/cancel")
    assert (await settle(client, task, "release")).json() == {"status": "cancelled"}
    assert (await client.look(run))["status"] == "cancelled"


async def test_giving_back_does_not_lengthen_the_steps_limit(client: Client, rows: Connection, template: str) -> None:
    run = await client.start(template)
    task = await claim(client)
    await rows.execute("UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '5 s'")
    problem(await settle(client, task, "release"), 409, "lease_lost")
    assert step_of(await client.look(run), "outside")["state"] != "running"


async def test_a_worker_that_stops_gives_its_task_back(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "_RELEASE_SECONDS", 60.0)
    key = await create_key(rows, tenant_id="acme", client_id="outside", scopes=(EXTERNAL_WORK,))
    started = asyncio.Event()

    async def handle(_task: Task) -> dict[str, Any]:
        started.set()
        await asyncio.Event().wait()
        return {}

    await client.start(template)
    async with ExternalWorker(running.url, key.text, queues=["reports"], lease_seconds=3600.0) as outside:
        working = asyncio.create_task(outside.serve(handle))
        await started.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    task = await claim(client, "w2", wait=5)
    assert (task["attempt"], task["epoch"]) == (1, 2)


async def test_of_many_who_wait_as_many_as_there_are_tasks_get_one(
    client: Client, running: Running, template: str
) -> None:
    """And the others wait on, without asking the database each for itself."""

    async def waiting(number: int) -> list[Any]:
        answer = await client.post("/v1/external/claim", worker_id=f"w{number}", queues=["reports"], wait=30)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tasks"])

    waiters = [asyncio.create_task(waiting(number)) for number in range(20)]
    while running.services.queues.waiting < len(waiters):
        await asyncio.sleep(0.01)
    runs = {await client.start(template) for _ in range(3)}
    async with asyncio.timeout(60):
        while sum(waiter.done() for waiter in waiters) < len(runs):
            await asyncio.sleep(0.01)
    running.services.drain()  # lets those go that wait on
    found = [tasks for tasks in await asyncio.gather(*waiters) if tasks]
    assert sorted(task["run_id"] for (task,) in found) == sorted(runs)
    assert running.services.queues.waiting == 0


@asynccontextmanager
async def claiming(client: Client, running: Running, wait: int) -> AsyncIterator[None]:
    """A worker that has asked for tasks, with a lease of an hour, and dies at the end of the block. The API has seen
    its end then.
    """
    host, port = running.url.removeprefix("http://").split(":")
    opened = value_of(CONNECTIONS)
    _, writer = await asyncio.open_connection(host, int(port))
    body = orjson.dumps({"worker_id": "dead", "queues": ["reports"], "wait": wait, "lease_seconds": 3600, "limit": 9})
    head = "POST /v1/external/claim HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    key = client.http.headers["authorization"]
    writer.write(f"{head}Authorization: {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    yield
    writer.transport.abort()
    while value_of(CONNECTIONS) > opened:
        await asyncio.sleep(0.01)


async def test_a_worker_that_dies_while_it_waits_gets_no_task(
    client: Client, running: Running, rows: Connection, template: str
) -> None:
    async with asyncio.timeout(20), claiming(client, running, wait=30):
        while running.services.queues.waiting < 1:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        while running.services.queues.waiting:
            await asyncio.sleep(0.01)
    await client.start(template)
    task = await claim(client, "w2", wait=20)
    assert (task["attempt"], task["epoch"]) == (1, 1)


async def test_a_task_that_a_dead_worker_has_claimed_is_due_again_at_once_and_costs_no_attempt(
    client: Client, running: Running, rows: Connection, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died before its answer."""
    read, claimed, go_on = transitions.needed_steps, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any) -> Any:
        claimed.set()
        await go_on.wait()
        return await read(*arguments)

    runs = {await client.start(template) for _ in range(2)}
    monkeypatch.setattr(transitions, "needed_steps", slowly)
    async with asyncio.timeout(20):
        async with claiming(client, running, wait=0):
            await claimed.wait()
        go_on.set()
    monkeypatch.undo()
    tasks = [await claim(client, "w2", wait=20) for _ in runs]
    assert {task["run_id"] for task in tasks} == runs
    assert [(task["attempt"], task["epoch"]) for task in tasks] == [(1, 2)] * 2
    for run in runs:
        await assert_history(Rows(rows), UUID(run))


async def test_a_claim_that_fails_halfway_has_claimed_nothing(
    client: Client, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.start(template)

    async def lost(*_arguments: Any) -> Any:
        raise ConnectionResetError

    monkeypatch.setattr(transitions, "needed_steps", lost)
    answer = await client.post("/v1/external/claim", worker_id="w1", queues=["reports"], lease_seconds=3600)
    problem(answer, 503, "database_unavailable")
    monkeypatch.undo()
    task = await claim(client, "w2")
    assert (task["attempt"], task["epoch"]) == (1, 1)


async def test_nobody_is_woken_for_a_paused_queue_or_for_what_is_not_due(
    client: Client, running: Running, rows: Connection, template: str
) -> None:
    await rows.execute("INSERT INTO paused_queue (queue, reason) VALUES ('ext:acme:reports', 'tests')")
    await client.start(template)
    assert not await running.services.queues.runnable(["ext:acme:reports"], 0.5)
    await rows.execute("DELETE FROM paused_queue")
    assert await running.services.queues.runnable(["ext:acme:reports", "ext:acme:others"], 60)
    await rows.execute("UPDATE task SET available_at = clock_timestamp() + interval '1 hour'")
    assert not await running.services.queues.runnable(["ext:acme:reports"], 0.5)
