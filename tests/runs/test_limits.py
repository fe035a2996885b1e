"""Limits hold however many ask at once, and what waits says why."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx2
import pytest

from leasehold.actions.context import Actions, Target
from leasehold.actions.retrying import revive
from leasehold.api.auth.security import JOBS_READ
from leasehold.api.fleet.operators import Limit
from leasehold.api.http.cursors import cursor_of_texts
from leasehold.api.jobs import dead_letters
from leasehold.api.jobs.explain import explanation
from leasehold.db import job_reads
from leasehold.db.database import Connection, connect
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.evaluation.templates import Templates
from leasehold.limits import rates
from leasehold.limits.admission import Admission
from leasehold.pipelines import SHIPPED
from leasehold.schedules import firing as schedules
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, concurrency, jobs, settlements
from leasehold.transitions.concurrency import without_value
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.settlements import Completion
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of, serving
from tests.api.media_api import problem
from tests.factories import Rows, assert_history, terms
from tests.runs.conftest import SCOPES, Client
from tests.runs.work import pipelines

ONE = Pipeline("one", module="tests.factories", steps=[Step("only")])


async def reasons(client: Client, run: str) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = (await client.http.get(f"/v1/runs/{run}/explain")).json()["reasons"]
    return said


async def template(client: Client, policy: str, **more: Any) -> None:
    body = {"type": "scoped", "steps": [{"id": "only", "queue": "q"}], "concurrency_policy": policy}
    assert (await client.post("/v1/templates", **(body | more))).status_code == 201


async def test_a_second_run_of_the_same_scope_is_refused_also_at_once(client: Client) -> None:
    await template(client, "reject_same_scope", dedupe_keys=["target"])
    same = {"scope": "user", "scope_id": "u1", "payload": {"target": 1}}
    answers = await asyncio.gather(*(client.submit("scoped", **same) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [202] + [409] * 7
    (made,) = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    said = problem(await client.submit("scoped", **same), 409, "same_scope_running")
    assert made in said["detail"]
    await client.start("scoped", scope="user", scope_id="u1", payload={"target": 2})
    await client.post(f"/v1/runs/{made}/cancel")
    await client.start("scoped", **same)


async def test_runs_of_the_same_scope_wait_their_turn(client: Client, rows: Connection) -> None:
    await template(client, "queue_same_scope")
    runs = [await client.start("scoped", scope_id="u1") for _ in range(3)]
    for number, run in enumerate(runs):
        tasks = (await client.post("/v1/external/claim", worker_id="w", queues=["q"], limit=10, wait=5)).json()["tasks"]
        assert [task["run_id"] for task in tasks] == [run]
        if number == 0:
            (reason,) = await reasons(client, runs[2])
            assert (reason["code"], reason["ahead"]) == ("same_scope", 1)
        held = {"worker_id": "w", "epoch": tasks[0]["epoch"]}
        await client.post(f"/v1/external/tasks/{tasks[0]['task_id']}/complete", **held)
        await concurrency.admit(rows, await concurrency.limits_of(rows, [UUID(run)]))  # as a worker or the sweeper does
        await assert_history(Rows(rows), UUID(run))


async def test_the_answer_to_a_run_that_waits_at_its_limits_says_pending(client: Client) -> None:
    """Although its first step is an external worker's, no worker may claim it yet. The rerun waits behind both."""
    await template(client, "queue_same_scope")
    answers = [(await client.submit("scoped", scope_id="u1")).json() for _ in range(2)]
    answers.append((await client.post(f"/v1/runs/{answers[0]['id']}/rerun")).json())
    assert [answer["status"] for answer in answers] == ["pending"] * 3
    assert [(await client.look(answer["id"]))["status"] for answer in answers[1:]] == ["pending"] * 2


async def test_a_newer_run_replaces_those_before_it(client: Client) -> None:
    await template(client, "replace_same_scope")
    older = [await client.start("scoped", scope_id="u1") for _ in range(3)]
    newest = await client.start("scoped", scope_id="u1")
    assert [(await client.look(run))["status"] for run in older] == ["cancelled"] * 3
    assert newest[:8] in str((await client.look(older[-1]))["cancel"]["reason"])
    assert (await client.look(newest))["held"] is False


