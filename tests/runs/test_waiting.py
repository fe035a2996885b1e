"""A run's time begins when it is let in; how long it may wait for that is another question."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.transitions import concurrency, sweeps
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.runs.conftest import Client

STEPS = [{"id": "outside", "queue": "reports"}]


async def write(client: Client, **terms: Any) -> None:
    policy = {"concurrency_policy": "queue_same_scope"}
    answer = await client.post("/v1/templates", type="turn", steps=STEPS, **(policy | terms))
    assert answer.status_code == 201, answer.text


async def seconds_left(rows: Connection, run: str) -> float | None:
    left: float | None = await rows.fetchval(
        "SELECT extract(epoch FROM deadline_at - clock_timestamp())::float8 FROM job WHERE id = $1", UUID(run)
    )
    return left


async def let_in(client: Client, rows: Connection, first: str, second: str) -> None:
    await client.post(f"/v1/runs/{first}/cancel")
    await concurrency.admit(rows, await concurrency.limits_of(rows, [UUID(second)]))
    assert (await client.look(second))["held"] is False


@pytest.mark.parametrize("start_within", [None, 60])
async def test_a_runs_timeout_begins_when_it_is_let_in(
    client: Client, rows: Connection, start_within: int | None
) -> None:
    await write(client, timeout_seconds=3600, start_within_seconds=start_within)
    first, second = [await client.start("turn") for _ in range(2)]
    assert await seconds_left(rows, first) == pytest.approx(3600, abs=60)
    assert (await client.look(second))["held"] is True
    waiting = await seconds_left(rows, second)
    assert waiting is None if start_within is None else waiting == pytest.approx(60, abs=30)
    await rows.execute("UPDATE job SET created_at = created_at - interval '2 hours'")
    await let_in(client, rows, first, second)
    assert await seconds_left(rows, second) == pytest.approx(3600, abs=60)


async def test_a_run_that_waited_for_longer_than_it_may_expires_and_says_so(client: Client, rows: Connection) -> None:
    await write(client, timeout_seconds=3600, start_within_seconds=60)
    first, second = [await client.start("turn") for _ in range(2)]
    await rows.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 s' WHERE held")
    await sweeps.expire_jobs(rows)
    said = await client.look(second)
    assert (said["status"], said["error"]["code"]) == ("expired", "not_started_in_time")
    assert (await client.look(first))["status"] == "waiting_worker"
    await assert_history(Rows(rows), UUID(second))


@pytest.mark.parametrize("of_template", [None, 3600])
async def test_a_run_may_say_for_itself_how_long_it_waits(
    client: Client, rows: Connection, of_template: int | None
) -> None:
    await write(client, timeout_seconds=7200, start_within_seconds=of_template)
    first, second, third = [await client.start("turn", start_within_seconds=given) for given in (60, 60, None)]
    assert await seconds_left(rows, first) == pytest.approx(7200, abs=60)
    assert await seconds_left(rows, second) == pytest.approx(60, abs=30)
    assert await seconds_left(rows, third) == (None if of_template is None else pytest.approx(3600, abs=60))
    await rows.execute("UPDATE job SET deadline_at = deadline_at - interval '70 s' WHERE held")
    await sweeps.expire_jobs(rows)
    said = await client.look(second)
    assert (said["status"], said["error"]["code"]) == ("expired", "not_started_in_time")
    assert (await client.look(third))["status"] == "pending"


async def test_a_runs_own_waiting_counts_again_in_its_second_life(client: Client, rows: Connection) -> None:
    await write(client)
    run = await client.start("turn", start_within_seconds=60)
    (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=["reports"], wait=5)).json()["tasks"]
    held = {"worker_id": "w", "epoch": task["epoch"]}
    await client.post(f"/v1/external/tasks/{task['task_id']}/fail", retryable=False, **held)
    second = await client.start("turn")
    await concurrency.admit(rows, await concurrency.limits_of(rows, [UUID(second)]))  # as a worker or the sweeper does
    assert (await client.post(f"/v1/runs/{run}/retry")).status_code == 202
    assert await seconds_left(rows, run) == pytest.approx(60, abs=30)


async def test_runs_of_a_batch_may_say_how_long_they_wait(client: Client, rows: Connection) -> None:
    assert (await client.post("/v1/templates", type="turn", steps=STEPS)).status_code == 201
    await client.http.put("/v1/limits", json={"tenant_id": "acme", "key": "template:turn", "at_most": 1})
    answer = await client.post("/v1/runs/batch", template="turn", start_within_seconds=60, runs=[{}, {}])
    waiting = [await seconds_left(rows, run) for run in answer.json()["ids"]]
    assert sorted(waiting, key=lambda left: left or 0) == [None, pytest.approx(60, abs=30)]


@pytest.mark.parametrize("seconds", [0, 30 * 86_400 + 1, 2**31, "60", True, 0.5])
async def test_a_time_of_waiting_is_a_number_of_seconds_up_to_a_month(client: Client, seconds: object) -> None:
    problem(await client.submit(start_within_seconds=seconds), 422, "invalid_request")


async def test_a_run_that_was_let_in_in_time_has_no_deadline_of_waiting_any_more(
    client: Client, rows: Connection
) -> None:
    await write(client, start_within_seconds=60)
    first, second = [await client.start("turn") for _ in range(2)]
    assert await seconds_left(rows, second) is not None
    await let_in(client, rows, first, second)
    assert await seconds_left(rows, second) is None


async def test_one_that_runs_past_its_timeout_says_that(client: Client, rows: Connection) -> None:
    await write(client, timeout_seconds=3600, start_within_seconds=60)
    run = await client.start("turn")
    await rows.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 s'")
    await sweeps.expire_jobs(rows)
    assert (await client.look(run))["error"]["code"] == "deadline_exceeded"
