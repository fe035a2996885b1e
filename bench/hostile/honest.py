"""The honest tenant, which again and again submits a run that does nothing and waits for its end; and a client that
polls /livez.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

import orjson

from bench.http import Connection, request

#: A run that was refused or lost, or that did not finish in this time, counts with this duration.
PATIENCE_SECONDS = 30.0
_ACCEPTED, _OK = 202, 200
_BETWEEN_RUNS, _BETWEEN_POLLS = 0.025, 0.02


@dataclass(frozen=True, slots=True)
class Duration:
    """The seconds of one run, from its request until the client knows its end. `parts`: the seconds until the answer to
    the POST, from the row to the claim, from the claim to the end, and from the end to the answer that reports it. The
    first two overlap, because the API writes the row before it answers. {}: the run failed.
    """

    seconds: float
    parts: dict[str, float]


#: The names of the parts, in their order.
PARTS = ("POST", "wait for a claim", "attempt", "notice")


async def runs(port: int, key: str, until: float) -> list[Duration]:
    """The durations of one run at least, and of those that begin before `until`."""
    durations: list[Duration] = []
    while not durations or monotonic() < until:
        began = monotonic()
        parts: dict[str, float] | None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                parts = await _run(port, key)
        except (TimeoutError, OSError):
            parts = None
        durations.append(Duration(PATIENCE_SECONDS, {}) if parts is None else Duration(monotonic() - began, parts))
        await asyncio.sleep(_BETWEEN_RUNS)
    return durations


async def _run(port: int, key: str) -> dict[str, float] | None:
    """The parts of one run. None: the run failed."""
    connection = await Connection.open(port)
    try:
        began = monotonic()
        status, body = await connection.send(request("POST", "/v1/runs", key=key, body={"template": "quiet"}))
        posted = monotonic() - began
        if status != _ACCEPTED:
            return None
        path = f"/v1/runs/{orjson.loads(body)['id']}?wait=30"
        while True:
            status, body = await connection.send(request("GET", path, key=key))
            if status != _OK:
                return None
            answer = orjson.loads(body)
            if answer["status"] in ("failed", "cancelled", "expired"):
                return None
            if answer["status"] == "succeeded":
                created, claimed, ended = (
                    _instant(answer[f"{name}_at"]) for name in ("created", "started", "finished")
                )
                seconds = (posted, claimed - created, ended - claimed, time.time() - ended)
                return dict(zip(PARTS, seconds, strict=True))
    finally:
        await connection.close()


def _instant(text: str) -> float:
    """The Unix time of a server's timestamp. The server runs on this machine, so both have one clock."""
    return datetime.fromisoformat(text).timestamp()


async def polls(port: int, until: float) -> list[float]:
    """The seconds of each answer of /livez, of one at least."""
    durations: list[float] = []
    while not durations or monotonic() < until:
        began = monotonic()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                connection = await Connection.open(port)
                try:
                    status, _ = await connection.send(request("GET", "/livez"))
                finally:
                    await connection.close()
        except (TimeoutError, OSError):
            status = 0
        durations.append(monotonic() - began if status == _OK else PATIENCE_SECONDS)
        await asyncio.sleep(_BETWEEN_POLLS)
    return durations