@pytest.mark.parametrize("at_most", [1, 3])
async def test_no_more_run_at_once_than_the_limit_lets_in(rows: Connection, settings: Settings, at_most: int) -> None:
    """Three processes let in, run and settle as fast as they can; a witness counts."""
    names = [("t", "queue:default")]
    made = [NewJob(ONE, "t", limits=[ConcurrencyLimit("t", "queue:default", at_most)]) for _ in range(40)]
    async with rows.transaction():
        await jobs.submit(rows, made)
    connections = [await connect(settings, "test") for _ in range(3)]
    most = 0

    async def work(connection: Connection) -> None:
        nonlocal most
        mine = terms()
        while await connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"):
            await concurrency.admit(connection, names)
            for claimed in await claims.claim_due(connection, mine, ["default"], 10):
                inside = await connection.fetchval(
                    "SELECT count(*) FROM gate_job g JOIN job j ON j.id = g.job_id"
                    " WHERE g.admitted_at IS NOT NULL AND j.finished_at IS NULL"
                )
                most = max(most, inside)
                await settlements.complete(connection, [Completion(claimed.lease)])

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(connection) for connection in connections))
    for connection in connections:
        await connection.close()
    assert 1 <= most <= at_most
    await assert_history(Rows(rows), made[-1].id)


async def test_no_more_start_within_a_minute_than_the_limit_lets_in(rows: Connection) -> None:
    limit = ConcurrencyLimit("t", "template:one", per_minute=3)
    async with rows.transaction():
        await jobs.submit(rows, [NewJob(ONE, "t", limits=[limit]) for _ in range(5)])
    assert len(await concurrency.admit(rows, [("t", "template:one")])) == 3
    assert await concurrency.admit(rows, [("t", "template:one")]) == []
    await rows.execute("UPDATE gate_job SET admitted_at = admitted_at - interval '61 s' WHERE admitted_at IS NOT NULL")
    assert len(await concurrency.admit(rows, [("t", "template:one")])) == 2


async def test_a_job_needs_room_at_all_its_gates_and_keeps_nobody_else_out(rows: Connection) -> None:
    narrow, wide = ConcurrencyLimit("t", "narrow", at_most=0), ConcurrencyLimit("t", "wide", at_most=5)
    async with rows.transaction():
        await jobs.submit(rows, [NewJob(ONE, "t", limits=[narrow, wide]), NewJob(ONE, "t", limits=[wide])])
    assert len(await concurrency.admit(rows, [("t", "wide"), ("t", "narrow")])) == 1


async def test_an_explanation_counts_few_jobs_of_a_limit_that_has_admitted_many(rows: Connection) -> None:
    limit = ConcurrencyLimit("t", "template:one", at_most=5)
    async with rows.transaction():
        await jobs.submit(rows, [NewJob(ONE, "t", limits=[limit]) for _ in range(9)])
    await concurrency.admit(rows, [("t", "template:one")])
    last = await rows.fetchval("SELECT job_id FROM gate_job WHERE admitted_at IS NULL ORDER BY job_id DESC LIMIT 1")
    (counted,) = await job_reads.why_held(rows, "t", last)
    assert (counted["inside"], counted["lately"], counted["ahead"], counted["cut"]) == (5, 5, 3, False)
    (few,) = await job_reads.why_held(rows, "t", last, max_ahead=2, most_admitted=4)
    assert (few["inside"], few["lately"], few["ahead"], few["cut"]) == (4, 4, 2, True)
    held: Any = {"id": last, "status": "pending", "held": True, "error": None}
    assert explanation(held, [], [few], [])["reasons"][0]["message"] == (
        "The job waits at the limit template:one, which has admitted at least 10,000 jobs."
    )
    (enough,) = await job_reads.why_held(rows, "t", last, most_admitted=5)
    assert explanation(held, [], [enough], [])["reasons"][0]["running"] == 5  # what is counted tells that it is full
    await rows.execute("UPDATE job SET status = 'succeeded', finished_at = now() WHERE id IN ("
                       "SELECT job_id FROM gate_job WHERE admitted_at IS NOT NULL LIMIT 1)")  # fmt: skip
    (freed,) = await job_reads.why_held(rows, "t", last)
    assert (freed["inside"], freed["lately"]) == (4, 5)


