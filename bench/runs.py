"""`runs`: the figures of the runs API: the time of a cancel, of a page of a long list, and of a step; the cost of a
limit; and the wait of a tenant beside another tenant's flood.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any
from uuid import UUID

import asyncpg
import httpx2

from bench.figure import Figure, Goal, quantile
from bench.http import until_ready
from bench.jobs import until_finished
from bench.pipelines import napping, twostep
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.embedded.ports import free_port
from leasehold.pipelines.demo.pipeline import noop
from leasehold.security.credentials import create_key
from leasehold.transitions.jobs import NewJob

_PIPELINES = "bench.pipelines:benched"
_SCOPES = ("runs:read", "runs:write")
_CANCELS = 100
_ROWS, _PAGES, _PAGE = 1_000_000, 100, 100
_FLOOD, _NAP_SLOTS = 10_000, 16

_FILL = """
WITH made AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq, params, inputs,
                     output_prefix, created_at, finished_at)
    SELECT (lpad(to_hex(1700000000000 + n), 12, '0') || '7000' || 'a000' || lpad(to_hex(n), 12, '0'))::uuid, 'bench',
           'noop', 1, 'succeeded', 0, 4, '{}', '{}', '', clock_timestamp(), clock_timestamp()
    FROM generate_series(1, $1::int) AS n
    RETURNING id
)
INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id)
SELECT id, 'bench', 'noop', 1, 'tenant', '' FROM made
"""


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [
        *await _cancels(testbed, scale),
        await _pages(testbed, scale),
        await _steps(testbed, scale),
        await _limit(testbed, scale),
        await _flood(testbed, scale),
    ]


@asynccontextmanager
async def _client(installation: Installation) -> AsyncIterator[httpx2.AsyncClient]:
    port = free_port()
    await installation.start("api", api_port=port)
    await until_ready(port)
    async with installation.connection() as connection:
        key = await create_key(connection, tenant_id="bench", client_id="bench", scopes=_SCOPES)
    headers = {"Authorization": f"Bearer {key.text}"}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60.0) as client:
        yield client


async def _json_of(request: Any) -> Any:
    answer: httpx2.Response = await request
    return answer.raise_for_status().json()


async def _cancels(testbed: Testbed, scale: Scale) -> list[Figure]:
    """The time from the event of a cancel request to the event of its acknowledgement, for steps with a checkpoint
    every 0.1 s.
    """
    runs, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation, _client(installation) as client:
            await installation.start_worker(worker_concurrency=_CANCELS)
            body = {"template": "demo_long_task", "payload": {"seconds": 600}}
            ids = [(await _json_of(client.post("/v1/runs", json=body)))["id"] for _ in range(_CANCELS)]
            async with installation.connection() as connection:
                await _until(connection, "SELECT count(*) FROM task WHERE step = 'execute' AND status = 'running'")
                for run in ids:
                    await _json_of(client.post(f"/v1/runs/{run}/cancel"))
                await _until(connection, "SELECT count(*) FROM job WHERE status = 'cancelled'")
                rows = await connection.fetch(
                    "SELECT extract(epoch FROM max(at) - min(at))::float8 AS s FROM history"
                    " WHERE kind = 'cancel_requested' OR (kind = 'cancelled' AND step = 'execute') GROUP BY job_id"
                )
            runs.append([1000 * row["s"] for row in rows])
    return [
        Figure("cancel to acknowledged, p50", "ms", tuple(median(run) for run in runs), tuple(load)),
        Figure("cancel to acknowledged, p99", "ms", tuple(quantile(r, 0.99) for r in runs), tuple(load), Goal(1500)),
    ]


async def _until(connection: asyncpg.Connection[asyncpg.Record], count_query: str) -> None:
    async with asyncio.timeout(60):
        while await connection.fetchval(count_query) < _CANCELS:  # noqa: ASYNC110 - PostgreSQL has no event for it
            await asyncio.sleep(0.05)


async def _pages(testbed: Testbed, scale: Scale) -> Figure:
    """Read the newest ten thousand of a million runs by cursor, a hundred a page."""
    runs, load = [], []
    async with testbed.installation() as installation, _client(installation) as client:
        async with installation.connection() as connection:
            await connection.execute(_FILL, _ROWS, timeout=600)
            await connection.execute("ANALYZE")
        for _ in range(scale.runs):
            load.append(os.getloadavg()[0])
            runs.append(await _walk(client))
    return Figure(
        "a page of 100 runs of 1 million, p99", "ms", tuple(quantile(r, 0.99) for r in runs), tuple(load), Goal(20)
    )


async def _walk(client: httpx2.AsyncClient) -> list[float]:
    spent, cursor = [], None
    for _ in range(_PAGES):
        began = time.perf_counter()
        page = await _json_of(client.get("/v1/runs", params={"limit": _PAGE} | ({"cursor": cursor} if cursor else {})))
        spent.append(1000 * (time.perf_counter() - began))
        cursor = page["next_cursor"]
    return spent


async def _steps(testbed: Testbed, scale: Scale) -> Figure:
    """Half of the time of a run whose two steps do nothing, by the database's clock, at ten runs a second."""
    runs, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation(pipelines=_PIPELINES) as installation:
            worker = await installation.start_worker()
            async with submitter(installation) as submitting:
                for _ in range(100):
                    await submitting.submit(NewJob(twostep, "bench"))
                    await asyncio.sleep(0.1)
                await until_finished(installation, worker)
            async with installation.connection() as connection:
                rows = await connection.fetch(
                    "SELECT extract(epoch FROM finished_at - started_at)::float8 AS s FROM job"
                )
        runs.append(median(1000 * row["s"] / 2 for row in rows))
    return Figure("what a step costs at rest, p50", "ms", tuple(runs), tuple(load), Goal(10))


