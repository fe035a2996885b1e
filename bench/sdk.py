"""`sdk`: the cost of an app's tasks and workflows: steps a second, the time until a client has a result, the time of a
resume, and the cost of sleeping workflows.

If the package of DBOS can be installed, DBOS runs the same number of steps in the same round.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from statistics import median
from time import monotonic
from typing import Any

import asyncpg

from bench import sdk_app
from bench.figure import Figure, Goal, quantile
from bench.jobs import now, until_finished
from bench.peers.measure import environment_of, run_driver
from bench.peers.peer import PEERS
from bench.processes import Meter, main_processes_of, resident_bytes
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.pipelines.demo.pipeline import noop
from leasehold.transitions.jobs import NewJob

_APP = "bench.sdk_app:app"
#: How many workflows run at once: enough to keep the batchers full.
_AT_ONCE = 64
_CHECKPOINTS = Goal(3000, at_least=True)
_CHILDREN = Goal(1500, at_least=True)
_RESUME_MS = Goal(200)
_RATIO = Goal(1.3)
_MEMORY_MB = Goal(64)
_CPU_PERCENT = Goal(1)
_WAKES = Goal(500, at_least=True)
_LATENESS_SECONDS = Goal(2)
_PIECE = 5000
_DBOS = next(peer for peer in PEERS if peer.name == "dbos")
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 600.0
_WAITING = "SELECT count(*) FROM task WHERE status = 'waiting'"
_WOKEN = "SELECT count(*) FROM job WHERE finished_at IS NOT NULL"


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    rounds: dict[str, list[float]] = {}
    load: list[float] = []
    broken: list[str] = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with _serving(testbed) as installation:
            for name, value in (await _steps(installation, scale)).items():
                rounds.setdefault(name, []).append(value)
        async with _serving(testbed) as installation:
            for name, value in (await _result(installation, scale)).items():
                rounds.setdefault(name, []).append(value)
        async with _serving(testbed, workflow_memory=0) as installation:
            rounds.setdefault("resume", []).append(await _resume(installation, scale))
        if _DBOS.name in scale.peers:
            try:
                for name, value in (await _dbos(testbed, scale)).items():
                    rounds.setdefault(name, []).append(value)
            except (RuntimeError, TimeoutError) as error:
                broken.append(f"{type(error).__name__}: {error}"[:500])
    asleep = [await _asleep(testbed, scale) for _ in range(scale.runs)]
    return [*_figures(rounds, tuple(load), scale, broken), *_figures_asleep(asleep, tuple(load), scale)]


def _figures(
    rounds: dict[str, list[float]], load: tuple[float, ...], scale: Scale, broken: Sequence[str]
) -> list[Figure]:
    no_rates = (0.0,) * scale.runs

    def figure(key: str, name: str, unit: str, goal: Goal | None = None) -> Figure:
        return Figure(name, unit, tuple(rounds[key]), load, goal)

    def dbos_figure(key: str, name: str, unit: str) -> Figure:
        details = {"broken": list(broken)} if broken else {}
        return Figure(name, unit, no_rates if broken else tuple(rounds[key]), load, None, details)

    ratios = tuple(a / b for a, b in zip(rounds["task"], rounds["bare"], strict=True))
    return [
        figure("checkpoints", "sdk, checkpoints of workflows (ctx.call), 1 worker", "steps/s", _CHECKPOINTS),
        figure("children", "sdk, steps of workflows one after another (ctx.run), 1 worker", "steps/s", _CHILDREN),
        figure("gathered", "sdk, steps of one ctx.gather, 1 worker", "steps/s", _CHILDREN),
        figure("task", "sdk, a task from its row to its end, p50", "ms"),
        Figure("the same, to a bare pipeline's", "ratio", ratios, load, _RATIO),
        figure("way", "sdk, submit to result of a task, p50", "ms"),
        figure("resume", f"sdk, a workflow of {scale.workflow_calls:,} calls resumes after a signal", "ms", _RESUME_MS),
        *(
            [
                dbos_figure("dbos_steps", "sdk, DBOS, steps of workflows, 1 process", "steps/s"),
                dbos_figure("dbos_way", "sdk, DBOS, start of a workflow to its result, p50", "ms"),
            ]
            if _DBOS.name in scale.peers
            else []
        ),
    ]


@asynccontextmanager
async def _serving(testbed: Testbed, **settings: object) -> AsyncIterator[Installation]:
    async with testbed.installation(broker="amqp", pipelines=_APP, tenant="bench", **settings) as installation:
        await installation.start_worker()
        sdk_app.app.use(installation.settings)
        try:
            yield installation
        finally:
            await asyncio.to_thread(sdk_app.app.close)


# --- steps


async def _steps(installation: Installation, scale: Scale) -> dict[str, float]:
    steps_each = max(scale.workflow_steps // _AT_ONCE, 1)
    await _rate(installation, [sdk_app.children.call(steps=2) for _ in range(8)], 16)  # warm
    calls = [sdk_app.checkpoints.call(calls=steps_each) for _ in range(_AT_ONCE)]
    steps = [sdk_app.children.call(steps=steps_each) for _ in range(_AT_ONCE)]
    many = [sdk_app.spread.call(steps=scale.workflow_steps)]
    return {
        "checkpoints": await _rate(installation, calls, steps_each * _AT_ONCE),
        "children": await _rate(installation, steps, steps_each * _AT_ONCE),
        "gathered": await _rate(installation, many, scale.workflow_steps),
    }


async def _rate(installation: Installation, calls: Sequence[Any], steps: int) -> float:
    """Steps a second, from the first claim of the runs to their last end, by PostgreSQL's clock."""
    since = await now(installation)
    await calls[0].task.asubmit_many(calls)
    await until_finished(installation)
    async with installation.connection() as connection:
        seconds: float = await connection.fetchval(
            "SELECT extract(epoch FROM max(finished_at) - min(started_at))::float8 FROM job WHERE created_at > $1",
            since,
        )
    return steps / seconds