async def test_a_job_at_a_limit_whose_time_has_not_come_says_so_and_counts_as_ahead_of_no_other(
    client: Client, rows: Connection
) -> None:
    """It was said to wait at a full limit, or at one that has room, and would have been admitted soon."""
    limit = {"tenant_id": "acme", "key": "template:scripted", "at_most": 1}
    assert (await client.http.put("/v1/limits", json=limit)).status_code == 200
    at = datetime.now(UTC) + timedelta(days=1)
    later = await client.start(scheduled_at=at.isoformat())
    for _ in range(2):  # the limit has room, and is full
        (reason,) = await reasons(client, later)
        assert (reason["code"], datetime.fromisoformat(reason["until"])) == ("waiting_until", at)
        await client.start()
    (reason,) = await reasons(client, await client.start())
    assert (reason["code"], reason["ahead"]) == ("limit", 1)  # the second, and not the one of tomorrow
    await rows.execute("UPDATE gate_job SET ready_at = clock_timestamp() WHERE job_id = $1", UUID(later))
    assert [reason["code"] for reason in await reasons(client, later)] == ["limit"]


async def test_a_limit_of_the_fleet_holds_runs_and_says_so_until_it_is_lifted(client: Client, worker: Worker) -> None:
    limit = {"tenant_id": "acme", "key": "template:scripted", "at_most": 1}
    assert (await client.http.put("/v1/limits", json=limit)).status_code == 200
    first, second = [await client.start(payload={"do": "work"}) for _ in range(2)]
    await client.until(first, "running")
    (reason,) = await reasons(client, second)
    assert (reason["code"], reason["running"], reason["at_most"]) == ("limit", 1, 1)
    await client.post(f"/v1/runs/{first}/cancel")
    await client.until(second, "running")  # the worker that acknowledged lets the next one in
    third = await client.start()
    assert (await client.look(third))["held"] is True
    assert (await client.http.delete("/v1/limits/acme/template:scripted")).status_code == 200
    await client.until(third, "succeeded")
    await client.post(f"/v1/runs/{second}/cancel")
    problem(await client.http.put("/v1/limits", json={"key": "nonsense", "at_most": 1}), 422, "invalid_request")
    problem(await client.http.put("/v1/limits", json={"key": "tenant"}), 422, "invalid_request")


async def test_a_limit_by_a_value_of_the_payload_counts_each_value_by_itself(client: Client) -> None:
    await client.http.put("/v1/limits", json={"key": "payload:scripted:/number", "at_most": 1})
    runs = [await client.start(payload={"number": number}) for number in (1, 1, 2)]
    assert [(await client.look(run))["held"] for run in runs] == [False, True, False]


@pytest.mark.parametrize("spellings", [(7, 7.0), (1e16, 10**16), ({"a": [0, 1e3]}, {"a": [-0.0, 1000]})])
async def test_a_number_is_one_value_however_it_is_spelled(client: Client, spellings: tuple[object, object]) -> None:
    await template(client, "allow")
    await client.http.put("/v1/limits", json={"key": "payload:scoped:/number", "at_most": 1})
    runs = [await client.start("scoped", payload={"number": number}) for number in spellings]
    assert [(await client.look(run))["held"] for run in runs] == [False, True]


async def test_a_number_of_a_scope_is_one_value_however_it_is_spelled(client: Client) -> None:
    await template(client, "reject_same_scope", dedupe_keys=["target"])
    await client.start("scoped", payload={"target": 1})
    problem(await client.submit("scoped", payload={"target": 1.0}), 409, "same_scope_running")
    await client.start("scoped", payload={"target": 1.5})
    await client.start("scoped", payload={"target": True})


async def test_a_limit_by_a_value_in_a_list_counts_each_value_by_itself(client: Client) -> None:
    await client.http.put("/v1/limits", json={"key": "payload:scripted:/numbers/1", "at_most": 1})
    runs = [await client.start(payload={"numbers": numbers}) for numbers in ([7, 1], [8, 1], [7, 2])]
    assert [(await client.look(run))["held"] for run in runs] == [False, True, False]


async def test_a_paused_queue_starts_nothing_until_it_is_resumed(client: Client, worker: Worker) -> None:
    await client.post("/v1/queues/default/pause", reason="a look at the disk")
    run = await client.start()
    await asyncio.sleep(0.5)
    (reason,) = await reasons(client, run)
    assert (reason["code"], "a look at the disk" in reason["message"]) == ("queue_paused", True)
    (queue,) = [one for one in (await client.http.get("/v1/queues")).json()["queues"] if one["queue"] == "default"]
    assert (queue["runnable"], queue["workers"], queue["paused_because"]) == (1, 1, "a look at the disk")
    assert (queue["starts_per_minute"], queue["has_more"]) == (0, False)
    await client.post("/v1/queues/default/resume")
    await client.until(run, "succeeded")


