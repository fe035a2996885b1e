"""Orders whose outcome nobody knows are settled by people: adopted, ordered again, or given up; each once."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from typer.testing import CliRunner, Result

from leasehold.cli.main import app
from leasehold.db import audit
from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.limits.admission import Payer
from leasehold.pipelines.generation.pipeline import withdrawal
from leasehold.pipelines.generation.rows import holders
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, notes, settlements, sweeps
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.settlements import Completion, Verdict
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.api.media_api import TO_THE_SECOND, problem
from tests.factories import Rows, assert_history
from tests.generation.conftest import PLAIN, TOKEN, buying, ordered
from tests.generation.simulator.server import Simulator
from tests.scenarios.fleet import Fleet, open_fleet
from tests.support.lock_waits import until_waiting

pytestmark = pytest.mark.usefixtures("own_width")

SCOPES = ("generation:read", "generation:write", "jobs:read", "jobs:operate")
SECONDS = 60.0


@pytest.fixture
async def fleet(settings: Settings, tmp_path: Path) -> AsyncIterator[Fleet]:
    opened = await open_fleet(settings, tmp_path)
    yield opened
    await opened.close()
    await opened.rows.connection.close()


@pytest.fixture
async def people(generation_settings: Settings, connection: Connection) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Two operators of the tenant `t`, anna and bob."""
    keys = [await create_key(connection, tenant_id="t", client_id=name, scopes=SCOPES) for name in ("anna", "bob")]
    async with (
        serving(generation_settings) as running,
        client_of(running.url, keys[0].text) as anna,
        client_of(running.url, keys[1].text) as bob,
    ):
        yield [anna, bob]


