"""`operations`: how fast a bulk operation acts on jobs, how long its batches hold their locks, and what a bulk retry
does to the latency of another tenant's jobs.

The worker's retention deletes meanwhile what a bulk delete has left.
"""

from __future__ import annotations

import asyncio
import os
from uuid import UUID

from bench.figure import Figure, Goal, quantile
from bench.latency import WARM_UP_JOBS, submit_paced, waits_of
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.db.database import Connection, connected
from leasehold.pipelines.operations.pipeline import Action, Operation, bulk_operation
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob

_GOAL_RATE, _GOAL_MS, _GOAL_RATIO = Goal(2000.0, at_least=True), Goal(50.0), Goal(1.5)
_ACTIONS: tuple[Action, ...] = ("retry", "cancel", "delete")
_LOOK_SECONDS = 0.05
_HAS_FINISHED = "finished_at IS NOT NULL FROM job WHERE id = $1"
#: Jobs of an operation, to the jobs of a throughput run.
_TIMES = 5
_PATIENCE_SECONDS = 1800.0

# $1 jobs of one step, made within the last hours; $2 whether they have failed.
_FILL = """
WITH made AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq, params, inputs,
                     output_prefix, error, created_at, finished_at)
    SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000' || lpad(to_hex(g), 12, '0')
           )::uuid, 'acme', 'noop', 1, CASE WHEN $2 THEN 'failed' ELSE 'pending' END, 1, 1, '{}', '{}', 'jobs/' || g,
           CASE WHEN $2 THEN '{"code": "broken", "message": "x", "retryable": false}'::jsonb END, at,
           CASE WHEN $2 THEN at END
    FROM (SELECT g, clock_timestamp() - interval '1 minute' - (($1 - g) * 0.01) * interval '1 second' AS at
          FROM generate_series(1, $1::int) AS g) AS n
    RETURNING id
), runs AS (
    INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id)
    SELECT id, 'acme', 'noop', 1, 'tenant', '' FROM made
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status) SELECT id, 1, 'acme', 'submitted', 'pending' FROM made
)
INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, finished_at)
SELECT id, id, 'acme', 'only', 0, 'default', 1, CASE WHEN $2 THEN 'failed' ELSE 'pending' END, 1,
       CASE WHEN $2 THEN clock_timestamp() END
FROM made
"""


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    figures: list[Figure] = []
    number = _TIMES * scale.jobs
    for action in _ACTIONS:
        rates, longest, load = [], [], []
        for _ in range(scale.runs):
            async with testbed.installation(broker="postgres") as installation:
                await _fill(installation, number, failed=action != "cancel")
                await testbed.checkpoint()
                load.append(os.getloadavg()[0])
                rate, held = await _run(installation, action, number)
            rates.append(rate)
            longest.append(held)
        name = f"a bulk {action} of {number:,} jobs"
        figures += [
            Figure(f"{name}: jobs a second", "jobs/s", tuple(rates), tuple(load), _GOAL_RATE),
            Figure(f"{name}: its longest batch", "ms", tuple(longest), tuple(load), _GOAL_MS),
        ]
    return figures + await _beside_live_traffic(testbed, scale)


async def _beside_live_traffic(testbed: Testbed, scale: Scale) -> list[Figure]:
    number = _TIMES * scale.jobs
    rates, ratios, p99s, load = [], [], [], []
    for _ in range(scale.runs):
        async with testbed.installation(broker="amqp", pipelines="bench.pipelines:benched") as installation:
            await _fill(installation, number, failed=True)
            await testbed.checkpoint()
            load.append(os.getloadavg()[0])
            rate, before, beside = await _run_beside_live_traffic(installation, scale, number)
        rates.append(rate)
        ratios.append(beside / before)
        p99s.append(beside)
    name = f"a bulk retry of {number:,} jobs, whose steps run, beside live traffic"
    return [
        Figure(f"{name}: jobs a second", "jobs/s", tuple(rates), tuple(load), _GOAL_RATE),
        Figure(f"{name}: the traffic's latency, p99", "ms", tuple(p99s), tuple(load)),
        Figure(f"{name}: the traffic's latency, p99, to before", "ratio", tuple(ratios), tuple(load), _GOAL_RATIO),
    ]


async def _run_beside_live_traffic(installation: Installation, scale: Scale, number: int) -> tuple[float, float, float]:
    """The operation's jobs a second, and the p99 of the traffic's latency in milliseconds, before and beside it. One
    worker runs the operation, the retried jobs and the traffic, which is another tenant's. The operation names no rate,
    and so has that of the settings.
    """
    await installation.start_worker()
    async with submitter(installation) as submitting, connected(installation.settings, "bench") as connection:
        await submit_paced(submitting, WARM_UP_JOBS, scale.paced_rate)
        jobs_before = await submit_paced(submitting, scale.paced_jobs, scale.paced_rate)
        operation = await _submit(connection, "retry")
        jobs_beside = await submit_paced(submitting, scale.paced_jobs, scale.paced_rate)
        if await connection.fetchval(f"SELECT {_HAS_FINISHED}", operation):
            raise RuntimeError("the operation ended before the traffic beside it")
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await _until(connection, _HAS_FINISHED, operation)
            await _until(connection, "NOT EXISTS (SELECT 1 FROM job WHERE finished_at IS NULL)")
        seconds = await connection.fetchval(
            "SELECT extract(epoch FROM finished_at - started_at)::float8 FROM job WHERE id = $1", operation
        )
    before, beside = [await waits_of(installation, jobs) for jobs in (jobs_before, jobs_beside)]
    return number / seconds, quantile(before.whole, 0.99), quantile(beside.whole, 0.99)


async def _fill(installation: Installation, number: int, *, failed: bool) -> None:
    async with installation.connection() as unhurried:
        await unhurried.execute(_FILL.replace("$1", str(number)).replace("$2", str(failed)))
        await unhurried.execute("VACUUM ANALYZE")


async def _run(installation: Installation, action: Action, number: int) -> tuple[float, float]:
    """The operation's jobs a second, from its first claim to its end, and the milliseconds of its longest batch."""
    async with connected(installation.settings, "bench") as connection:
        operation = await _submit(connection, action)
        await installation.start_worker(worker_queues="operations", operation_rate=100_000, operation_retry_rate=0)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await _until(connection, _HAS_FINISHED, operation)
        row = await connection.fetchrow(
            "SELECT j.status, (SELECT r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.job_id = j.id),"
            " extract(epoch FROM j.finished_at - j.started_at)::float8 AS seconds FROM job j WHERE j.id = $1",
            operation,
        )
        assert row is not None
        value = row["value"]
        if value is None or (value["acted"], value["refused"]) != (number, 0):
            raise RuntimeError(f"the operation {row['status']}: {value}")
    return number / row["seconds"], float(value["longest_ms"])


async def _until(connection: Connection, condition: str, *values: object) -> None:
    """Ask until the SQL condition holds."""
    while True:
        if await connection.fetchval(f"SELECT {condition}", *values):
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _submit(connection: Connection, action: Action) -> UUID:
    operation = Operation(
        action=action,
        filter="kind:run",
        at=await connection.fetchval("SELECT clock_timestamp()"),
        of_tenant="acme",
        pipelines=(),
        runs=True,
        client_id="bench",
    )
    new = NewJob(bulk_operation, "acme", params=operation.model_dump(mode="json"))
    await jobs.submit(connection, [new])
    return new.id