@pytest.mark.parametrize("tenant", ["acme/eu", "/", "a/pause", "a//b", "a?b#c"])
async def test_the_queue_of_external_workers_is_paused_and_resumed_whatever_its_tenants_name(
    running: Running, client: Client, rows: Connection, tenant: str
) -> None:
    """The address was cut at a slash of the name."""
    key = await create_key(rows, tenant_id=tenant, client_id="tests", scopes=SCOPES)
    async with client_of(running.url, key.text) as http:
        theirs = Client(http)
        await theirs.post("/v1/templates", type="outside", steps=[{"id": "a", "queue": "gpu"}])
        run = await theirs.start("outside")
        (queue,) = [one for one in (await client.http.get("/v1/queues")).json()["queues"] if one["runnable"]]
        claim = {"worker_id": "w", "queues": ["gpu"], "limit": 1}
        path = f"/v1/queues/{quote(queue['queue'], safe='')}"
        paused = await client.post(f"{path}/pause")
        assert (paused.status_code, paused.json()) == (200, {"queue": f"ext:{tenant}:gpu", "paused": True})
        assert (await theirs.post("/v1/external/claim", **claim)).json()["tasks"] == []
        resumed = await client.post(f"{path}/resume")
        assert (resumed.status_code, resumed.json()) == (200, {"queue": f"ext:{tenant}:gpu", "paused": False})
        (task,) = (await theirs.post("/v1/external/claim", **claim)).json()["tasks"]
        assert task["run_id"] == run
    for act in ("pause", "resume"):
        problem(await client.post(f"/v1/queues//{act}"), 404, "not_found")


async def pages(client: Client, what: str, limit: int) -> list[list[dict[str, Any]]]:
    """All pages of the list of queues or of workers."""
    found: list[list[dict[str, Any]]] = []
    params: dict[str, Any] = {"limit": limit}
    while len(found) < 20:
        page = (await client.http.get(f"/v1/{what}", params=params)).json()
        found.append(page[what])
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]
    raise AssertionError("the pages have no end")


async def test_every_queue_is_on_some_page_those_of_external_workers_last(client: Client, rows: Connection) -> None:
    """The list ended after 1,000 queues, and did not say so: the external queues of 1,000 tenants hid `media`."""
    external = [f"ext:acme:q{number:04}" for number in range(1000)]
    fleet = ["default", "media", "zz"]
    await rows.execute("INSERT INTO paused_queue (queue, reason) SELECT unnest($1::text[]), 'x'", external + fleet)
    everything = (await client.http.get("/v1/queues")).json()
    assert (len(everything["queues"]), everything["next_cursor"] is None) == (1000, False)
    for limit, sizes in ((1000, [1000, 3]), (501, [501, 501, 1])):
        listed = await pages(client, "queues", limit)
        assert [len(page) for page in listed] == sizes
        assert [queue["queue"] for page in listed for queue in page] == fleet + external
    await rows.execute("DELETE FROM paused_queue WHERE queue > 'ext:acme:q0002' AND starts_with(queue, 'ext:')")
    for limit, sizes in ((1, [1] * 6), (2, [2, 2, 2]), (3, [3, 3]), (4, [4, 2]), (6, [6])):
        listed = await pages(client, "queues", limit)
        assert [len(page) for page in listed] == sizes
        assert [queue["queue"] for page in listed for queue in page] == fleet + external[:3]
    problem(await client.http.get("/v1/queues", params={"cursor": "?"}), 422, "invalid_cursor")
    for limit in (0, 1001):
        problem(await client.http.get("/v1/queues", params={"limit": limit}), 422, "invalid_request")


async def test_every_worker_is_on_some_page(client: Client, rows: Connection) -> None:
    """Also of those that began at the same instant."""
    await rows.execute(
        "INSERT INTO worker (id, present, host, pid, version, queues, started_at) SELECT gen_random_uuid(), false, 'h',"
        " n, '0', '{q}', '2026-01-01Z'::timestamptz + n / 4 * interval '1 microsecond' FROM generate_series(0, 9) AS n"
    )
    expected = [str(row["id"]) for row in await rows.fetch("SELECT id FROM worker ORDER BY started_at, id")]
    for limit, sizes in ((3, [3, 3, 3, 1]), (5, [5, 5]), (9, [9, 1]), (10, [10]), (1000, [10])):
        listed = await pages(client, "workers", limit)
        assert [len(page) for page in listed] == sizes
        assert [worker["id"] for page in listed for worker in page] == expected
    problem(await client.http.get("/v1/workers", params={"cursor": "x"}), 422, "invalid_cursor")