async def _limit(testbed: Testbed, scale: Scale) -> Figure:
    """The ratio of jobs a second with a wide concurrency limit to jobs a second without a limit, measured in turns."""
    ratios, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        unlimited = await _drain(testbed, scale, ())
        limited = await _drain(testbed, scale, (ConcurrencyLimit("bench", "queue:default", at_most=1000),))
        ratios.append(limited / unlimited)
    return Figure(
        "throughput with a limit of 1000 to without", "ratio", tuple(ratios), tuple(load), Goal(0.9, at_least=True)
    )


async def _drain(testbed: Testbed, scale: Scale, limits: Sequence[ConcurrencyLimit]) -> float:
    async with testbed.installation() as installation:
        worker = await installation.start_worker()
        async with submitter(installation) as submitting:
            for start in range(0, scale.jobs // 2, 250):
                jobs = [NewJob(noop, "bench", limits=limits) for _ in range(min(250, scale.jobs // 2 - start))]
                await submitting.submit(*jobs)
            await until_finished(installation, worker)
        async with installation.connection() as connection:
            seconds = await connection.fetchval(
                "SELECT extract(epoch FROM max(finished_at) - min(created_at))::float8 FROM job"
            )
    return float(scale.jobs // 2 / seconds)


async def _flood(testbed: Testbed, scale: Scale) -> Figure:
    """How long a job of one tenant waits behind ten thousand jobs of another tenant. Each of these holds one of sixteen
    slots for 50 ms.
    """
    waits, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation(pipelines=_PIPELINES) as installation:
            async with submitter(installation) as submitting:
                for _ in range(_FLOOD // 250):
                    await submitting.submit(*(NewJob(napping, "hostile") for _ in range(250)))
                await installation.start_worker(worker_concurrency=_NAP_SLOTS)
                await asyncio.sleep(2)
                quiet_waits = []
                for _ in range(5):
                    quiet = NewJob(napping, "quiet")
                    await submitting.submit(quiet)
                    quiet_waits.append(await _wait_of(installation, quiet.id))
            waits.append(max(quiet_waits))
    return Figure("a quiet tenant's wait beside a flood of 10,000", "s", tuple(waits), tuple(load), Goal(2))


async def _wait_of(installation: Installation, job_id: UUID) -> float:
    async with installation.connection() as connection, asyncio.timeout(60):
        while True:
            seconds = await connection.fetchval(
                "SELECT extract(epoch FROM started_at - created_at)::float8 FROM job WHERE id = $1", job_id
            )
            if seconds is not None:
                return float(seconds)
            await asyncio.sleep(0.05)
