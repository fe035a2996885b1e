"""`submit`: the requests a second that the API accepts: upload URLs (a row and a signature), runs, and batches of runs.

The API calls no store, and no worker runs: so a figure is the cost of the endpoint and its commit alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic

from bench.figure import Figure, Goal, quantile
from bench.http import Connection, request, until_ready
from bench.processes import Meter
from bench.scale import Scale
from bench.testbed import Testbed
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key

_WARM_UP_SECONDS = 1.0
_RUNS_IN_BATCH = 1000
_ONE_BY_ONE = Goal(2500, at_least=True)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One endpoint to measure. `jobs`: how many one request makes. `processes` of the API share the connections."""

    name: str
    unit: str
    path: str
    body: dict[str, object]
    status: HTTPStatus
    connections: int | None = None
    jobs: int = 1
    goal: Goal | None = None
    processes: int = 1


_ENDPOINTS = (
    _Endpoint("POST /upload-url", "requests/s", "/upload-url",
          {"content_type": "image/jpeg", "file_name": "a.jpg", "content_length": 1000},
          HTTPStatus.CREATED),
    _Endpoint("POST /v1/runs", "runs/s", "/v1/runs", {"template": "noop"}, HTTPStatus.ACCEPTED, goal=_ONE_BY_ONE),
    _Endpoint("POST /v1/runs", "runs/s", "/v1/runs", {"template": "noop"}, HTTPStatus.ACCEPTED, goal=_ONE_BY_ONE,
          processes=2),
    _Endpoint("POST /v1/runs/batch of 1,000", "runs/s", "/v1/runs/batch",
          {"template": "noop", "runs": [{"payload": {}}] * _RUNS_IN_BATCH}, HTTPStatus.ACCEPTED, 2, _RUNS_IN_BATCH,
          Goal(30_000, at_least=True)),
)  # fmt: skip


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [await _figure(testbed, scale, endpoint) for endpoint in _ENDPOINTS]


async def _figure(testbed: Testbed, scale: Scale, endpoint: _Endpoint) -> Figure:
    rates, load, p50s, meters = [], [], [], []
    connections = endpoint.connections or scale.requests_at_once
    for _ in range(scale.runs):
        async with testbed.installation(upload_unfinished_bytes=2**45) as installation:
            ports = [free_port() for _ in range(endpoint.processes)]
            for port in ports:
                await installation.start("api", api_port=port)
            await asyncio.gather(*(until_ready(port) for port in ports))
            async with installation.connection() as connection:
                scopes = ("media:write", "runs:write")
                key = await create_key(connection, tenant_id="bench", client_id="bench", scopes=scopes)
            request_bytes = request("POST", endpoint.path, key=key.text, body=endpoint.body)
            await _send(ports, endpoint, request_bytes, min(_WARM_UP_SECONDS, scale.requests_seconds), connections)
            load.append(os.getloadavg()[0])
            with Meter() as meter:
                durations = await _send(ports, endpoint, request_bytes, scale.requests_seconds, connections)
            rates.append(endpoint.jobs * len(durations) / meter.seconds)
            p50s.append(round(1000 * quantile(durations, 0.5), 2))
            meters.append(meter)
    name = f"submit, {endpoint.name}, {endpoint.processes} API process{'es' if endpoint.processes > 1 else ''}"
    return Figure(name, endpoint.unit, tuple(rates), tuple(load), endpoint.goal, {
        "connections": connections,
        "p50_ms": p50s,
        "cpu_seconds": [meter.by_role for meter in meters],
        "cores_busy_by_others": [meter.others_cores for meter in meters],
    })  # fmt: skip


async def _send(
    ports: Sequence[int], endpoint: _Endpoint, request_bytes: bytes, seconds: float, connections: int
) -> list[float]:
    """The time of each request."""
    until = monotonic() + seconds

    async def repeat(port: int) -> list[float]:
        connection = await Connection.open(port)
        durations = []
        while (began := monotonic()) < until:
            status, body = await connection.send(request_bytes)
            if status != endpoint.status:
                raise RuntimeError(f"{endpoint.name} answered {status}: {body[:200]!r}")
            durations.append(monotonic() - began)
        await connection.close()
        return durations

    by_connection = await asyncio.gather(*(repeat(ports[number % len(ports)]) for number in range(connections)))
    return [seconds for durations in by_connection for seconds in durations]