async def test_a_worker_asked_to_drain_hears_of_it(client: Client, worker: Worker) -> None:
    (said,) = (await client.http.get("/v1/workers")).json()["workers"]
    assert (said["id"], said["draining"]) == (str(worker.id), False)
    assert (await client.post(f"/v1/workers/{worker.id}/drain")).status_code == 202
    async with asyncio.timeout(60):
        await worker.retired.wait()


async def test_a_key_submits_at_its_rate_and_is_told_when_to_come_again(
    runs_settings: Settings, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_key": 3})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        first = await client.submit()
        assert first.headers["ratelimit"] == '"submissions";r=2;t=60'
        answers = [await client.submit() for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        problem(answers[-1], 429, "rate_limited")
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 20


async def test_a_job_at_a_limit_of_all_tenants_learns_how_many_of_its_own_tenant_come_first(
    client: Client, stranger: Client
) -> None:
    for one in (client, stranger):
        await one.post("/v1/templates", type="outside", steps=[{"id": "a", "queue": "q"}])
    limit = {"tenant_id": "*", "key": "queue:q", "at_most": 1}
    assert (await client.http.put("/v1/limits", json=limit)).status_code == 200
    for _ in range(3):
        await stranger.start("outside")
    waiting = [await client.start("outside") for _ in range(2)]
    assert [(await reasons(client, run))[0]["ahead"] for run in waiting] == [0, 1]


async def test_a_job_that_waits_for_its_scope_alone_says_so(client: Client, running: Running, rows: Connection) -> None:
    await template(client, "queue_same_scope")
    _, waiting = [await client.start("scoped", scope_id="u1") for _ in range(2)]
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=[*SCOPES, JOBS_READ])
    async with client_of(running.url, key.text) as http:
        assert (await http.get(f"/v1/jobs/{waiting}")).json()["waits_for"] == [{"limit": "scope"}]
        assert (await client.http.put("/v1/limits", json={"key": "tenant", "at_most": 1})).status_code == 200
        both = await client.start("scoped", scope_id="u1")
        assert (await http.get(f"/v1/jobs/{both}")).json()["waits_for"] == [{"limit": "tenant"}]


async def broken_runs(client: Client, n: int) -> list[str]:
    """The ids of `n` runs with dead letters, the latest first."""
    await client.post("/v1/templates", type="outside", steps=[{"id": "a", "queue": "q"}])
    runs = [await client.start("outside") for _ in range(n)]
    claimed = await client.post("/v1/external/claim", worker_id="w", queues=["q"], limit=n)
    for task in claimed.json()["tasks"]:
        failure = {"worker_id": "w", "epoch": 1, "code": "broken", "retryable": False}
        assert (await client.post(f"/v1/external/tasks/{task['task_id']}/fail", **failure)).status_code == 200
    letters = (await client.http.get("/v1/dead-letters")).json()["dead_letters"]
    assert sorted(letter["job_id"] for letter in letters) == sorted(runs)
    return [letter["job_id"] for letter in letters]


async def test_a_bulk_replay_replays_what_has_room_and_is_charged_for_that_alone(
    runs_settings: Settings, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"unfinished_per_tenant": 3, "submissions_per_key": 6})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        runs = await broken_runs(client, 3)
        other = await client.start("outside")
        now = await rows.fetchval("UPDATE rate_bucket SET full_at = clock_timestamp() + '10 seconds' RETURNING full_at")
        answer = await client.post("/v1/dead-letters/replay", code="broken")
        assert (answer.status_code, answer.json()["replayed"], answer.json()["refused"]) == (202, runs[:2], [])
        assert (answer.json()["left"]["jobs"], answer.json()["left"]["code"]) == (1, "too_many_unfinished")
        assert await rows.fetchval("SELECT full_at FROM rate_bucket") - now == timedelta(seconds=20)  # ten a run
        problem(await client.post("/v1/dead-letters/replay", code="broken"), 429, "too_many_unfinished")
        assert await rows.fetchval("SELECT full_at FROM rate_bucket") - now == timedelta(seconds=20)
        assert (await client.post(f"/v1/runs/{other}/cancel")).status_code == 202
        last = (await client.post("/v1/dead-letters/replay", code="broken")).json()
        assert last == {"replayed": runs[2:], "refused": []}


