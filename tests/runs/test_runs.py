"""A run is made once, runs as its template says, and is told of as it stands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import time_machine

from leasehold.api.auth.security import JOBS_READ, RUNS_READ
from leasehold.api.http.cursors import cursor_of
from leasehold.api.http.tags import json_of_request
from leasehold.api.runs.schemas import RunRequest
from leasehold.db import run_reads
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.transitions import queues
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.runs.conftest import SECONDS, Client, step_of


async def test_a_run_goes_through_its_steps_and_tells_their_results(client: Client, worker: Worker) -> None:
    said = await client.until(await client.start(payload={"number": 7}), "succeeded")
    assert [(step["id"], step["status"]) for step in said["progress"]["steps"]] == [
        ("first", "succeeded"), ("second", "succeeded"),
    ]  # fmt: skip
    assert said["result"] == {"first": {"attempt": 1, "number": 7}}
    assert said["progress"]["percentage"] == 100
    assert said["payload"] == {"do": "finish", "number": 7, "dry_run": False, "numbers": []}


async def test_the_history_of_a_run_adds_up_to_its_rows(client: Client, worker: Worker, rows: Connection) -> None:
    run = await client.start(payload={"do": "fail once"})
    said = await client.until(run, "succeeded")
    assert step_of(said, "first")["attempt"] == 2
    await assert_history(Rows(rows), said["id"])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"payload": {"number": "many"}}, 422, "invalid_payload"),
        ({"payload": {"unknown": 1}}, 422, "invalid_payload"),
        ({"template": "nothing"}, 404, "template_not_found"),
        ({"version": 9}, 404, "template_not_found"),
        ({"scope": "NOT A SCOPE"}, 422, "invalid_request"),
        ({"priority": "urgent"}, 422, "invalid_request"),
        ({"scheduled_at": "2026-11-21T10:00:00"}, 422, "invalid_request"),  # no zone: nobody knows when
        ({"scheduled_at": "2100-01-01T00:00:00Z", "delay_seconds": 5}, 422, "start_ambiguous"),
    ],
)
async def test_what_cannot_be_run_is_refused(client: Client, body: dict[str, object], status: int, code: str) -> None:
    said = problem(await client.post("/v1/runs", **({"template": "scripted"} | body)), status, code)
    if code == "invalid_payload":
        assert "/number" in said["detail"] or "unknown" in said["detail"]


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}])
@pytest.mark.parametrize("body", [{"scope_id": "a\0"}, {"payload": {"text": "a\0"}}])
async def test_a_text_that_cannot_be_stored_is_refused_and_costs_those_beside_it_nothing(
    client: Client, body: dict[str, object], key: dict[str, str]
) -> None:
    steps = [{"id": "outside", "queue": "reports"}]
    assert (await client.post("/v1/templates", type="plain", steps=steps)).status_code == 201
    ask = client.http.post
    bodies = [{"template": "plain"}, {"template": "plain"} | body, {"template": "plain"}]
    first, broken, last = await asyncio.gather(
        *(ask("/v1/runs", json=one, headers=key if one is bodies[1] else {}) for one in bodies)
    )
    assert (first.status_code, last.status_code) == (202, 202)
    problem(broken, 422, "text_not_storable")


@pytest.mark.parametrize(
    ("do", "code"),
    [("fail", "broken"), ("fail always", "unlucky"), ("raise", "handler_error"), ("odd answer", "bad_answer"),
     ("no json", "bad_output")],
)  # fmt: skip
async def test_a_handler_that_misbehaves_fails_its_run_with_a_code(
    client: Client, worker: Worker, do: str, code: str
) -> None:
    said = await client.until(await client.start(payload={"do": do}), "failed")
    assert said["error"]["code"] == code
    assert step_of(said, "second")["status"] == "skipped"


@pytest.mark.parametrize(("do", "code"), [("exit", "child_crashed"), ("eat memory", "out_of_memory")])
async def test_a_handler_that_kills_its_process_is_poison_and_no_worker_dies(
    client: Client, worker: Worker, do: str, code: str
) -> None:
    run = await client.start("isolated", payload={"do": do})
    said = await client.until(run, "failed", "succeeded")
    assert said["error"]["code"] == code
    assert (await client.until(await client.start("isolated", payload={"number": 3}), "succeeded"))["result"] == {
        "count": {"counted": 3}
    }


async def test_another_tenant_sees_nothing(client: Client, stranger: Client) -> None:
    run = await client.start(payload={"do": "finish"})
    for asked in (f"/v1/runs/{run}", f"/v1/runs/{run}/events", f"/v1/runs/{run}/explain"):
        problem(await stranger.http.get(asked), 404, "run_not_found")
    for verb in ("cancel", "retry", "rerun"):
        problem(await stranger.post(f"/v1/runs/{run}/{verb}"), 404, "run_not_found")
    assert (await stranger.http.get("/v1/runs")).json()["runs"] == []


async def test_the_same_idempotency_key_makes_one_run(client: Client) -> None:
    body, headers = {"template": "scripted"}, {"Idempotency-Key": str(uuid4())}
    answers = await asyncio.gather(*(client.http.post("/v1/runs", json=body, headers=headers) for _ in range(6)))
    made = {answer.json()["id"] for answer in answers if answer.status_code == 202}
    assert len(made) == 1
    assert {answer.status_code for answer in answers} <= {202, 409}
    assert len((await client.http.get("/v1/runs")).json()["runs"]) == 1
    reused = await client.http.post("/v1/runs", json=body | {"scope_id": "x"}, headers=headers)
    problem(reused, 422, "idempotency_key_reused")


async def test_a_run_starts_no_earlier_than_it_was_scheduled(client: Client, worker: Worker) -> None:
    at = datetime.now(UTC) + timedelta(seconds=1.5)
    run = await client.start(scheduled_at=at.isoformat())
    later = await client.start(scheduled_at=(at + timedelta(days=1)).isoformat())
    explained = (await client.http.get(f"/v1/runs/{later}/explain")).json()
    assert [reason["code"] for reason in explained["reasons"]] == ["waiting_until"]
    said = await client.until(run, "succeeded")
    assert datetime.fromisoformat(said["started_at"]) >= at


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
async def test_a_run_starts_no_earlier_than_its_delay_by_the_databases_clock(
    client: Client, worker: Worker, rows: Connection, headers: dict[str, str]
) -> None:
    before = await rows.fetchval("SELECT clock_timestamp()")
    with time_machine.travel(datetime.now(UTC) - timedelta(hours=1), tick=True):
        body = {"template": "scripted", "scheduled_at": None, "delay_seconds": 1.5}
        accepted = await client.http.post("/v1/runs", json=body, headers=headers)
    assert (accepted.status_code, accepted.json()["status"]) == (202, "pending")
    said = await client.until(accepted.json()["id"], "succeeded")
    assert datetime.fromisoformat(said["scheduled_at"]) >= before + timedelta(seconds=1.5)
    assert datetime.fromisoformat(said["started_at"]) >= datetime.fromisoformat(said["scheduled_at"])


async def test_a_repetition_with_the_same_delay_is_the_same_request(client: Client) -> None:
    async def start(**members: Any) -> Any:
        body = {"template": "scripted", **members}
        return await client.http.post("/v1/runs", json=body, headers={"Idempotency-Key": "k"})

    first = await start(delay_seconds=3600)
    again = await start(delay_seconds=3600.0)
    assert (first.status_code, again.status_code, again.json()) == (202, 202, first.json())
    start_of_first = (await client.look(first.json()["id"]))["scheduled_at"]
    for other in ({"delay_seconds": 3601}, {}, {"scheduled_at": start_of_first}):
        problem(await start(**other), 422, "idempotency_key_reused")


def test_a_request_that_the_first_release_knew_has_the_fingerprint_of_then() -> None:
    """Else a repetition across the upgrade would be refused."""
    body = RunRequest.model_validate({"template": "t", "scope_id": "7", "scheduled_at": "2030-01-01T00:00:00Z"})
    assert json_of_request(body) == (
        b'{"template":"t","version":null,"scope":"tenant","scope_id":"7","payload":{},"priority":"normal",'
        b'"scheduled_at":"2030-01-01T00:00:00Z","start_within_seconds":null,"dedupe":null}'
    )


async def test_lists_are_paged_newest_first_and_by_what_is_asked_for(client: Client, worker: Worker) -> None:
    for number in range(5):
        await client.start(payload={"number": number}, scope="user", scope_id=f"u{number % 2}")
    failed = await client.start(payload={"do": "fail"})
    await client.until(failed, "failed")
    seen, cursor = [], None
    while True:
        page = (await client.http.get("/v1/runs", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [run["id"] for run in page["runs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(seen) == 6
    assert seen == sorted(seen, reverse=True)
    mine = (await client.http.get("/v1/runs", params={"scope": "user", "scope_id": "u1"})).json()["runs"]
    assert len(mine) == 2
    bad = (await client.http.get("/v1/runs", params={"status": "failed"})).json()["runs"]
    assert [run["id"] for run in bad] == [failed]
    problem(await client.http.get("/v1/runs", params={"cursor": "bm9uc2Vuc2U"}), 422, "invalid_cursor")


async def test_events_stream_to_the_end_and_resume_without_loss(client: Client, worker: Worker) -> None:
    run = await client.start()
    whole = (await client.http.get(f"/v1/runs/{run}/events")).text
    ids = [int(line.removeprefix("id: ")) for line in whole.splitlines() if line.startswith("id: ")]
    assert ids == list(range(1, len(ids) + 1))
    rest = (await client.http.get(f"/v1/runs/{run}/events", headers={"Last-Event-ID": "3"})).text
    assert [int(x.removeprefix("id: ")) for x in rest.splitlines() if x.startswith("id: ")] == ids[3:]
    nothing_follows = await client.http.get(f"/v1/runs/{run}/events", headers={"Last-Event-ID": str(ids[-1])})
    assert (nothing_follows.status_code, nothing_follows.content) == (204, b"")


async def test_a_client_that_knows_all_events_so_far_hears_of_the_rest(client: Client) -> None:
    """A browser never connects again after a 204."""
    run = await client.start()
    known = {"Last-Event-ID": "1"}
    async with client.http.stream("GET", f"/v1/runs/{run}/events", headers=known) as answer:
        assert answer.status_code == 200
        await client.post(f"/v1/runs/{run}/cancel", reason="")
        assert "id: 2" in [line async for line in answer.aiter_lines()]


async def test_a_failed_run_goes_on_from_the_step_that_failed(client: Client, worker: Worker) -> None:
    run = await client.start(payload={"do": "fail", "number": 5})
    await client.until(run, "failed")
    letters = (await client.http.get("/v1/dead-letters")).json()["dead_letters"]
    assert [(letter["run_id"], letter["code"]) for letter in letters] == [(run, "broken")]
    answer = await client.post(
        f"/v1/dead-letters/{letters[0]['task_id']}/replay", payload={"do": "finish", "number": 6}
    )
    assert answer.status_code == 202, answer.text
    said = await client.until(run, "succeeded")
    assert said["result"]["first"]["number"] == 6
    problem(await client.post(f"/v1/runs/{run}/retry"), 409, "resource_invalid_state")


async def test_a_failed_run_is_replayed_from_an_earlier_step_and_does_again_what_needs_it(
    client: Client, worker: Worker, rows: Connection
) -> None:
    steps = [
        {"id": "a", "worker_type": "external", "queue": "q"},
        {"id": "b", "worker_type": "external", "queue": "q"},
        {"id": "c", "worker_type": "external", "queue": "q"},
        {"id": "beside", "needs": ["a"], "worker_type": "external", "queue": "other"},
    ]
    assert (await client.post("/v1/templates", type="line", steps=steps)).status_code == 201
    run = await client.start("line")

    async def settle(step: str, verb: str, queue: str = "q", **body: Any) -> None:
        (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=[queue], wait=5)).json()["tasks"]
        assert task["step"] == step
        held = {"worker_id": "w", "epoch": task["epoch"]}
        assert (await client.post(f"/v1/external/tasks/{task['task_id']}/{verb}", **held, **body)).status_code == 200

    await settle("a", "complete", result={"try": 1})
    await settle("beside", "complete", "other", result={"try": 1})
    await settle("b", "complete", result={"try": 1})
    await settle("c", "fail", retryable=False)
    await client.until(run, "failed")
    problem(await client.post(f"/v1/runs/{run}/retry", from_step="nothing"), 422, "unknown_step")
    assert (await client.post(f"/v1/runs/{run}/retry", from_step="b")).status_code == 202
    await settle("b", "complete", result={"try": 2})
    await settle("c", "complete", result={"try": 2})
    said = await client.until(run, "succeeded")
    assert {step: value["try"] for step, value in said["result"].items()} == {"a": 1, "beside": 1, "b": 2, "c": 2}
    await assert_history(Rows(rows), UUID(run))


async def test_dead_letters_of_one_cause_are_one_group_and_are_replayed_after_a_canary(
    client: Client, worker: Worker
) -> None:
    failed = [await client.start(payload={"do": "fail", "number": number}) for number in range(3)]
    for run in failed:
        await client.until(run, "failed")
    (group,) = (await client.http.get("/v1/dead-letters/groups")).json()["groups"]
    assert (group["n"], group["code"], group["step"]) == (3, "broken", "first")
    problem(await client.post("/v1/dead-letters/replay"), 422, "filter_missing")
    canary = await client.post("/v1/dead-letters/replay", fingerprint=group["fingerprint"], canary=True)
    assert len(canary.json()["replayed"]) == 1
    await client.until(canary.json()["replayed"][0], "failed")
    rest = await client.post("/v1/dead-letters/replay", fingerprint=group["fingerprint"])
    assert sorted(rest.json()["replayed"]) == sorted(failed)


async def test_a_rerun_is_a_fresh_run_of_the_same_payload(client: Client, worker: Worker) -> None:
    run = await client.start(payload={"number": 4}, scope="user", scope_id="me")
    await client.until(run, "succeeded")
    again = (await client.post(f"/v1/runs/{run}/rerun")).json()["id"]
    said = await client.until(again, "succeeded")
    assert (said["rerun_of"], said["payload"]["number"], said["scope_id"]) == (run, 4, "me")
    assert again != run


async def test_a_rerun_of_code_that_takes_the_payload_no_more_is_refused(
    client: Client, worker: Worker, rows: Connection
) -> None:
    """It was accepted, and failed with `bad_params`."""
    run = await client.start(payload={"number": 4})
    await client.until(run, "succeeded")
    await rows.execute('UPDATE job SET params = params || \'{"numbers": ["one"]}\'')  # as code of before took it
    said = problem(await client.post(f"/v1/runs/{run}/rerun"), 422, "invalid_payload")
    assert "/numbers/0" in said["detail"]
    assert len((await client.http.get("/v1/runs")).json()["runs"]) == 1


async def test_a_rerun_of_code_that_takes_more_than_before_has_the_defaults_of_today(
    client: Client, worker: Worker, rows: Connection
) -> None:
    run = await client.start(payload={"number": 4})
    await client.until(run, "succeeded")
    await rows.execute("UPDATE job SET params = params - 'dry_run'")
    again = (await client.post(f"/v1/runs/{run}/rerun")).json()["id"]
    assert (await client.look(again))["payload"]["dry_run"] is False


async def test_a_step_spreads_into_parts_and_goes_on_with_their_results(client: Client, worker: Worker) -> None:
    said = await client.until(await client.start("spread", payload={"number": 5}), "succeeded")
    assert said["result"]["gather"] == {"sum": 30}
    assert step_of(said, "piece.4")["result"] == {"square": 16}


async def test_several_steps_of_a_template_spread_into_the_same_part(client: Client, worker: Worker) -> None:
    """Two at once, and one after them. The parts of all but the first have the name of their step, too."""
    step = {"worker_type": "spread.gather", "needs": []}
    steps = [step | {"id": "a"}, step | {"id": "b"}, step | {"id": "c", "needs": ["a", "b"]}]
    assert (await client.post("/v1/templates", type="spreads", steps=steps)).status_code == 201
    said = await client.until(await client.start("spreads", payload={"number": 5}), "succeeded", "failed")
    assert {name: said["result"][name] for name in "abc"} == {name: {"sum": 30} for name in "abc"}, said["error"]
    parts = {each["id"] for each in said["progress"]["steps"] if "." in each["id"]}
    first = {f"piece.{number}" for number in range(5)}
    assert parts in [first | {f"{name}.{part}" for name in names for part in first} for names in ("bc", "ac")]


async def test_a_run_that_goes_on_from_a_step_that_spreads_joins_the_results_of_new_parts_alone(
    client: Client, worker: Worker, rows: Connection
) -> None:
    run = await client.start("spread", payload={"do": "fail", "number": 4})
    await client.until(run, "failed")
    retried = await client.post(f"/v1/runs/{run}/retry", from_step="gather", payload={"number": 3})
    assert retried.status_code == 202, retried.text
    said = await client.until(run, "succeeded")
    assert said["result"]["gather"] == {"sum": 5}
    assert [step["id"] for step in said["progress"]["steps"] if "." in step["id"]] == ["piece.0", "piece.1", "piece.2"]
    await assert_history(Rows(rows), UUID(run))


async def test_a_part_does_not_take_what_a_part_of_another_item_has_published_under_its_name(
    client: Client, worker: Worker, rows: Connection
) -> None:
    """A later attempt looks for what an earlier one has published; a step that fans out anew gives old names again."""
    run = await client.start("shards")
    assert step_of(await client.until(run, "failed"), "shard.0")["result"] == {"item": "cut 1"}
    await queues.pause(rows, "heavy", "a test")
    assert (await client.post(f"/v1/runs/{run}/retry", from_step="cut")).status_code == 202
    async with asyncio.timeout(SECONDS):  # as if the first attempt of the new part had been lost
        while await rows.execute("UPDATE task SET epoch = 1 WHERE step = 'shard.0'") != "UPDATE 1":
            await asyncio.sleep(0.02)
    await queues.resume(rows, "heavy")
    said = await client.until(run, "succeeded")
    assert said["result"]["cut"] == {"shards": [{"item": "cut 2"}]}


@pytest.mark.parametrize(("do", "number", "code"), [
    ("fail", 3, "broken"), ("finish", 0, "bad_answer"), ("finish", 1001, "bad_answer"),
    ("spread twice", 2, "spread_twice"),
])  # fmt: skip
async def test_a_spread_that_cannot_be_joined_fails_the_run(
    client: Client, worker: Worker, do: str, number: int, code: str
) -> None:
    said = await client.until(await client.start("spread", payload={"do": do, "number": number}), "failed")
    assert said["error"]["code"] == code


async def test_a_skipped_step_holds_nobody_up(client: Client, worker: Worker) -> None:
    said = await client.until(await client.start("branches", payload={"dry_run": True}), "succeeded")
    assert {step["id"]: step["status"] for step in said["progress"]["steps"]} == {
        "top": "succeeded", "left": "skipped", "right": "succeeded", "bottom": "succeeded",
    }  # fmt: skip


async def test_the_ledger_names_the_lease_of_every_step(client: Client, worker: Worker) -> None:
    run = await client.start()
    await client.until(run, "succeeded")
    explained = (await client.http.get(f"/v1/runs/{run}/explain")).json()
    assert explained["reasons"][0]["code"] == "ended"
    claimed = [entry for entry in explained["ledger"] if entry["kind"] == "claimed"]
    assert [(entry["step"], entry["epoch"], entry["worker"]) for entry in claimed] == [
        ("first", 1, str(worker.id)), ("second", 1, str(worker.id)),
    ]  # fmt: skip


async def test_a_timeout_counts_by_the_databases_clock_however_wrong_the_apis_is(
    client: Client, rows: Connection
) -> None:
    steps = [{"id": "only", "queue": "outside"}]
    await client.post("/v1/templates", type="timed", steps=steps, timeout_seconds=600)
    with time_machine.travel(datetime.now(UTC) - timedelta(hours=1), tick=True):
        run = await client.start("timed")
    later = await client.start("timed", scheduled_at="2100-01-01T00:00:00Z")
    left = "SELECT deadline_at - created_at FROM job WHERE id = $1"
    assert abs(await rows.fetchval(left, UUID(run)) - timedelta(seconds=600)) < timedelta(minutes=1)  # two reads of it
    due = await rows.fetchval("SELECT deadline_at FROM job WHERE id = $1", UUID(later))
    assert due == datetime(2100, 1, 1, 0, 10, tzinfo=UTC)


async def test_a_start_that_has_passed_is_now(client: Client, rows: Connection) -> None:
    """As when the client's clock is slow. Neither has the run less time, nor does it overtake those before it."""
    steps = [{"id": "only", "queue": "outside"}]
    await client.post("/v1/templates", type="timed", steps=steps, timeout_seconds=600)
    past = "2000-01-01T00:00:00Z"
    before = await rows.fetchval("SELECT clock_timestamp()")
    batch = await client.post("/v1/runs/batch", template="timed", runs=[{}], scheduled_at=past)
    for run in (await client.start("timed", scheduled_at=past), *batch.json()["ids"]):
        row = await rows.fetchrow(
            "SELECT deadline_at, available_at FROM job JOIN task ON job_id = job.id WHERE job.id = $1", UUID(run)
        )
        assert row is not None
        assert row["available_at"] >= before
        assert row["deadline_at"] >= before + timedelta(seconds=600)
        assert (await client.look(run))["scheduled_at"] == past


