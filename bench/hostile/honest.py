"""The honest tenant: a run that does nothing, again and again, each waited for; and whoever watches /livez."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

import orjson

from bench.http import Connection, request

#: A run that was refused, lost or is not finished by then counts as this long.
PATIENCE = 30.0
_ACCEPTED, _OK = 202, 200
_BETWEEN_RUNS, _BETWEEN_LOOKS = 0.025, 0.02


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one run, from asking to knowing that it is done. `parts`: of them, until its POST was answered, from
    its row to its claim, from its claim to its end, and from its end to the answer that tells of it. The first two
    overlap: the row is written before the answer. Empty for a run that failed.
    """

    seconds: float
    parts: dict[str, float]


#: What a run's time is made of, in their order.
PARTS = ("POST", "wait for a claim", "attempt", "notice")


async def runs(port: int, key: str, until: float) -> list[Took]:
    took = []
    while monotonic() < until:
        began = monotonic()
        parts: dict[str, float] | None
        try:
            async with asyncio.timeout(PATIENCE):
                parts = await _run(port, key)
        except (TimeoutError, OSError):
            parts = None
        took.append(Took(PATIENCE, {}) if parts is None else Took(monotonic() - began, parts))
        await asyncio.sleep(_BETWEEN_RUNS)
    return took


async def _run(port: int, key: str) -> dict[str, float] | None:
    """The run's parts; None: it failed."""
    connection = await Connection.open(port)
    try:
        began = monotonic()
        status, said = await connection.send(request("POST", "/v1/runs", key=key, body={"template": "quiet"}))
        posted = monotonic() - began
        if status != _ACCEPTED:
            return None
        path = f"/v1/runs/{orjson.loads(said)['id']}?wait=30"
        while True:
            status, said = await connection.send(request("GET", path, key=key))
            if status != _OK:
                return None
            answer = orjson.loads(said)
            if answer["status"] in ("failed", "cancelled", "expired"):
                return None
            if answer["status"] == "succeeded":
                made, claimed, ended = (_instant(answer[f"{name}_at"]) for name in ("created", "started", "finished"))
                seconds = (posted, claimed - made, ended - claimed, time.time() - ended)
                return dict(zip(PARTS, seconds, strict=True))
    finally:
        await connection.close()


def _instant(text: str) -> float:
    """By the clock of the server, which runs on this machine."""
    return datetime.fromisoformat(text).timestamp()


async def polls(port: int, until: float) -> list[float]:
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