async def test_a_bulk_replay_of_more_than_a_minutes_rate_goes_on_from_minute_to_minute(
    runs_settings: Settings, rows: Connection
) -> None:
    """It was refused for ever, because it can never be let in as a whole."""
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(runs_settings) as running, client_of(running.url, key.text) as http:
        runs = await broken_runs(Client(http), 5)
    limited = runs_settings.model_copy(update={"submissions_per_tenant": 2, "submissions_per_key": 300})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        first = await client.post("/v1/dead-letters/replay", code="broken")
        assert (first.status_code, first.json()["replayed"]) == (202, runs[:2]), first.text
        assert ";r=0;" in first.headers["ratelimit"]
        detail = "At most 2 submissions a minute."
        assert first.json()["left"] == {"jobs": 3, "code": "rate_limited", "detail": detail}
        full = await client.post("/v1/dead-letters/replay", code="broken")
        assert detail in problem(full, 429, "rate_limited")["detail"]
        assert int(full.headers["retry-after"]) > 0
        # With room for one, one is replayed: a tenant that submits all the time has never room for a whole minute's.
        await rows.execute(
            "UPDATE rate_bucket SET full_at = clock_timestamp() + '30 seconds' WHERE key LIKE '%tenant%'"
        )
        second = (await client.post("/v1/dead-letters/replay", code="broken")).json()
        assert (second["replayed"], second["left"]["jobs"]) == (runs[2:3], 2)
        await rows.execute("DELETE FROM rate_bucket")
        assert (await client.post("/v1/dead-letters/replay", code="broken")).json() == {
            "replayed": runs[3:], "refused": [],
        }  # fmt: skip


async def test_a_bulk_replay_that_is_sent_again_after_its_answer_was_lost_replays_nothing_further(
    runs_settings: Settings, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_tenant": 5})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        runs = await broken_runs(Client(http), 5)
        await rows.execute("DELETE FROM rate_bucket")

        async def replay(key: str, **body: Any) -> httpx2.Response:
            return await http.post(
                "/v1/dead-letters/replay", json={"code": "broken"} | body, headers={"Idempotency-Key": key}
            )

        wanted: tuple[tuple[str, dict[str, Any], list[str]], ...] = (
            ("k1", {"canary": True}, runs[:1]), ("k2", {"limit": 2}, runs[1:3]),
        )  # fmt: skip
        for name, body, replayed in wanted:
            first, again = await replay(name, **body), await replay(name, **body)
            assert (first.status_code, first.json()) == (202, {"replayed": replayed, "refused": []})
            assert (again.status_code, again.content) == (202, first.content)
        problem(await replay("k2"), 422, "idempotency_key_reused")
        # What was refused as a whole has done nothing, so its key may be used again.
        await rows.execute("UPDATE rate_bucket SET full_at = clock_timestamp() + '60 s'")
        problem(await replay("k3"), 429, "rate_limited")
        await rows.execute("DELETE FROM rate_bucket")
        assert (await replay("k3")).json() == {"replayed": runs[3:], "refused": []}


async def test_a_connection_that_drops_costs_a_bulk_replay_the_job_that_had_it(
    runs_settings: Settings, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_tenant": 600})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client, revived = Client(http), list[UUID]()
        runs = await broken_runs(client, 3)

        async def drop_second(actions: Actions, connection: Connection, target: Target, *more: Any) -> Any:
            revived.append(target.id)
            if len(revived) == 2:
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            return await revive(actions, connection, target, *more)

        monkeypatch.setattr(dead_letters, "revive", drop_second)
        far = await rows.fetchval("UPDATE rate_bucket SET full_at = clock_timestamp() + '30 seconds' RETURNING full_at")
        answer = await client.post("/v1/dead-letters/replay", code="broken")
        assert (answer.status_code, answer.json()["replayed"]) == (202, [runs[0], runs[2]]), answer.text
        refused = [(one["job_id"], one["code"]) for one in answer.json()["refused"]]
        assert refused == [(runs[1], "database_unavailable")]
        assert await rows.fetchval("SELECT full_at FROM rate_bucket") - far == timedelta(seconds=0.2)  # 0.1 a run
        again = (await client.post("/v1/dead-letters/replay", code="broken")).json()
        assert again == {"replayed": [runs[1]], "refused": []}


async def test_a_full_queue_sheds_new_runs(runs_settings: Settings, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"queue_depth_limit": 2})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        answers = [await client.submit() for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        problem(answers[-1], 429, "queue_full")


async def test_a_full_queue_sheds_new_runs_that_begin_there_because_they_skip_their_first_step(
    runs_settings: Settings, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"queue_depth_limit": 2})
    steps = [{"id": "a", "queue": "one", "skip_if": {"pointer": "/quick"}}, {"id": "b", "queue": "two"}]
    quick = {"payload": {"quick": True}}
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        assert (await client.post("/v1/templates", type="skipping", steps=steps)).status_code == 201
        first = await client.start("skipping", **quick)
        problem(await client.post("/v1/runs/batch", template="skipping", runs=[quick, quick]), 429, "queue_full")
        await client.start("skipping", **quick)
        problem(await client.submit("skipping", **quick), 429, "queue_full")
        problem(await client.post(f"/v1/runs/{first}/rerun"), 429, "queue_full")
        await client.start("skipping")  # it begins in the other queue, which has room
        yearly = {"template": "skipping", "payload_template": quick["payload"], "cron": "@yearly"}
        schedule = (await client.post("/v1/schedules", **yearly)).json()["id"]
        await rows.execute("UPDATE schedule SET next_run_at = clock_timestamp(), overlap = 'allow_all'")
        admission = Admission(limited, SHIPPED)
        assert await schedules.fire_due(rows, Templates(pipelines()), 60, admission=admission) == ([], False)
        last_error = (await client.http.get(f"/v1/schedules/{schedule}")).json()["last_error"]
        assert last_error["code"] == "queue_full"


async def test_a_full_queue_of_a_step_that_a_run_skips_does_not_hold_it_up(
    runs_settings: Settings, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"queue_depth_limit": 2})
    steps = [{"id": "a", "queue": "one", "skip_if": {"pointer": "/quick"}}, {"id": "b", "queue": "two"}]
    quick = {"payload": {"quick": True}}
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        client = Client(http)
        assert (await client.post("/v1/templates", type="skipping", steps=steps)).status_code == 201
        for _ in range(2):
            await client.start("skipping")
        problem(await client.submit("skipping"), 429, "queue_full")
        await client.start("skipping", **quick)
        batch = {"template": "skipping", "runs": [quick, {}]}
        problem(await client.post("/v1/runs/batch", **batch), 429, "queue_full")
        assert (await client.post("/v1/runs/batch", **batch | {"runs": [quick]})).status_code == 202
        problem(await client.submit("skipping", **quick), 429, "queue_full")