async def test_an_instant_may_have_any_offset_that_its_format_knows(client: Client, rows: Connection) -> None:
    """PostgreSQL reads offsets up to 15:59."""
    for offset, utc in (("+20:20", "2999-01-01T03:40:00Z"), ("-23:59", "2999-01-02T23:59:00Z")):
        at = f"2999-01-02T00:00:00{offset}"
        batch = await client.post("/v1/runs/batch", template="scripted", runs=[{}], scheduled_at=at)
        runs = [await client.start(scheduled_at=at), *batch.json()["ids"]]
        for run in runs:
            found = await rows.fetchval("SELECT scheduled_at FROM run WHERE job_id = $1", UUID(run))
            assert found == datetime.fromisoformat(utc)


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/jobs"])
async def test_a_long_poll_of_a_client_with_an_older_state_is_answered_at_once(
    client: Client, running: Running, rows: Connection, path: str
) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    run = f"{path}/{await client.start(scheduled_at=later.isoformat())}"
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=(RUNS_READ, JOBS_READ))
    async with client_of(running.url, key.text) as reader:
        async with asyncio.timeout(20):
            answer = await reader.get(run, params={"wait": 30}, headers={"If-None-Match": 'W/"an older state"'})
        assert answer.status_code == 200
        same = await reader.get(run, params={"wait": 0.1}, headers={"If-None-Match": answer.headers["ETag"]})
        assert same.status_code == 304


