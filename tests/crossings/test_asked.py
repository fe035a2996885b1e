"""What clients and external workers ask over HTTP of a run in every state: alone, two at once, with another key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import combinations_with_replacement
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest

from leasehold.security.credentials import revoke_key
from leasehold.transitions import sweeps
from tests.api.conftest import client_of
from tests.crossings.expectations import ASKED, table
from tests.crossings.stage import SCOPES, Stage, Tenant, side_by_side

EXPECTED = table(ASKED)
TEMPLATE = {"type": "t", "steps": [{"id": "only", "queue": "q"}]}
_HOUR = 3600


@dataclass
class Run:
    """A run of the tenant's, and the task that its worker may hold."""

    tenant: Tenant
    id: str = field(default_factory=lambda: str(uuid4()))
    task: str = field(default_factory=lambda: str(uuid4()))
    epoch: int = 1

    async def make(self, **body: Any) -> None:
        self.id = (await self.tenant.post("/v1/runs", template="t", **body))["id"]

    async def claim(self) -> None:
        (task,) = (await self.tenant.post("/v1/external/claim", worker_id="w", queues=["q"]))["tasks"]
        assert task["run_id"] == self.id
        self.epoch = task["epoch"]

    async def say(self, http: httpx2.AsyncClient, verb: str, **body: Any) -> httpx2.Response:
        held = {"worker_id": "w", "epoch": self.epoch}
        return await http.post(f"/v1/external/tasks/{self.task}/{verb}", json=held | body)

    async def must(self, answer: httpx2.Response) -> None:
        assert answer.is_success, answer.text


Deed = Callable[[httpx2.AsyncClient, Run], Awaitable[httpx2.Response]]
#: verb -> the scope that its key needs, and how it is asked.
VERBS: dict[str, tuple[str, Deed]] = {
    "get": ("runs:read", lambda http, run: http.get(f"/v1/runs/{run.id}")),
    "explain": ("runs:read", lambda http, run: http.get(f"/v1/runs/{run.id}/explain")),
    "cancel": ("runs:write", lambda http, run: http.post(f"/v1/runs/{run.id}/cancel")),
    "retry": ("runs:write", lambda http, run: http.post(f"/v1/runs/{run.id}/retry")),
    "rerun": ("runs:write", lambda http, run: http.post(f"/v1/runs/{run.id}/rerun")),
    "replay": ("runs:write", lambda http, run: http.post(f"/v1/dead-letters/{run.task}/replay")),
    "bulk": ("runs:write", lambda http, _: http.post("/v1/dead-letters/replay", json={"template": "t"})),
    "heartbeat": ("external:work", lambda http, run: run.say(http, "heartbeat")),
    "progress": ("external:work", lambda http, run: run.say(http, "progress", percent=50)),
    "complete": ("external:work", lambda http, run: run.say(http, "complete")),
    "fail": ("external:work", lambda http, run: run.say(http, "fail", retry_after=_HOUR)),
    "ack": ("external:work", lambda http, run: run.say(http, "acknowledge-cancel")),
}
STATES = tuple(EXPECTED["get"])
#: Where pairs begin.
BASES = ("held", "pending", "running", "stopping", "failed")
_WORKED = ("running", "late", "retry", "stopping", "succeeded", "failed")
_NAMES = {
    ("waiting_worker", "pending"): "pending", ("pending", "waiting"): "scheduled", ("pending", "pending"): "pending",
    ("queued", "pending"): "pending", ("waiting_worker", "waiting"): "scheduled",
    ("waiting_worker", "running"): "running", ("cancel_requested", "running"): "stopping",
}  # fmt: skip


async def put_into(stage: Stage, tenant: Tenant, state: str) -> Run:
    await tenant.post("/v1/templates", **TEMPLATE)
    run = Run(tenant)
    if state == "strange":
        return run
    if state == "held":
        body = {"tenant_id": tenant.name, "key": "tenant", "at_most": 0}
        await run.must(await tenant.http.put("/v1/limits", json=body))
    later = {"scheduled_at": (datetime.now(UTC) + timedelta(hours=1)).isoformat()} if state == "scheduled" else {}
    await run.make(**later)
    async with stage.pool.acquire() as c:
        run.task = str(await c.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run.id)))
        if state == "expired":
            await c.execute(
                "UPDATE job SET deadline_at = clock_timestamp() - interval '1 s' WHERE id = $1", UUID(run.id)
            )
            await sweeps.expire_jobs(c)
    if state in _WORKED:
        await run.claim()
    match state:
        case "late":
            async with stage.pool.acquire() as c:
                past = "started_at - make_interval(secs => timeout_seconds)"
                await c.execute(f"UPDATE task SET started_at = {past} WHERE id = $1", UUID(run.task))
        case "retry":
            await run.must(await run.say(tenant.http, "fail", retry_after=_HOUR))
        case "failed":
            await run.must(await run.say(tenant.http, "fail", retryable=False))
        case "succeeded":
            await run.must(await run.say(tenant.http, "complete"))
        case "stopping" | "cancelled":
            await run.must(await tenant.http.post(f"/v1/runs/{run.id}/cancel"))
    return run


