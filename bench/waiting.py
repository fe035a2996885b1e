"""`waiting`: how soon a run reaches one of a thousand external workers that all wait at one API process.

Each worker holds a connection, and asks for a task again when its wait has ended. Ten waiting workers are measured in
turns with the thousand, for comparison.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from statistics import median
from time import monotonic

import orjson

from bench.figure import Figure, Goal, quantile
from bench.http import Connection, request, until_ready
from bench.processes import Meter
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key

_FEW = 10
#: The delay of a run beside many workers that wait, as a multiple of its delay beside a few.
_RATIO_GOAL = Goal(1.2)
#: The shortest wait of a claim. The workers' waits differ, because the workers of a fleet do not all return at once.
_SHORTEST_WAIT_SECONDS = 15
_PATIENCE_SECONDS = 60.0
#: The pause between two runs, and between two looks at their arrivals.
_BETWEEN_SECONDS = 0.1


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    cpu_percent: dict[str, list[float]] = {"api": [], "postgres": []}  # while the many workers wait
    delays: dict[int, list[list[float]]] = {_FEW: [], scale.waiting: []}  # workers -> the delays of each measurement
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        for workers, measured in delays.items():
            async with _crowd(testbed, workers) as crowd:
                await asyncio.sleep(scale.settle_seconds)
                with Meter() as meter:
                    await asyncio.sleep(scale.idle_seconds)
                measured.append(await crowd.serve(scale.paced_jobs))
            if workers == scale.waiting:
                for role, percents in cpu_percent.items():
                    percents.append(100 * meter.by_role[role] / meter.seconds)
    p50 = {workers: tuple(median(run) for run in runs) for workers, runs in delays.items()}
    ratios = tuple(many / few for many, few in zip(p50[scale.waiting], p50[_FEW], strict=True))
    return [
        *(
            Figure(f"{scale.waiting:,} external workers waiting, {role}, CPU", "% of a core", tuple(percents),
                   tuple(load))
            for role, percents in cpu_percent.items()
        ),
        Figure(f"a run's way to one of {scale.waiting:,} that wait, p50", "ms", p50[scale.waiting], tuple(load),
               details={"p99_ms": [round(quantile(run, 0.99), 1) for run in delays[scale.waiting]]}),
        Figure(f"the same, to one of {_FEW}", "ratio", ratios, tuple(load), _RATIO_GOAL),
    ]  # fmt: skip


class _Crowd:
    """Many external workers at one API."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._arrived_at: dict[str, float] = {}  # run -> when a worker got its task

    async def work(self, number: int) -> None:
        """Work as one external worker: ask for a task, note its arrival, complete it, ask again."""
        connection = await Connection.open(self._port)
        worker = {"worker_id": f"bench-{number}"}
        wait = _SHORTEST_WAIT_SECONDS + number % 10
        claim_request = self._request("/v1/external/claim", worker | {"queues": ["outside"], "wait": wait})
        try:
            while True:
                status, body = await connection.send(claim_request)
                if status != 200:  # noqa: PLR2004 - an HTTP status
                    raise RuntimeError(f"claim answered {status}: {body[:200]!r}")
                for task in orjson.loads(body)["tasks"]:
                    self._arrived_at[task["run_id"]] = monotonic()
                    path = f"/v1/external/tasks/{task['task_id']}/complete"
                    await connection.send(self._request(path, worker | {"epoch": task["epoch"]}))
        finally:
            with suppress(OSError):  # the API may have ended first
                await connection.close()

    async def serve(self, runs: int) -> list[float]:
        """Submit `runs` runs. Returns the milliseconds of each run from its acceptance to its arrival at a worker."""
        connection = await Connection.open(self._port)
        submitted_at: dict[str, float] = {}
        for _ in range(runs):
            _, body = await connection.send(self._request("/v1/runs", {"template": "outside"}))
            submitted_at[orjson.loads(body)["id"]] = monotonic()
            await asyncio.sleep(_BETWEEN_SECONDS)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not submitted_at.keys() <= self._arrived_at.keys():  # noqa: ASYNC110 - many workers note the arrivals
                await asyncio.sleep(_BETWEEN_SECONDS)
        await connection.close()
        return [1000 * (self._arrived_at[run] - at) for run, at in submitted_at.items()]

    def _request(self, path: str, body: object) -> bytes:
        return request("POST", path, key=self._key, body=body)


@asynccontextmanager
async def _crowd(testbed: Testbed, workers: int) -> AsyncIterator[_Crowd]:
    async with testbed.installation(broker="postgres", pipelines="bench.pipelines:benched") as installation:
        port = free_port()
        await installation.start("api", api_port=port)
        await until_ready(port)
        crowd = _Crowd(port, await _key(installation))
        async with asyncio.TaskGroup() as group:  # the first worker that fails ends the measurement with its error
            working = [group.create_task(crowd.work(number)) for number in range(workers)]
            yield crowd
            for task in working:
                task.cancel()


async def _key(installation: Installation) -> str:
    async with installation.connection() as connection:
        scopes = ("runs:write", "external:work")
        return (await create_key(connection, tenant_id="bench", client_id="bench", scopes=scopes)).text
