"""GET /v1/scaling/{pool}: what a pool has to do, and how many workers it should have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest

from leasehold.api.auth.security import MEDIA_READ, OPERATE
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.settings import Settings, WorkerPool
from leasehold.transitions import claims, jobs, workers
from tests.api.conftest import MakeKey, client_of, serving
from tests.factories import ONE, terms

POOLS = {
    "small": WorkerPool(queues=("default",), labels=("gpu",), target_wait_seconds=10.0, most=20),
    "other": WorkerPool(queues=("other",)),
}


@pytest.fixture
async def operator(settings: Settings, rows: Connection, make_key: MakeKey) -> AsyncIterator[httpx2.AsyncClient]:
    key = (await make_key(scopes=(OPERATE,))).text
    async with serving(settings.model_copy(update={"pools": POOLS})) as api, client_of(api.url, key) as client:
        yield client


async def scaling(client: httpx2.AsyncClient, pool: str = "small") -> dict[str, Any]:
    answer = await client.get(f"/v1/scaling/{pool}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def worker(rows: Connection, version: str = "1", slots: int = 2, pool: str = "small", **columns: Any) -> UUID:
    ident = new_id()
    queues = ["default", "default@gpu"]
    await workers.register(
        rows, ident, host="h", pid=1, version=version, queues=queues, slots=[slots, slots], pool=pool
    )
    for name, value in columns.items():
        await rows.execute(f"UPDATE worker SET {name} = {value} WHERE id = $1", ident)
    return ident


async def run(rows: Connection, owner: UUID, count: int, seconds: float) -> None:
    """Let the worker run `count` tasks, each since `seconds`."""
    held = terms(owner)
    hints = await jobs.submit(rows, [jobs.NewJob(ONE, "t") for _ in range(count)])
    claimed = await claims.claim(rows, held, [hint.hint.task_id for hint in hints])
    assert len(claimed) == count
    await rows.execute(
        "UPDATE task SET started_at = clock_timestamp() - make_interval(secs => $2) WHERE lease_owner = $1",
        owner, seconds,
    )  # fmt: skip


async def test_an_idle_pool_without_workers_wants_none(operator: httpx2.AsyncClient) -> None:
    assert await scaling(operator) == {
        "pool": "small",
        "queues": ["default", "default@gpu"],
        "due": 0,
        "running": 0,
        "oldest": 0.0,
        "slots": 0,
        "workers": 0,
        "attempt_seconds": None,
        "target_wait_seconds": 10.0,
        "wanted": 0,
        "versions": [],
    }


async def test_due_tasks_of_all_tenants_ask_for_workers_and_those_that_wait_do_not(
    operator: httpx2.AsyncClient, rows: Connection
) -> None:
    for tenant in ("t", "u", "v"):
        await jobs.submit(rows, [jobs.NewJob(ONE, tenant) for _ in range(4)])
    await jobs.submit(rows, [jobs.NewJob(ONE, "t", priority=0)])
    later = await jobs.submit(rows, [jobs.NewJob(ONE, "t") for _ in range(5)])
    await rows.execute(
        "UPDATE task SET available_at = clock_timestamp() + interval '1 hour' WHERE id = ANY($1)",
        [hint.hint.task_id for hint in later],
    )
    await rows.execute("UPDATE task SET available_at = clock_timestamp() - interval '90 s' WHERE tenant_id = 'v'")
    seen = await scaling(operator)
    assert (seen["due"], seen["running"], seen["wanted"]) == (13, 0, 1)  # the first worker shows its slots
    assert 90 <= seen["oldest"] < 3600
    owner = await worker(rows)
    assert (await scaling(operator))["wanted"] == 7  # nothing runs yet: 13 tasks, two slots a worker
    await run(rows, owner, 2, seconds=2.5)
    seen = await scaling(operator)
    assert (seen["due"], seen["running"], seen["slots"], seen["workers"]) == (13, 2, 2, 1)
    assert 5 <= seen["attempt_seconds"] < 60
    assert 5 <= seen["wanted"] <= 8  # 2 slots are busy, and 13 tasks of 5 s want 6.5 more


async def test_a_paused_queue_asks_for_nobody_and_another_pool_s_work_neither(
    operator: httpx2.AsyncClient, rows: Connection
) -> None:
    await jobs.submit(rows, [jobs.NewJob(ONE, "t") for _ in range(4)])
    assert (await scaling(operator, "other"))["wanted"] == 0
    await rows.execute("INSERT INTO paused_queue (queue, reason) VALUES ('default', 'because')")
    assert (await scaling(operator))["wanted"] == 0


async def test_work_that_is_pinned_to_a_label_counts_for_the_pool_that_has_it(
    operator: httpx2.AsyncClient, rows: Connection
) -> None:
    await jobs.submit(rows, [jobs.NewJob(ONE, "t")])
    await rows.execute("UPDATE task SET queue = 'default@gpu'")
    assert (await scaling(operator))["due"] == 1
    await rows.execute("UPDATE task SET queue = 'default@another'")
    assert (await scaling(operator))["due"] == 0


async def test_an_older_version_drains_to_none(operator: httpx2.AsyncClient, rows: Connection) -> None:
    old = await worker(rows, "1", started_at="clock_timestamp() - interval '1 hour'")
    await worker(rows, "1", draining="true", started_at="clock_timestamp() - interval '1 hour'")
    await run(rows, old, 2, seconds=60)
    assert [(one["version"], one["wanted"]) for one in (await scaling(operator))["versions"]] == [("1", 1)]
    await worker(rows, "2")
    assert (await scaling(operator))["versions"] == [
        {"version": "2", "workers": 1, "draining": 0, "running": 0, "wanted": 1},
        {"version": "1", "workers": 1, "draining": 1, "running": 2, "wanted": 0},
    ]


async def test_a_silent_worker_and_one_of_another_pool_have_no_slots_here(
    operator: httpx2.AsyncClient, rows: Connection
) -> None:
    await worker(rows, seen_at="clock_timestamp() - interval '1 hour'")
    await worker(rows, pool="other")
    await worker(rows, draining="true")
    seen = await scaling(operator)
    assert (seen["workers"], seen["slots"]) == (0, 0)
    assert seen["versions"] == [{"version": "1", "workers": 0, "draining": 1, "running": 0, "wanted": 0}]


async def test_a_worker_of_an_older_release_counts_without_its_slots(
    operator: httpx2.AsyncClient, rows: Connection
) -> None:
    await worker(rows)
    await rows.execute("UPDATE worker SET slots = NULL")
    await jobs.submit(rows, [jobs.NewJob(ONE, "t") for _ in range(9)])
    seen = await scaling(operator)
    assert (seen["workers"], seen["slots"], seen["wanted"]) == (1, 0, 1)


async def test_the_default_pool_needs_no_declaration_and_another_does(operator: httpx2.AsyncClient) -> None:
    assert {"media", "generation", "conversion"} <= set((await scaling(operator, "default"))["queues"])
    for unknown in ("nobody", "No-Name", "x" * 50):
        answer = await operator.get(f"/v1/scaling/{unknown}")
        assert answer.status_code == 404, unknown


async def test_only_operators_may_ask(operator: httpx2.AsyncClient, make_key: MakeKey) -> None:
    async with client_of(str(operator.base_url), (await make_key(scopes=(MEDIA_READ,))).text) as client:
        assert (await client.get("/v1/scaling/small")).status_code == 403