async def state_of(stage: Stage, run: Run) -> str:
    async with stage.pool.acquire() as c:
        row = await c.fetchrow(
            "SELECT j.status, j.held, t.status AS step,"
            " t.started_at + make_interval(secs => t.timeout_seconds) < clock_timestamp() AS late"
            " FROM job j JOIN task t ON t.job_id = j.id WHERE j.id = $1",
            UUID(run.id),
        )
    if row is None:
        return "strange"
    if row["held"]:
        return "held"
    if row["step"] == "retry":
        return "retry"
    name = _NAMES.get((row["status"], row["step"]), str(row["status"]))
    return "late" if name == "running" and row["late"] else name


def expected(verb: str, state: str) -> tuple[int, str]:
    status, _, after = EXPECTED[verb][state].partition(">")
    return int(status), after or state


def test_the_table_names_every_verb() -> None:
    assert EXPECTED.keys() == VERBS.keys()


async def test_each_is_answered_in_each_state_as_the_table_says(stage: Stage) -> None:
    async def judge(of: tuple[str, str]) -> object | None:
        verb, state = of
        async with stage.tenant() as tenant:
            run = await put_into(stage, tenant, state)
            assert await state_of(stage, run) == state, state
            answer = await VERBS[verb][1](tenant.http, run)
            came = (answer.status_code, await state_of(stage, run))
        return None if came == expected(verb, state) else (of, came, expected(verb, state), answer.text)

    assert await side_by_side([(verb, state) for verb in VERBS for state in STATES], judge) == []


async def test_a_worker_that_says_again_that_it_failed_is_told_how_the_step_stands(stage: Stage) -> None:
    for state in ("retry", "failed"):
        async with stage.tenant() as tenant:
            run = await put_into(stage, tenant, state)
            assert (await VERBS["fail"][1](tenant.http, run)).json() == {"status": state}


@pytest.mark.parametrize("state", BASES)
async def test_two_at_once_are_answered_as_in_one_order_or_the_other(stage: Stage, state: str) -> None:
    def in_order(first: str, second: str) -> tuple[int, int, str]:
        answer, between = expected(first, state)
        answer_too, after = expected(second, between)
        return answer, answer_too, after

    async def judge(pair: tuple[str, str]) -> object | None:
        first, second = pair
        async with stage.tenant() as tenant:
            run = await put_into(stage, tenant, state)
            asked = (VERBS[verb][1](tenant.http, run) for verb in pair)
            answers = await asyncio.gather(*asked)
            statuses = [
                404 if (verb, answer.status_code) == ("replay", 409) else answer.status_code
                for verb, answer in zip(pair, answers, strict=True)
            ]
            came = (*statuses, await state_of(stage, run))
        other = in_order(second, first)
        allowed = [in_order(first, second), (other[1], other[0], other[2])]
        if {*pair} <= {"fail", "ack"} and state == "stopping":
            allowed.append((200, 200, "cancelled"))  # it stopped, said twice by the same worker
        return None if came in allowed else (pair, came, allowed, [answer.text for answer in answers])

    acts = [verb for verb in VERBS if verb not in ("get", "explain")]
    assert await side_by_side(combinations_with_replacement(acts, 2), judge) == []


#: Where a verb acts, if it acts anywhere.
ACTS = {verb: next((state for state in STATES if ">" in row[state]), "running") for verb, row in EXPECTED.items()}


#: `jobs:operate` opens these two, for the kinds that the key's other scopes allow: a run's dead letter is not there.
UNSEEN = {"replay": 404, "bulk": 202}