async def unsettled(client: httpx2.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/v1/unsettled", params=query)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def status_of(client: httpx2.AsyncClient, job_id: UUID) -> str:
    return str((await client.get(f"/v1/jobs/{job_id}")).json()["status"])


async def until(client: httpx2.AsyncClient, job_id: UUID, status: str) -> None:
    async with asyncio.timeout(SECONDS):
        while await status_of(client, job_id) != status:
            await asyncio.sleep(0.02)


async def lost(rows: Rows, client: httpx2.AsyncClient, *prompts: str, tenant: str = "t") -> list[UUID]:
    """Jobs whose order arrived, and whose provider's answer did not."""
    new = [replace(ordered(PLAIN, f"{prompt} #lost"), tenant_id=tenant) for prompt in prompts]
    await jobs.submit(rows.connection, new)
    for job in new:
        await until(client, job.id, "failed")
    return [job.id for job in new]


async def test_orders_of_a_worker_that_was_killed_are_settled_in_all_three_ways(
    fleet: Fleet, simulator: Simulator, people: list[httpx2.AsyncClient], generation_settings: Settings, rows: Rows
) -> None:
    """Killed between the send and its record: the provider has all three orders, and no row says so."""
    anna, _ = people
    new = [ordered(PLAIN, f"{word} #after=3") for word in ("a cat", "a dog", "a fox")]
    await jobs.submit(rows.connection, new)
    victim = await fleet.start("worker", failpoints="after_purchase:kill", **buying(simulator))
    assert await victim.wait() == -signal.SIGKILL
    adopted, again, given_up = (job.id for job in new)
    async with Worker(generation_settings):
        for job in new:
            await until(anna, job.id, "failed")
        found = {item["job_id"]: item for item in await unsettled(anna)}
        assert found.keys() == {str(job.id) for job in new}
        item = found[str(adopted)]
        assert (item["system"], item["kind"], item["sent"]["prompt"]) == (PLAIN, "generation", "a cat #after=3")
        assert item["sent"]["token"] == str(adopted)
        assert item["sent_at"] < item["since"]
        ref = next(bought.id for bought in simulator.bought if bought.prompt.startswith("a cat"))
        before = await rows.connection.fetchrow(
            "SELECT id, epoch FROM task WHERE job_id = $1 AND step = 'submit'", adopted
        )
        answers = [
            await anna.post(f"/v1/jobs/{adopted}/settle", json={"action": "adopt", "ref": ref}),
            await anna.post(f"/v1/jobs/{again}/settle", json={"action": "again"}),
            await anna.post(f"/v1/jobs/{given_up}/settle", json={"action": "give_up", "reason": "nobody wants it"}),
        ]
        assert [answer.status_code for answer in answers] == [202] * 3, [answer.text for answer in answers]
        await until(anna, adopted, "succeeded")
        await until(anna, again, "succeeded")
    assert before is not None
    zombie = Completion(Lease(before["id"], uuid4(), before["epoch"], 1, 0.0), [], {"ref": "another"})
    assert (await settlements.complete(rows.connection, [zombie])).verdicts[before["id"]] is Verdict.LOST
    assert [simulator.purchases(f"{word} #after=3") for word in ("a cat", "a dog", "a fox")] == [1, 2, 1]
    assert await status_of(anna, given_up) == "failed"
    assert await unsettled(anna) == []
    outputs = (await anna.get(f"/v1/jobs/{adopted}")).json()["outputs"]
    assert outputs
    for job in new:
        await assert_history(rows, job.id)
    acts = await rows.connection.fetch("SELECT target, details FROM audit WHERE action = 'job.settled' ORDER BY at")
    assert [UUID(act["target"]) for act in acts] == [adopted, again, given_up]
    assert ref in acts[0]["details"]
    (head,) = await audit.heads(rows.connection, "t")
    assert await audit.verify(rows.connection, head) is None


@pytest.mark.parametrize("action", ["again", "give_up", "adopt"])
async def test_of_two_who_settle_the_same_order_one_wins_and_the_other_sees_what_happened(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows, action: str
) -> None:
    (job_id,) = await lost(rows, people[0], "a cat")
    body = {"action": action} | ({"ref": simulator.bought[0].id} if action == "adopt" else {})
    answers = await asyncio.gather(*(client.post(f"/v1/jobs/{job_id}/settle", json=body) for client in people))
    assert sorted(answer.status_code for answer in answers) == [202, 409]
    winner = ("anna", "bob")[answers.index(next(answer for answer in answers if answer.is_success))]
    loser = next(answer for answer in answers if not answer.is_success)
    said = problem(loser, 409, "already_settled")
    deed = {"again": "ordered again", "give_up": "gave the order up", "adopt": "adopted the order"}[action]
    assert re.fullmatch(rf"{winner} {deed}.* at {TO_THE_SECOND}\.", said["detail"]), said["detail"]
    problem(await people[1].post(f"/v1/jobs/{job_id}/settle", json=body), 409, "already_settled")
    if action == "adopt":
        await until(people[0], job_id, "succeeded")
    if action == "again":  # the answer is lost again, and can be settled again
        async with asyncio.timeout(SECONDS):
            while simulator.studio.attempts["a cat #lost"] < 2 or not await unsettled(people[0]):
                await asyncio.sleep(0.02)
        assert (await people[1].post(f"/v1/jobs/{job_id}/settle", json={"action": "give_up"})).status_code == 202
        assert simulator.studio.attempts["a cat #lost"] == 2
    assert await unsettled(people[0]) == []


async def test_who_settles_an_order_locks_the_rates_first_as_who_retries_the_job_does(
    people: list[httpx2.AsyncClient], worker: Worker, generation_settings: Settings, rows: Rows
) -> None:
    (job_id,) = await lost(rows, people[0], "a cat")
    key = await create_key(rows.connection, tenant_id="t", client_id="eve", scopes=SCOPES)
    limited = generation_settings.model_copy(update={"submissions_per_tenant": 60})
    async with serving(limited) as running, client_of(running.url, key.text) as eve:
        async with rows.connection.transaction():
            await running.services.admission.charge(rows.connection, Payer("t"))  # as a retry begins
            settling = asyncio.create_task(eve.post(f"/v1/jobs/{job_id}/settle", json={"action": "again"}))
            await until_waiting(rows.connection)
            # The retry goes on with the job. If the settlement held it, each would wait for the other.
            await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE NOWAIT", job_id)
        assert (await settling).status_code == 202


async def test_the_search_for_who_has_an_order_holds_neither_the_job_nor_the_rates(
    people: list[httpx2.AsyncClient],
    worker: Worker,
    generation_settings: Settings,
    simulator: Simulator,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads thousands of rows: the tenant's submissions waited for it."""
    search = (
        "SELECT NULL::jsonb AS params FROM (VALUES ($1::uuid, $2::text, $3::text, $4::int)) AS asked"
        " WHERE pg_advisory_xact_lock_shared(4711) IS NULL"  # never NULL
    )
    monkeypatch.setattr("leasehold.pipelines.generation.rows._HOLDERS", search)
    (job_id,) = await lost(rows, people[0], "a cat")
    body = {"action": "adopt", "ref": simulator.bought[0].id}
    limited = generation_settings.model_copy(update={"submissions_per_tenant": 60})
    key = await create_key(rows.connection, tenant_id="t", client_id="eve", scopes=SCOPES)
    async with serving(limited) as running, client_of(running.url, key.text) as eve:
        async with rows.connection.transaction():
            await rows.connection.execute("SELECT pg_advisory_xact_lock(4711)")
            settling = asyncio.create_task(eve.post(f"/v1/jobs/{job_id}/settle", json=body))
            await until_waiting(rows.connection, kind="advisory")
            await rows.connection.execute("SET LOCAL lock_timeout = '1s'")
            await running.services.admission.charge(rows.connection, Payer("t"))
            await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE NOWAIT", job_id)
        assert (await settling).status_code == 202


async def test_an_order_is_adopted_by_one_job_only(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    first, second = await lost(rows, people[0], "a cat", "a dog")
    body = {"action": "adopt", "ref": simulator.bought[0].id}
    assert (await people[0].post(f"/v1/jobs/{first}/settle", json=body)).status_code == 202
    problem(await people[0].post(f"/v1/jobs/{second}/settle", json=body), 409, "order_adopted")
    assert [item["job_id"] for item in await unsettled(people[0])] == [str(second)]


async def test_an_order_of_the_installations_account_is_adopted_in_one_tenant_only(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    """Orders with a client's own credential are of another account, which may give its orders the same ids."""
    key = await create_key(rows.connection, tenant_id="u", client_id="eve", scopes=SCOPES)
    async with client_of(str(people[0].base_url), key.text) as eve:
        (first,) = await lost(rows, eve, "a cat", tenant="u")
        body = {"action": "adopt", "ref": simulator.bought[0].id}
        assert (await eve.post(f"/v1/jobs/{first}/settle", json=body)).status_code == 202
    second, third = await lost(rows, people[0], "a dog", "a fox")
    problem(await people[0].post(f"/v1/jobs/{second}/settle", json=body), 409, "order_adopted")
    assert {item["job_id"] for item in await unsettled(people[0])} == {str(second), str(third)}
    own = 'UPDATE job SET params = params || \'{"credential": "sealed"}\' WHERE id = $1'
    await rows.connection.execute(own, second)
    assert (await people[0].post(f"/v1/jobs/{second}/settle", json=body)).status_code == 202
    # The account of the third is the installation's, as the first one's.
    problem(await people[0].post(f"/v1/jobs/{third}/settle", json=body), 409, "order_adopted")


async def answered(person: httpx2.AsyncClient, rows: Rows, prompt: str) -> tuple[UUID, str]:
    """A job that has its provider's answer, and the order's id there."""
    answer = await person.post("/v1/images/generations", json={"provider": PLAIN, "prompt": prompt})
    job_id = UUID(answer.json()["data"]["job_id"])
    ref = (
        "SELECT r.value ->> 'ref' FROM result r JOIN task t ON t.id = r.task_id"
        " WHERE t.job_id = $1 AND t.step = 'submit' AND t.status = 'succeeded'"
    )
    async with asyncio.timeout(SECONDS):
        while (found := await rows.connection.fetchval(ref, job_id)) is None:
            await asyncio.sleep(0.02)
    return job_id, found


@pytest.mark.parametrize(("tenant", "prompt"), [("u", "a cat #never"), ("t", "a cat")])
async def test_an_order_whose_answer_another_job_got_is_not_adopted(
    people: list[httpx2.AsyncClient], worker: Worker, rows: Rows, tenant: str, prompt: str
) -> None:
    """It would store the other's files, and could withdraw the other's order."""
    key = await create_key(rows.connection, tenant_id=tenant, client_id="eve", scopes=SCOPES)
    async with client_of(str(people[0].base_url), key.text) as eve:
        other_id, ref = await answered(eve, rows, prompt)
    (job_id,) = await lost(rows, people[0], "a dog")
    settle, body = f"/v1/jobs/{job_id}/settle", {"action": "adopt", "ref": ref}
    said = problem(await people[0].post(settle, json=body), 409, "order_adopted")
    assert said["detail"] == "Another job has this order."
    assert [item["job_id"] for item in await unsettled(people[0])] == [str(job_id)]
    # Orders with a client's own credential are of another account, which may give its orders the same ids.
    own = 'UPDATE job SET params = params || \'{"credential": "sealed"}\' WHERE id = $1'
    await rows.connection.execute(own, other_id)
    assert (await people[0].post(settle, json=body)).status_code == 202


async def test_the_search_for_who_has_an_order_compares_the_provider_and_is_bounded(
    people: list[httpx2.AsyncClient], worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders of two providers may have the same id."""
    (job_id, ref), _ = await answered(people[0], rows, "a cat"), await answered(people[0], rows, "a dog")

    async def found(asking: UUID, provider: str) -> int:
        return len(await holders(rows.connection, asking, provider, ref))

    assert [await found(uuid4(), PLAIN), await found(uuid4(), TOKEN), await found(job_id, PLAIN)] == [1, 0, 0]
    monkeypatch.setattr("leasehold.pipelines.generation.rows.MAX_SEARCHED", 1)
    assert await found(uuid4(), PLAIN) == 0


async def let_end(connection: Connection, people: list[httpx2.AsyncClient], job_id: UUID, end: str) -> None:
    """End a job whose step `submit` may have ordered."""
    if end == "expired":
        await connection.execute("UPDATE job SET deadline_at = clock_timestamp() WHERE id = $1", job_id)
        await sweeps.expire_jobs(connection)
    elif end == "cancelled":
        answer = await people[0].post(f"/v1/jobs/{job_id}/cancel")
        assert answer.status_code == 202, answer.text
    else:
        owner = "SELECT lease_owner FROM task WHERE job_id = $1 AND step = 'submit'"
        await sweeps.expire_leases(connection, [await connection.fetchval(owner, job_id)], max_losses=0)
    assert await status_of(people[0], job_id) == end


@pytest.mark.parametrize("end", ["expired", "cancelled", "failed"])
async def test_an_order_of_unknown_outcome_is_listed_and_given_up_however_its_job_has_ended(
    people: list[httpx2.AsyncClient], simulator: Simulator, rows: Rows, end: str
) -> None:
    """Its worker is lost after the purchase: until the deadline, until somebody cancels the job, or for good."""
    body = {"provider": PLAIN, "prompt": "a cat", "task_id": "order-1"}
    ordered = await people[0].post("/v1/images/generations", json=body)
    job_id = UUID(ordered.json()["data"]["job_id"])
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, ["generation"], 10)
    await notes.remember(rows.connection, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
    if end == "cancelled":
        await sweeps.expire_leases(rows.connection, [claimed.lease.owner], max_losses=9)
    await let_end(rows.connection, people, job_id, end)
    (item,) = await unsettled(people[0])
    assert (item["job_id"], item["system"], item["sent_at"]) == (str(job_id), PLAIN, "2026-11-22T10:00:00+00:00")
    shown = (await people[0].get("/v1/images/query", params={"task_id": "order-1"})).json()["data"]["error"]
    known = "cancelled" if end == "cancelled" else "submit_outcome_unknown"
    assert (shown["code"], shown["retryable"]) == (known, end == "cancelled")
    settle = f"/v1/jobs/{job_id}/settle"
    if end != "failed":  # such a job does not run again
        problem(await people[0].post(settle, json={"action": "again"}), 409, "resource_invalid_state")
    assert (await people[0].post(settle, json={"action": "give_up"})).status_code == 202
    assert await unsettled(people[0]) == []
    assert await status_of(people[0], job_id) == end
    await assert_history(rows, job_id)


async def test_a_provider_that_certainly_sold_nothing_leaves_nothing_to_settle_in_a_job_that_is_cancelled_meanwhile(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    """The job's end drops the snooze, and with it the note that nothing was ordered."""
    body = {"provider": PLAIN, "prompt": "a cat #busy=9 #slow=2"}
    job_id = UUID((await people[0].post("/v1/images/generations", json=body)).json()["data"]["job_id"])
    async with asyncio.timeout(SECONDS):
        while not simulator.studio.attempts[body["prompt"]]:
            await asyncio.sleep(0.02)
    assert (await people[0].post(f"/v1/jobs/{job_id}/cancel")).json()["status"] == "cancel_requested"
    await until(people[0], job_id, "cancelled")
    assert await unsettled(people[0]) == []


async def with_lost_answer(person: httpx2.AsyncClient, settings: Settings, rows: Rows) -> UUID:
    """An unfinished generation whose provider, which takes a token, has got the order and has lost the answer once."""
    body = {"provider": TOKEN, "prompt": "a cat #never #lost"}
    job_id = UUID((await person.post("/v1/images/generations", json=body)).json()["data"]["job_id"])
    async with Worker(settings), asyncio.timeout(SECONDS):
        while await rows.statuses(job_id) != {"submit": "retry", "poll": "blocked", "store": "blocked"}:
            await asyncio.sleep(0.02)
    return job_id


@pytest.mark.parametrize("end", ["expired", "cancelled"])
async def test_an_order_that_a_job_adopts_which_has_ended_for_good_is_withdrawn(
    people: list[httpx2.AsyncClient], generation_settings: Settings, simulator: Simulator, rows: Rows, end: str
) -> None:
    job_id = await with_lost_answer(people[0], generation_settings, rows)
    await let_end(rows.connection, people, job_id, end)
    (bought,) = simulator.bought
    answer = await people[0].post(f"/v1/jobs/{job_id}/settle", json={"action": "adopt", "ref": bought.id})
    assert answer.status_code == 202, answer.text
    assert await unsettled(people[0]) == []
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        while not bought.cancelled:
            await asyncio.sleep(0.02)
    assert await status_of(people[0], job_id) == end
    await assert_history(rows, job_id)


@pytest.mark.parametrize("end", ["its end", "its lease"])
async def test_no_order_is_adopted_that_a_running_withdrawal_may_miss(
    people: list[httpx2.AsyncClient], generation_settings: Settings, simulator: Simulator, rows: Rows, end: str
) -> None:
    """The attempt may have read that there is no order. `end`: after it, the adoption is accepted."""
    job_id = await with_lost_answer(people[0], generation_settings, rows)
    await let_end(rows.connection, people, job_id, "cancelled")
    (bought,) = simulator.bought
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, ["generation"], 10)
    assert claimed.step == "withdraw"
    adoption = {"action": "adopt", "ref": bought.id}
    refused = await people[0].post(f"/v1/jobs/{job_id}/settle", json=adoption)
    said = problem(refused, 409, "order_being_withdrawn")
    assert str(claimed.job_id) in said["detail"]
    assert int(refused.headers["retry-after"]) > 0
    assert [item["job_id"] for item in await unsettled(people[0])] == [str(job_id)]
    if end == "its end":
        value = {"stopped": False, "because": "it is unknown whether there is one"}
        await settlements.complete(rows.connection, [Completion(claimed.lease, value=value)])
    else:
        await sweeps.expire_leases(rows.connection, [claimed.lease.owner], max_losses=9)
    answer = await people[0].post(f"/v1/jobs/{job_id}/settle", json=adoption)
    assert answer.status_code == 202, answer.text
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        while not bought.cancelled:
            await asyncio.sleep(0.02)
    assert await unsettled(people[0]) == []


async def test_who_adopts_an_order_waits_for_nobody_who_holds_its_withdrawal(
    people: list[httpx2.AsyncClient], rows: Rows
) -> None:
    """Whoever holds it may wait for the generation, which the adoption holds, or may begin to run the withdrawal."""
    body = {"provider": TOKEN, "prompt": "a cat"}
    job_id = UUID((await people[0].post("/v1/images/generations", json=body)).json()["data"]["job_id"])
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, ["generation"], 10)
    await notes.remember(rows.connection, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
    await sweeps.expire_leases(rows.connection, [claimed.lease.owner], max_losses=9)
    await let_end(rows.connection, people, job_id, "cancelled")
    adoption = {"action": "adopt", "ref": "g1"}
    async with rows.connection.transaction():
        await rows.connection.execute("SELECT FROM job WHERE exclusive_key = $1 FOR UPDATE", str(job_id))
        refused = await people[0].post(f"/v1/jobs/{job_id}/settle", json=adoption)
        problem(refused, 409, "order_being_withdrawn")
    assert (await people[0].post(f"/v1/jobs/{job_id}/settle", json=adoption)).status_code == 202


async def test_a_withdrawal_that_knows_no_order_says_whether_there_may_be_one(
    people: list[httpx2.AsyncClient], generation_settings: Settings, rows: Rows
) -> None:
    because = "SELECT value ->> 'because' FROM result WHERE value ? 'because' ORDER BY value ->> 'because'"
    job_ids = []
    for prompt in ("a cat #lost", "a dog #busy=9"):
        body = {"provider": TOKEN, "prompt": prompt}
        job_ids.append(UUID((await people[0].post("/v1/images/generations", json=body)).json()["data"]["job_id"]))
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        for job_id in job_ids:
            while (await rows.statuses(job_id))["submit"] not in ("retry", "waiting"):
                await asyncio.sleep(0.02)
    for job_id in job_ids:
        await let_end(rows.connection, people, job_id, "cancelled")
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        while len(said := [row[0] for row in await rows.connection.fetch(because)]) < 2:
            await asyncio.sleep(0.02)
    assert said == ["it is unknown whether there is one", "no order at the provider is known"]
    assert [item["job_id"] for item in await unsettled(people[0])] == [str(job_ids[0])]


@pytest.mark.parametrize(("kind", "status"), [("image", 422), ("video", 202)])
async def test_an_order_is_adopted_only_where_the_provider_can_be_asked_for_such_an_order(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows, kind: str, status: int
) -> None:
    """Ark answers an order of images with the files, and has no request for it. Of a video it has one."""
    new = ordered("ark", "a cat #lost", model="m")
    new = replace(new, params=dict(new.params) | {"kind": kind})
    await jobs.submit(rows.connection, [new])
    await until(people[0], new.id, "failed")
    body = {"action": "adopt", "ref": simulator.bought[0].id}
    answer = await people[0].post(f"/v1/jobs/{new.id}/settle", json=body)
    if status == 202:
        assert answer.status_code == 202, answer.text
        await until(people[0], new.id, "succeeded")
    else:
        problem(answer, 422, "order_not_adoptable")
        assert [item["job_id"] for item in await unsettled(people[0])] == [str(new.id)]


async def test_many_are_settled_at_once_each_by_itself(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    ids = await lost(rows, people[0], "a cat", "a dog", "a fox")
    await people[1].post(f"/v1/jobs/{ids[1]}/settle", json={"action": "give_up"})
    items = [{"job_id": str(job_id), "action": "give_up"} for job_id in [*ids, uuid4()]]
    answer = (await people[0].post("/v1/unsettled/settle", json={"settlements": items})).json()
    assert answer["settled"] == [str(ids[0]), str(ids[2])]
    assert [item["code"] for item in answer["refused"]] == ["already_settled", "job_not_found"]
    assert await unsettled(people[0]) == []


async def test_what_needs_no_person_cannot_be_settled(
    people: list[httpx2.AsyncClient], worker: Worker, rows: Rows
) -> None:
    new = ordered(PLAIN, "a cat")
    await jobs.submit(rows.connection, [new])
    await until(people[0], new.id, "succeeded")
    problem(await people[0].post(f"/v1/jobs/{new.id}/settle", json={"action": "again"}), 409, "resource_invalid_state")
    for body in ({"action": "adopt"}, {"action": "again", "ref": "x"}, {"action": "adopt", "ref": "../x"}, {}):
        problem(await people[0].post(f"/v1/jobs/{new.id}/settle", json=body), 422, "invalid_request")


async def test_a_withdrawal_has_no_order_that_could_be_adopted(people: list[httpx2.AsyncClient], rows: Rows) -> None:
    job = NewJob(withdrawal, "t", params={"job_id": str(uuid4())})
    await jobs.submit(rows.connection, [job])
    for body in ({"action": "adopt", "ref": "x"}, {"action": "again"}, {"action": "give_up"}):
        answer = await people[0].post(f"/v1/jobs/{job.id}/settle", json=body)
        problem(answer, 409, "resource_invalid_state")


async def test_another_tenants_orders_are_neither_listed_nor_settled(
    people: list[httpx2.AsyncClient], worker: Worker, rows: Rows, connection: Connection
) -> None:
    (job_id,) = await lost(rows, people[0], "a cat")
    key = await create_key(connection, tenant_id="other", client_id="eve", scopes=SCOPES)
    async with client_of(str(people[0].base_url), key.text) as eve:
        assert await unsettled(eve) == []
        assert await unsettled(eve, tenant="t") == []
        problem(await eve.post(f"/v1/jobs/{job_id}/settle", json={"action": "give_up"}), 404, "job_not_found")
    unable = await create_key(connection, tenant_id="t", client_id="eve", scopes=("jobs:read", "jobs:operate"))
    async with client_of(str(people[0].base_url), unable.text) as eve:
        assert await unsettled(eve) == []
    assert len(await unsettled(people[0])) == 1


async def test_the_command_line_lists_and_settles(
    people: list[httpx2.AsyncClient], worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    first, second = await lost(rows, people[0], "a cat", "a dog")
    key = people[0].headers["authorization"].removeprefix("Bearer ")
    environment = {"LEASEHOLD_URL": str(people[0].base_url), "LEASEHOLD_API_KEY": key, "COLUMNS": "300"}

    async def cli(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["jobs", *arguments], env=environment)

    listed = await cli("unsettled")
    assert str(first) in listed.stdout
    assert str(second) in listed.stdout
    assert (await cli("settle", str(first), "--adopt", simulator.bought[0].id)).exit_code == 0
    await until(people[0], first, "succeeded")
    both = await cli("settle", str(first), str(second), "--give-up", "--reason", "old")
    assert both.exit_code == 1
    assert f"{second}: settled" in both.stdout
    assert "already_settled: anna adopted the order" in both.stdout
    for wrong in (("--again", "--give-up"), (), ("--adopt", "x", str(second))):
        assert (await cli("settle", str(first), *wrong)).exit_code == 2


async def test_silent_external_steps_and_disabled_webhooks_stand_there_too(
    people: list[httpx2.AsyncClient], connection: Connection
) -> None:
    scopes = ("jobs:read", "runs:read", "runs:write", "templates:write", "external:work", "webhooks:write")
    key = await create_key(connection, tenant_id="t", client_id="owner", scopes=scopes)
    async with client_of(str(people[0].base_url), key.text) as owner:
        await owner.post("/v1/templates", json={"type": "outside", "steps": [{"id": "only", "queue": "q"}]})
        run = (await owner.post("/v1/runs", json={"template": "outside"})).json()["id"]
        assert await unsettled(owner, what="external") == []
        await connection.execute("UPDATE task SET available_at = available_at - interval '11 minutes'")
        (item,) = await unsettled(owner, what="external")
        assert (item["job_id"], item["step"], item["queue"]) == (run, "only", "q")
        claim = await owner.post("/v1/external/claim", json={"worker_id": "w", "queues": ["q"]})
        assert len(claim.json()["tasks"]) == 1
        assert await unsettled(owner, what="external") == []
        await connection.execute("UPDATE task SET lease_until = lease_until - interval '1 hour'")
        assert len(await unsettled(owner, what="external")) == 1
        await connection.execute(
            "INSERT INTO webhook (id, tenant_id, url, secrets, events, enabled, disabled_because) VALUES"
            " (gen_random_uuid(), 't', 'https://hooks.example/x?token=s3cret', '{}', '{}', false, 'it answered 410'),"
            " (gen_random_uuid(), 'other', 'https://hooks.example/', '{}', '{}', false, 'it answered 410'),"
            " (gen_random_uuid(), 't', 'https://hooks.example/', '{}', '{}', false, NULL)"
        )
        (hook,) = await unsettled(owner, what="webhooks")
        assert (hook["system"], hook["because"]) == ("hooks.example", "it answered 410")
        assert "s3cret" not in str(hook)
    assert await unsettled(people[0], what="external") == []  # without the scope of runs


@pytest.mark.parametrize("limit", [1, 2, 4, 100])
async def test_every_silent_step_is_on_some_page_once(
    people: list[httpx2.AsyncClient], connection: Connection, limit: int
) -> None:
    key = await create_key(
        connection, tenant_id="t", client_id="owner", scopes=("jobs:read", "runs:read", "runs:write", "templates:write")
    )
    async with client_of(str(people[0].base_url), key.text) as owner:
        steps: list[dict[str, Any]] = [{"id": name, "queue": "q", "needs": []} for name in ("a", "b", "c")]
        await owner.post("/v1/templates", json={"type": "outside", "steps": steps})
        runs = [(await owner.post("/v1/runs", json={"template": "outside"})).json()["id"] for _ in range(2)]
        await connection.execute("UPDATE task SET available_at = available_at - interval '11 minutes'")
        listed: list[tuple[str, str]] = []
        query: dict[str, Any] = {"what": "external", "limit": limit}
        while True:
            page = (await owner.get("/v1/unsettled", params=query)).json()
            assert 0 < len(page["items"]) <= limit
            listed += [(item["job_id"], item["step"]) for item in page["items"]]
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        assert listed == [(run, step) for run in reversed(runs) for step in ("a", "b", "c")]