# --- a result's way


async def _result(installation: Installation, scale: Scale) -> dict[str, float]:
    """Submit a task and a bare pipeline in turns, at a steady pace. The client's clock measures the task's result."""
    result_ms: list[float] = []
    async with submitter(installation) as submitting:
        for number in range(scale.paced_jobs):
            began = monotonic()
            await (await sdk_app.nothing.asubmit())
            if number >= scale.paced_jobs // 10:
                result_ms.append(1000 * (monotonic() - began))
            await submitting.submit(NewJob(noop, "bench"))
            await asyncio.sleep(1 / scale.paced_rate)
        await until_finished(installation)
    async with installation.connection() as connection:
        rows = await connection.fetch(
            "SELECT pipeline, 1000 * extract(epoch FROM finished_at - created_at)::float8 AS ms FROM job ORDER BY id"
        )
    milliseconds_by_pipeline = {
        name: [row["ms"] for row in rows if row["pipeline"] == name] for name in ("sdk.nothing", noop.name)
    }
    task, bare = (median(measured[len(measured) // 10 :]) for measured in milliseconds_by_pipeline.values())
    return {"task": task, "bare": bare, "way": median(result_ms)}


# --- a resume


async def _resume(installation: Installation, scale: Scale) -> float:
    """The milliseconds from the signal to the end of the run. The worker has kept no coroutine, so it reads the whole
    journal.
    """
    run = await sdk_app.long.asubmit(calls=scale.workflow_calls)
    async with installation.connection() as connection:
        await _until(connection, _WAITING, 1)
        await run.asignal("go")
        await run.awaited(60)
        milliseconds: float = await connection.fetchval(
            "SELECT 1000 * extract(epoch FROM j.finished_at - (l.value ->> 'at')::timestamptz)::float8"
            " FROM job j JOIN journal l ON l.job_id = j.id WHERE l.kind = 'signal'"
        )
    return milliseconds


# --- those that sleep


async def _asleep(testbed: Testbed, scale: Scale) -> dict[str, float]:
    async with _serving(testbed) as installation:
        (worker,) = main_processes_of("worker")
        await _sleepers(installation, min(scale.asleep, 200))
        before, cpu_of_few = resident_bytes(worker), await _cpu(testbed, installation, scale)
        await _sleepers(installation, scale.asleep)
        memory = (resident_bytes(worker) - before) / 1e6
        cpu = await _cpu(testbed, installation, scale) - cpu_of_few
        return {"memory": memory, "cpu": cpu, **await _woken(installation, scale)}


async def _cpu(testbed: Testbed, installation: Installation, scale: Scale) -> float:
    """The CPU of the worker and PostgreSQL, in percent of a core, while all workflows sleep. Vacuum and checkpoint run
    before, because new rows need them only once.
    """
    async with installation.connection() as connection:
        await connection.execute("VACUUM (ANALYZE)", timeout=_PATIENCE_SECONDS)
    await testbed.checkpoint()
    await asyncio.sleep(scale.settle_seconds)
    with Meter() as meter:
        await asyncio.sleep(scale.idle_seconds)
    return 100 * (meter.by_role["worker"] + meter.by_role["postgres"]) / meter.seconds


async def _sleepers(installation: Installation, count: int) -> None:
    """Start `count` further workflows, and wait until they sleep."""
    for first in range(0, count, _PIECE):
        await sdk_app.sleeper.asubmit_many([sdk_app.sleeper.call() for _ in range(min(_PIECE, count - first))])
    async with installation.connection() as connection:
        await _until(connection, _WAITING, await connection.fetchval("SELECT count(*) FROM task"))


async def _until(connection: asyncpg.Connection[asyncpg.Record], query: str, count: int) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while await connection.fetchval(query) < count:  # noqa: ASYNC110 - PostgreSQL has no event for it
            await asyncio.sleep(_POLL_SECONDS)


async def _woken(installation: Installation, scale: Scale) -> dict[str, float]:
    """Let further workflows wake beside the sleeping ones: first at twice the goal's rate, to measure how many wake a
    second; after a pause half as many at the goal's rate, to measure how late they end.
    """
    began = await now(installation)
    lead, burst = scale.wake_lead_seconds, scale.woken / (2 * _WAKES.value)
    later = lead + burst + scale.wake_pause_seconds
    delays = [lead + burst * number / scale.woken for number in range(scale.woken)]
    delays += [later + number / _WAKES.value for number in range(scale.woken // 2)]
    for first in range(0, len(delays), _PIECE):
        await sdk_app.sleeper.asubmit_many(
            [sdk_app.sleeper.call(at=began + timedelta(seconds=delay)) for delay in delays[first : first + _PIECE]]
        )
    async with installation.connection() as connection:
        await _until(connection, _WOKEN, len(delays))
        rows = await connection.fetch(
            "SELECT extract(epoch FROM j.finished_at - l.due_at)::float8 AS late, j.finished_at FROM job j"
            " JOIN journal l ON l.job_id = j.id WHERE j.finished_at IS NOT NULL ORDER BY l.due_at"
        )
    ends, late = [row["finished_at"] for row in rows[: scale.woken]], [row["late"] for row in rows[scale.woken :]]
    return {"wakes": (len(ends) - 1) / (max(ends) - min(ends)).total_seconds(), "late": quantile(late, 0.99)}


def _figures_asleep(rounds: Sequence[dict[str, float]], load: tuple[float, ...], scale: Scale) -> list[Figure]:
    def values_of(key: str) -> tuple[float, ...]:
        return tuple(measured[key] for measured in rounds)

    name = f"sdk, {scale.asleep:,} workflows asleep"
    return [
        Figure(f"{name}, the worker's memory for them", "MB", values_of("memory"), load, _MEMORY_MB),
        Figure(
            f"{name}, worker and postgres, CPU, above that of 200", "% of a core", values_of("cpu"), load, _CPU_PERCENT
        ),
        Figure(f"{name}, {scale.woken:,} wake", "runs/s", values_of("wakes"), load, _WAKES),
        Figure(
            f"{name}, {_WAKES.value:g} wake a second, how late, p99", "s", values_of("late"), load, _LATENESS_SECONDS
        ),
    ]


# --- DBOS


async def _dbos(testbed: Testbed, scale: Scale) -> dict[str, float]:
    """Run the driver of DBOS, which prints its measurements as a line of JSON. Raises RuntimeError or TimeoutError."""
    python = str(await _DBOS.environment())
    async with testbed.installation() as installation:
        environment = environment_of(installation)
        steps_each = max(scale.workflow_steps // _AT_ONCE, 1)
        printed = await run_driver(
            python, _DBOS, ["sdk", str(_AT_ONCE), str(steps_each), str(scale.paced_jobs)], environment
        )
    measured: dict[str, float] = json.loads(printed.splitlines()[-1])
    return measured