async def test_without_the_scope_and_with_a_revoked_key_nothing_happens(stage: Stage) -> None:
    async def judge(verb: str) -> object | None:
        scope, ask = VERBS[verb]
        others = tuple(one for one in SCOPES if one != scope)
        found = []
        async with stage.tenant() as tenant:
            run = await put_into(stage, tenant, ACTS[verb])
            lesser, revoked = await stage.key(tenant.name, others), await stage.key(tenant.name)
            async with stage.pool.acquire() as c:
                await revoke_key(c, revoked.prefix)
            for key, status in ((lesser, UNSEEN.get(verb, 403)), (revoked, 401)):
                async with client_of(stage.running.url, key.text) as http:
                    answer = await ask(http, run)
                found.append((answer.status_code, status, await state_of(stage, run)))
        wrong = [one for one in found if one[0] != one[1] or one[2] != ACTS[verb]]
        return (verb, wrong) if wrong else None

    assert await side_by_side(VERBS, judge) == []


async def test_a_key_that_is_revoked_meanwhile_did_it_or_did_not(stage: Stage) -> None:
    async def judge(verb: str) -> object | None:
        async with stage.tenant() as tenant:
            run = await put_into(stage, tenant, ACTS[verb])
            key = await stage.key(tenant.name)

            async def revoke() -> None:
                async with stage.pool.acquire() as c:
                    await revoke_key(c, key.prefix)

            async with client_of(stage.running.url, key.text) as http:
                answer, _ = await asyncio.gather(VERBS[verb][1](http, run), revoke())
                again = await VERBS["get"][1](http, run)
            came = (answer.status_code, await state_of(stage, run))
        fine = came in (expected(verb, ACTS[verb]), (401, ACTS[verb])) and again.status_code == 401
        return None if fine else (verb, came, again.status_code)

    assert await side_by_side([verb for verb in VERBS for _ in range(3)], judge) == []


async def test_a_repeated_request_is_answered_again_whatever_has_become_of_its_run(stage: Stage) -> None:
    """Of an Idempotency-Key the first answer stands: after each verb, and at the same time with it."""

    async def judge(of: tuple[str, bool]) -> object | None:
        verb, at_once = of
        async with stage.tenant() as tenant:
            await tenant.post("/v1/templates", **TEMPLATE)

            async def start() -> httpx2.Response:
                return await tenant.http.post("/v1/runs", json={"template": "t"}, headers={"Idempotency-Key": "k"})

            first = (await start()).json()
            run = Run(tenant, first["id"])
            async with stage.pool.acquire() as c:
                run.task = str(await c.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run.id)))
            await run.claim()
            deed = VERBS[verb][1](tenant.http, run)
            if at_once:
                again, _ = await asyncio.gather(start(), deed)
            else:
                await deed
                again = await start()
            async with stage.pool.acquire() as c:
                made = await c.fetchval("SELECT count(*) FROM run WHERE tenant_id = $1", tenant.name)
        runs = 2 if verb == "rerun" else 1
        return None if (again.status_code, again.json(), made) == (202, first, runs) else (of, again.text, made)

    assert await side_by_side([(verb, at_once) for verb in VERBS for at_once in (True, False)], judge) == []


async def test_a_replay_in_bulk_meets_whatever_its_runs_are_doing(stage: Stage) -> None:
    """One run in each state, of one tenant: those that failed go on, each once, however often it is asked at once."""
    async with stage.tenant() as tenant:
        await tenant.post("/v1/templates", **TEMPLATE)
        runs = [Run(tenant) for _ in range(5)]
        for run in runs:
            await run.make()
            await run.claim()
            async with stage.pool.acquire() as c:
                run.task = str(await c.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run.id)))
        for run in runs[:3]:
            await run.must(await run.say(tenant.http, "fail", retryable=False))
        await runs[3].must(await runs[3].say(tenant.http, "complete"))
        bulk = [VERBS["bulk"][1](tenant.http, runs[0]) for _ in range(3)]
        *answers, retried = await asyncio.gather(*bulk, VERBS["retry"][1](tenant.http, runs[0]))
        gone_on = [one for answer in answers for one in answer.json()["replayed"]]
        gone_on += [runs[0].id] if retried.is_success else []
        assert sorted(gone_on) == sorted(run.id for run in runs[:3])
        assert [answer.json()["refused"] for answer in answers] == [[], [], []]
        assert [await state_of(stage, run) for run in runs] == ["pending"] * 3 + ["succeeded", "running"]