async def test_a_rate_is_one_for_all_who_ask_at_once(rows: Connection, settings: Settings) -> None:
    connections = [await connect(settings, "test") for _ in range(4)]
    asked = [rates.take(connections[number % 4], "k", 5) for number in range(4)]
    first = await asyncio.gather(*asked)
    second = await asyncio.gather(*(rates.take(connection, "k", 5) for connection in connections))
    assert sum(quota.allowed for quota in [*first, *second]) == 5
    assert all(0 < quota.wait_seconds <= 60 for quota in second if not quota.allowed)
    for connection in connections:
        await connection.close()


async def test_a_flood_delays_its_own_tenant_only(rows: Connection) -> None:
    """Whoever looks for work takes tenants in turn, however old and many one tenant's tasks are."""
    await jobs.submit(rows, [NewJob(ONE, "hostile") for _ in range(300)])
    await jobs.submit(rows, [NewJob(ONE, "quiet")])
    taken = await claims.claim_due(rows, terms(), ["default"], 4)
    assert {claimed.tenant_id for claimed in taken} == {"hostile", "quiet"}
    more = await claims.claim_due(rows, terms(), ["default"], 4)
    assert {claimed.tenant_id for claimed in more} == {"hostile"}


async def test_a_limit_by_a_pointer_with_an_equals_sign_is_not_moved_by_its_neighbour(
    client: Client, rows: Connection
) -> None:
    async def bounds() -> dict[str, int | None]:
        found = await rows.fetch("SELECT key, at_most FROM gate WHERE NOT declared")
        return {without_value(row["key"]): row["at_most"] for row in found}

    await client.http.put("/v1/limits", json={"key": "payload:scripted:/number", "at_most": 1})
    await client.http.put("/v1/limits", json={"key": "payload:scripted:/number=b", "at_most": 2})
    run = await client.start(payload={"number": 1})
    assert await bounds() == {"payload:scripted:/number": 1, "payload:scripted:/number=b": 2}
    await client.http.put("/v1/limits", json={"key": "payload:scripted:/number", "at_most": 0})
    assert await bounds() == {"payload:scripted:/number": 0, "payload:scripted:/number=b": 2}
    held = await client.start(payload={"number": 1})
    assert (await client.look(held))["held"]
    limits = await rows.fetchval("SELECT array_agg(key ORDER BY key) FROM gate_job WHERE job_id = $1", UUID(held))
    assert len(limits) == 2
    assert {"payload:scripted:/number", "payload:scripted:/number=b"} == {
        reason["limit"] for reason in await reasons(client, held)
    }
    await client.post(f"/v1/runs/{run}/cancel")


