"""The honest tenant: a run that does nothing, again and again, each waited for; and whoever watches /livez."""

from __future__ import annotations

import asyncio
from time import monotonic

import orjson

from bench.http import Connection, request

#: A run that was refused, lost or is not finished by then counts as this long.
PATIENCE = 30.0
_ACCEPTED, _OK = 202, 200
_BETWEEN_RUNS, _BETWEEN_LOOKS = 0.025, 0.02


async def runs(port: int, key: str, until: float) -> list[float]:
    """Seconds that each took, from asking to knowing that it is done."""
    took = []
    while monotonic() < until:
        began = monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                done = await _run(port, key)
        except (TimeoutError, OSError):
            done = False
        took.append(monotonic() - began if done else PATIENCE)
        await asyncio.sleep(_BETWEEN_RUNS)
    return took


async def _run(port: int, key: str) -> bool:
    connection = await Connection.open(port)
    try:
        status, said = await connection.send(request("POST", "/v1/runs", key=key, body={"template": "quiet"}))
        if status != _ACCEPTED:
            return False
        path = f"/v1/runs/{orjson.loads(said)['id']}?wait=30"
        while True:
            status, said = await connection.send(request("GET", path, key=key))
            if status != _OK:
                return False
            if (state := orjson.loads(said)["status"]) in ("succeeded", "failed", "cancelled", "expired"):
                return bool(state == "succeeded")
    finally:
        await connection.close()


async def looks(port: int, until: float) -> list[float]:
    """Seconds that each answer of /livez took."""
    took = []
    while monotonic() < until:
        began = monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                connection = await Connection.open(port)
                try:
                    status, _ = await connection.send(request("GET", "/livez"))
                finally:
                    await connection.close()
        except (TimeoutError, OSError):
            status = 0
        took.append(monotonic() - began if status == _OK else PATIENCE)
        await asyncio.sleep(_BETWEEN_LOOKS)
    return took
