"""`generation`: one worker polls 100,000 tasks that wait for their provider, beside an API that gets requests.

The bench writes the waiting rows as a poll would leave them, due at an even rate. The platform does all else. The
provider is the tests' simulator, in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import orjson

from bench.figure import Figure, Goal, quantile
from bench.http import Connection, request, until_ready
from bench.processes import main_processes_of, resident_bytes
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key

_ROOT = Path(__file__).parents[1]
_MIB = 1024 * 1024
_ORDERS_A_SECOND = 20.0
_PATIENCE_SECONDS = 60.0
_CREDENTIAL = "r8_token-of-the-tests"

# $1: the number of tasks. $2: polls a second. $3: seconds until the first poll. $4: the pipeline's parameters.
_FILL = """
WITH n AS MATERIALIZED (
    SELECT i, gen_random_uuid() AS job, gen_random_uuid() AS submit, gen_random_uuid() AS poll,
           gen_random_uuid() AS store, clock_timestamp() + make_interval(secs => $3 + i / $2) AS due
    FROM generate_series(0, $1 - 1) AS i
), jobs AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, priority, steps_left, event_seq, params, inputs,
                     output_prefix, started_at, deadline_at, keep_seconds)
    SELECT job, 'bench', 'generation', 1, 'running', 1, 2, 1, $4::jsonb, '{}', 'jobs/' || job, clock_timestamp(),
           clock_timestamp() + interval '1 day', 86400 FROM n
), tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
                      max_attempts, attempt, epoch, available_at, finished_at)
    SELECT submit, job, 'bench', 'submit', 0, 'generation', 1, 'succeeded', 0, ARRAY[poll], 4, 1, 1,
           clock_timestamp(), clock_timestamp() FROM n
    UNION ALL
    SELECT poll, job, 'bench', 'poll', 1, 'generation', 1, 'waiting', 0, ARRAY[store], 4, 0, 1, due, NULL FROM n
    UNION ALL
    SELECT store, job, 'bench', 'store', 2, 'generation', 1, 'blocked', 1, '{}', 4, 0, 0, due, NULL FROM n
), notes AS (
    INSERT INTO note (task_id, value)
    SELECT poll, jsonb_build_object('ref', 'w' || i, 'submitted_at', '2026-01-01T00:00:00+00:00', 'misses', 0) FROM n
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT job, 1, 'bench', 'parked', 'running', poll, 'poll', 'waiting', 1, jsonb_build_object('until', due) FROM n
)
INSERT INTO generation (job_id, tenant_id, task_id, kind, server_id, request_hash)
SELECT job, 'bench', 'w' || i, 'image', 'default', '' FROM n
"""

_LATENESS = """
SELECT extract(epoch FROM c.at - (p.data ->> 'until')::timestamptz)::float8 AS seconds, c.at
FROM event c JOIN event p ON p.job_id = c.job_id AND p.seq = c.seq - 1
WHERE c.kind = 'claimed' AND c.step = 'poll' AND p.kind = 'parked' AND p.tenant_id = 'bench'
"""

_SUBMITTED = """
SELECT extract(epoch FROM t.finished_at - j.created_at)::float8 AS seconds
FROM job j JOIN task t ON t.job_id = j.id WHERE t.step = 'submit' AND j.tenant_id = 'orders'
"""

_POLLED = "SELECT EXISTS (SELECT FROM event WHERE kind = 'claimed' AND step = 'poll' AND tenant_id = 'bench')"

_UNSUBMITTED = "SELECT count(*) FROM task WHERE step = 'submit' AND tenant_id = 'orders' AND finished_at IS NULL"


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    runs, load = [], []
    for _ in range(scale.runs):
        async with _simulated() as url, testbed.installation(**_settings(url)) as installation:
            await _fill(installation, scale)
            load.append(os.getloadavg()[0])
            runs.append(await _run(installation, scale))

    def figure(name: str, unit: str, goal: Goal | None) -> Figure:
        return Figure(f"generation, {name}", unit, tuple(run[name] for run in runs), tuple(load), goal)

    return [
        figure("polls a second", "polls/s", None),
        figure("lateness of a poll, p99", "ms", Goal(2000)),
        figure("order to the provider's yes, p99", "ms", Goal(1000)),
        figure("query, p99", "ms", Goal(20)),
        figure("worker, resident", "MiB", Goal(512)),
    ]


def _settings(url: str) -> dict[str, object]:
    task_url = f"{url}/gateway/tasks/{{ref}}"
    headers = {"x-key": "{credential}"}
    providers = [{
        "name": "gateway", "urls": "/data/urls", "separator": ",", "ref": "/data/task", "status": "/data/state",
        "statuses": {"working": "working", "made": "made", "failed": "failed"}, "token_header": "idempotency-key",
        "submit": {"url": f"{url}/gateway/tasks", "headers": headers, "body": {"prompt": "{prompt}", "kind": "{kind}"}},
        "poll": {"method": "GET", "url": task_url, "headers": headers},
    }]  # fmt: skip
    return {
        "egress_allow": "127.0.0.0/8",
        "generation_provider": "gateway",
        "generation_http_providers": orjson.dumps(providers).decode(),
        "generation_credentials": orjson.dumps({"gateway": _CREDENTIAL}).decode(),
        "generation_per_server": 0,
        "worker_queues": "generation",
    }


@asynccontextmanager
async def _simulated() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.generation.simulator", cwd=_ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def _fill(installation: Installation, scale: Scale) -> None:
    params = {
        "kind": "image", "provider": "gateway", "prompt": "#never", "deadline_at": "2099-01-01T00:00:00Z",
        "poll_seconds": scale.generations / scale.polls_a_second,
    }  # fmt: skip
    async with installation.connection() as connection:
        params_json = orjson.dumps(params).decode()
        await connection.execute(
            _FILL, scale.generations, scale.polls_a_second, scale.generation_head_start, params_json, timeout=300
        )
        await connection.execute("VACUUM ANALYZE")


async def _run(installation: Installation, scale: Scale) -> dict[str, float]:
    port = free_port()
    await installation.start("api", api_port=port)
    worker = await installation.start_worker()
    await until_ready(port)
    async with (
        installation.connection() as connection,
        asyncio.timeout(scale.generation_head_start + _PATIENCE_SECONDS),
    ):
        while not await connection.fetchval(_POLLED):  # noqa: ASYNC110 - PostgreSQL has no event for it
            await asyncio.sleep(0.1)
    queries = await _order_and_query(installation, port, scale.generation_seconds)
    if not worker.running:
        raise worker.failure("ended in the middle of a measurement")
    resident = max(resident_bytes(pid) for pid in main_processes_of("worker"))
    async with installation.connection() as connection:
        polls = await connection.fetch(_LATENESS)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while await connection.fetchval(_UNSUBMITTED):  # noqa: ASYNC110 - PostgreSQL has no event for it
                await asyncio.sleep(0.1)
        submitted = [row["seconds"] for row in await connection.fetch(_SUBMITTED)]
    lateness, at = [row["seconds"] for row in polls], [row["at"] for row in polls]
    return {
        "polls a second": len(polls) / (max(at) - min(at)).total_seconds(),
        "lateness of a poll, p99": 1000 * quantile(lateness, 0.99),
        "order to the provider's yes, p99": 1000 * quantile(submitted, 0.99),
        "query, p99": 1000 * quantile(queries, 0.99),
        "worker, resident": resident / _MIB,
    }


async def _order_and_query(installation: Installation, port: int, seconds: float) -> list[float]:
    """Order at an even pace, and query in between. Returns the seconds of each query."""
    async with installation.connection() as connection:
        scopes = ("generation:write", "generation:read")
        key = await create_key(connection, tenant_id="orders", client_id="bench", scopes=scopes)
    http = await Connection.open(port)
    query_seconds = []
    until = monotonic() + seconds
    number = 0
    while monotonic() < until:
        body = {"prompt": "a cat", "task_id": f"o{number}"}
        status, answer = await http.send(request("POST", "/v1/images/generations", key=key.text, body=body))
        if status != 202:  # noqa: PLR2004 - HTTP statuses
            raise RuntimeError(f"an order was answered {status}: {answer[:200]!r}")
        began = monotonic()
        await http.send(request("GET", f"/v1/images/query?task_id=o{number // 2}", key=key.text))
        query_seconds.append(monotonic() - began)
        number += 1
        await asyncio.sleep(1 / _ORDERS_A_SECOND)
    await http.close()
    return query_seconds