@pytest.mark.parametrize("tenant", ["*", "acme/eu", "/", "a/tenant", "a//b"])
@pytest.mark.parametrize("key", ["tenant", "queue:default", "payload:scripted:/a/tenant"])
async def test_every_limit_that_can_be_set_can_be_lifted(
    client: Client, rows: Connection, tenant: str, key: str
) -> None:
    body = {"tenant_id": tenant, "key": key, "at_most": 1}
    assert (await client.http.put("/v1/limits", json=body)).status_code == 200
    answer = await client.http.delete(f"/v1/limits/{quote(tenant, safe='')}/{quote(key, safe='')}")
    assert (answer.status_code, answer.json()) == (200, {"tenant_id": tenant, "key": key})
    assert not await rows.fetchval("SELECT count(*) FROM gate WHERE declared")
    problem(await client.http.delete(f"/v1/limits/{tenant}/{key}"), 404, "limit_not_found")


async def test_the_list_of_limits_has_those_that_were_set_and_none_that_came_with_a_job(
    client: Client, rows: Connection
) -> None:
    body = {"tenant_id": "acme", "key": "payload:scripted:/number", "at_most": 1}
    assert (await client.http.put("/v1/limits", json=body)).status_code == 200
    for number in (1, 2):
        await client.start(payload={"number": number})
    assert await rows.fetchval("SELECT count(*) FROM gate WHERE NOT declared") == 2
    for limit in (1, 1000):
        listed = (await client.http.get("/v1/limits", params={"limit": limit})).json()
        assert listed == {"limits": [body | {"per_minute": None}], "next_cursor": None}
    assert (await client.http.delete("/v1/limits/acme/payload:scripted:/number")).status_code == 200
    assert (await client.http.get("/v1/limits")).json() == {"limits": [], "next_cursor": None}


async def test_limits_are_listed_in_pages(client: Client) -> None:
    """Also where a key has several bytes for a letter, is the beginning of another, or is as long as it can be."""
    expected = []
    longest = "\U0001f600" * 100
    for tenant, key in (
        (longest, "payload:scripted:" + f"/{longest}" * 5), (longest, "tenant"),
        ("*", "tenant"), ("acme", "payload:scripted:/\u00e4"), ("acme", "payload:scripted:/\u00e4/b"),
        ("acme", "tenant"), ("ac\nme", "tenant"),
    ):  # fmt: skip
        answer = await client.http.put("/v1/limits", json={"tenant_id": tenant, "key": key, "at_most": 9})
        assert answer.status_code == 200, answer.text
        expected.append((tenant, key))
    whole = (await client.http.get("/v1/limits")).json()
    listed = [(one["tenant_id"], one["key"]) for one in whole["limits"]]
    assert (sorted(listed), whole["next_cursor"]) == (sorted(expected), None)
    for limit in range(1, 8):
        found: list[tuple[str, str]] = []
        cursor = None
        while True:
            params = {"limit": limit} | ({} if cursor is None else {"cursor": cursor})
            page = (await client.http.get("/v1/limits", params=params)).json()
            found += [(one["tenant_id"], one["key"]) for one in page["limits"]]
            if (cursor := page["next_cursor"]) is None:
                break
        assert found == listed
    key = f"payload:{'a' * 63}.{'b' * 63}:" + f"/{longest}" * 5
    assert Limit(tenant_id=longest, key=key, at_most=1).key == key
    of_longest = {"cursor": cursor_of_texts(longest, key)}
    assert (await client.http.get("/v1/limits", params=of_longest)).status_code == 200
    for wrong in ("", "x", "\u00c4" * 4):
        problem(await client.http.get("/v1/limits", params={"cursor": wrong}), 422, "invalid_cursor")
    for odd in ("____", "AAAA"):  # of the right length and alphabet: some place of the list
        assert (await client.http.get("/v1/limits", params={"cursor": odd})).status_code == 200
