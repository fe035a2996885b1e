"""A run's time begins when it is let in; how long it may wait for that is another question."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from leasehold.database import Connection
from leasehold.transitions import gates, sweeps
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
    await gates.admit(rows, await gates.gates_of(rows, [UUID(second)]))
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