async def test_runs_are_listed_by_scope_and_id_together(client: Client) -> None:
    runs = {scope_id: await client.start(scope="user", scope_id=scope_id) for scope_id in ("u1", "u2", "")}

    async def listed(**params: str) -> list[str]:
        return [run["id"] for run in (await client.http.get("/v1/runs", params=params)).json()["runs"]]

    assert await listed(scope="user", scope_id="u1") == [runs["u1"]]
    assert await listed(scope="user") == [runs[""]]
    assert len(await listed()) == 3
    for alone in ("u1", ""):
        problem(await client.http.get("/v1/runs", params={"scope_id": alone}), 422, "scope_missing")


async def test_what_only_asks_whether_a_run_is_there_reads_none_of_its_steps(client: Client, rows: Connection) -> None:
    """A run may have thousands of steps, each with a result: a signal, a page of logs and so on need none of them."""
    run = UUID(await client.start())
    plan = "\n".join(row[0] for row in await rows.fetch(f"EXPLAIN {run_reads.HEAD}", run, "acme"))
    for table in ("result", "failure", "progress", "output"):
        assert f" on {table} " not in plan
    of_tasks = [line for line in plan.splitlines() if " on task " in line]
    assert all("using task_pkey" in line for line in of_tasks)  # the one whose events `history` derives
    head = await run_reads.find_listed_run(rows, "acme", run)
    assert head is not None
    assert (head["id"], head["status"]) == (run, "queued")
    assert await run_reads.find_listed_run(rows, "another", run) is None


