"""`waiting`: how soon one of a thousand external workers, which all wait at one API process, gets a task.

Each worker holds a connection, and asks again when its wait has ended. For comparison, ten waiting workers are
measured.
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
_GOAL = Goal(1.2)
_SHORTEST_CLAIM_SECONDS = 15
_PATIENCE = 60.0
_BETWEEN_SECONDS = 0.1  # runs


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    cpu: dict[str, list[float]] = {"api": [], "postgres": []}
    waits: dict[int, list[list[float]]] = {_FEW: [], scale.waiting: []}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        for workers, found in waits.items():
            async with _crowd(testbed, workers) as crowd:
                await asyncio.sleep(scale.settle_seconds)
                with Meter() as meter:
                    await asyncio.sleep(scale.idle_seconds)
                found.append(await crowd.serve(scale.paced_jobs))
            if workers == scale.waiting:
                for role, spent in cpu.items():
                    spent.append(100 * meter.by_role[role] / meter.seconds)
    many = f"{scale.waiting:,} external workers waiting"
    p50 = {workers: tuple(median(run) for run in runs) for workers, runs in waits.items()}
    ratios = tuple(a / b for a, b in zip(p50[scale.waiting], p50[_FEW], strict=True))
    return [
        *(Figure(f"{many}, {role}, CPU", "% of a core", tuple(spent), tuple(load)) for role, spent in cpu.items()),
        Figure(f"a run's way to one of {scale.waiting:,} that wait, p50", "ms", p50[scale.waiting], tuple(load),
               details={"p99_ms": [round(quantile(run, 0.99), 1) for run in waits[scale.waiting]]}),
        Figure(f"the same, to one of {_FEW}", "ratio", ratios, tuple(load), _GOAL),
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
        wait = (
            _SHORTEST_CLAIM_SECONDS + number % 10
        )  # different waits, because the workers of a real fleet do not return all at once
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
        """The milliseconds of each run from its acceptance to its arrival at a worker."""
        connection = await Connection.open(self._port)
        submitted_at: dict[str, float] = {}
        for _ in range(runs):
            _, body = await connection.send(self._request("/v1/runs", {"template": "outside"}))
            submitted_at[orjson.loads(body)["id"]] = monotonic()
            await asyncio.sleep(_BETWEEN_SECONDS)
        async with asyncio.timeout(_PATIENCE):
            while not submitted_at.keys() <= self._arrived_at.keys():  # noqa: ASYNC110 - they come by hundreds of ways
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
        working = [asyncio.create_task(crowd.work(number)) for number in range(workers)]
        try:
            yield crowd
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


async def _key(installation: Installation) -> str:
    async with installation.connection() as connection:
        scopes = ("runs:write", "external:work")
        return (await create_key(connection, tenant_id="bench", client_id="bench", scopes=scopes)).text
