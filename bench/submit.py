"""`submit`: POST /upload-url a second, against one API process: a row and a signed URL each, no call to the store."""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus
from time import monotonic

from bench.figure import Figure, quantile
from bench.http import Connection, request, until_ready
from bench.processes import Meter
from bench.scale import Scale
from bench.stand import Stand
from embedded.ports import free_port
from leasehold.credentials import create_key

_WARM_UP_SECONDS = 1.0


async def measure(stand: Stand, scale: Scale) -> list[Figure]:
    rates, load, p50s, meters = [], [], [], []
    for _ in range(scale.runs):
        async with stand.installation() as installation:
            port = free_port()
            await installation.start("api", api_port=port)
            await until_ready(port)
            async with installation.connection() as connection:
                key = await create_key(connection, tenant_id="bench", client_id="bench", scopes=("media:write",))
            asked = request(
                "POST", "/upload-url", key=key.text, body={"content_type": "image/jpeg", "file_name": "a.jpg"}
            )
            await _send(port, asked, min(_WARM_UP_SECONDS, scale.requests_seconds), scale.requests_at_once)
            load.append(os.getloadavg()[0])
            with Meter() as meter:
                took = await _send(port, asked, scale.requests_seconds, scale.requests_at_once)
            rates.append(len(took) / meter.seconds)
            p50s.append(round(1000 * quantile(took, 0.5), 2))
            meters.append(meter)
    return [
        Figure("submit, POST /upload-url, 1 API process", "requests/s", tuple(rates), tuple(load), None, {
            "connections": scale.requests_at_once,
            "p50_ms": p50s,
            "cpu_seconds": [meter.by_role for meter in meters],
            "cores_busy_by_others": [meter.others_cores for meter in meters],
        })
    ]  # fmt: skip


async def _send(port: int, asked: bytes, seconds: float, connections: int) -> list[float]:
    """How long each request took."""
    until = monotonic() + seconds

    async def repeat() -> list[float]:
        connection = await Connection.open(port)
        took = []
        while (began := monotonic()) < until:
            status, body = await connection.send(asked)
            if status != HTTPStatus.CREATED:
                raise RuntimeError(f"POST /upload-url answered {status}: {body[:200]!r}")
            took.append(monotonic() - began)
        await connection.close()
        return took

    return [one for took in await asyncio.gather(*(repeat() for _ in range(connections))) for one in took]