async def add_steps(rows: Connection, run: str, first: int, last: int, *, contained: bool, status: str) -> None:
    """Further steps of the run: parts into which it fanned out, or steps that its workflow started (`contained`)."""
    await rows.execute(
        "WITH added AS (INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, max_attempts, status,"
        " contained, finished_at) SELECT gen_random_uuid(), $1, 'acme', 'step-' || n, CASE WHEN $4 THEN 0 ELSE 7 END,"
        " 'q', 1, 1, $5, $4, CASE WHEN $5 = 'succeeded' THEN now() END"
        " FROM generate_series($2::int, $3) AS n RETURNING id, step, status),"
        " outputs AS (INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type)"
        " SELECT id, 'x', $1, step, 'k', 1, 's', 't' FROM added)"
        " INSERT INTO result (task_id, value) SELECT id, to_jsonb(step) FROM added WHERE status = 'succeeded'",
        UUID(run),
        first,
        last,
        contained,
        status,
    )


async def test_the_steps_of_a_run_are_read_in_pages_its_own_first_and_the_progress_is_that_of_all(
    client: Client, stranger: Client, rows: Connection
) -> None:
    """A workflow may start 20,000 steps, each with a result of 64 KiB: no answer has them all."""
    run, other = await client.start(), await client.start()
    small = await client.look(run)
    assert (small["progress"]["step_count"], small["progress"]["next_cursor"]) == (2, None)
    await rows.execute("UPDATE task SET status = 'succeeded', finished_at = now() WHERE job_id = $1", UUID(run))
    await add_steps(rows, run, 1, 997, contained=False, status="succeeded")
    await add_steps(rows, run, 998, 998, contained=False, status="pending")
    full = await client.look(run)
    assert (len(full["progress"]["steps"]), full["progress"]["step_count"]) == (1000, 1000)
    assert (full["progress"]["next_cursor"], full["phase"], full["progress"]["percentage"]) == (None, "step-998", 99)

    await add_steps(rows, run, 999, 2998, contained=True, status="pending")
    await rows.execute(
        "UPDATE task SET status = 'succeeded', finished_at = now() WHERE job_id = $1 AND NOT contained", UUID(run)
    )
    listed: list[str] = []
    results: dict[str, str] = {}
    cursors: list[str | None] = [None]
    for size in (1000, 1000, 1000, 0):
        params = {} if cursors[-1] is None else {"cursor": cursors[-1]}
        page = await client.look(run, **params)
        names = [step["id"] for step in page["progress"]["steps"]]
        assert (len(names), len(page["outputs"])) == (size, 1000)
        assert (page["progress"]["step_count"], page["progress"]["percentage"]) == (3000, 33)
        assert page["phase"] == "step-1000", "the first of the waiting ones, by position and name"
        assert (page["result"] or {}).keys() <= set(names)
        cursors.append(page["progress"]["next_cursor"])
        listed += names
        results |= page["result"] or {}
    assert [cursor is None for cursor in cursors] == [True, False, False, False, True]
    assert set(listed[:1000]) == {"first", "second", *(f"step-{n}" for n in range(1, 999))}
    assert (len(listed), len(set(listed))) == (3000, 3000)
    assert results == {f"step-{n}": f"step-{n}" for n in range(1, 998)}

    # A cursor of another run, or of nothing, leads behind the last step.
    first_of_other = UUID((await client.look(other))["progress"]["steps"][0]["task_id"])
    for asked, cursor in ((other, cursors[1]), (run, cursor_of(first_of_other)), (run, "A" * 22)):
        assert (await client.look(asked, cursor=cursor))["progress"]["steps"] == []
    problem(await client.http.get(f"/v1/runs/{run}", params={"cursor": "x"}), 422, "invalid_cursor")
    problem(await stranger.http.get(f"/v1/runs/{run}", params={"cursor": cursors[1]}), 404, "run_not_found")


async def test_a_page_that_ends_with_the_last_step_has_no_next_one_unless_it_is_full(
    client: Client, rows: Connection
) -> None:
    run = await client.start()
    await add_steps(rows, run, 1, 999, contained=False, status="pending")
    page = await client.look(run)
    assert (len(page["progress"]["steps"]), page["progress"]["step_count"]) == (1000, 1001)
    page = await client.look(run, cursor=page["progress"]["next_cursor"])
    assert (len(page["progress"]["steps"]), page["progress"]["step_count"]) == (1, 1001)
    assert page["progress"]["next_cursor"] is None
