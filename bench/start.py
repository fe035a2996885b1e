"""`start`: from a worker's fork to its `serving`, on servers that are up and with files that are cached."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from time import perf_counter

import orjson

from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.process import Server

_GOAL = Goal(1)
_LOOK_SECONDS = 0.005
_PATIENCE_SECONDS = 60.0
_STOP_SECONDS = 40.0
#: What a worker serves -> its setting, and whether all of that is served.
_WORKERS = {"runs only": "default", "pictures only": "media", "conversions only": "conversion", "everything": ""}


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    found: dict[str, list[float]] = {}
    load = []
    async with testbed.installation() as installation:
        await _start(installation, "")  # once, so that everything is in the page cache
        for _ in range(scale.runs):
            load.append(os.getloadavg()[0])
            found.setdefault("a worker's imports", []).append(await _importing("leasehold.worker.main"))
            for name, queues in _WORKERS.items():
                first, whole = await _start(installation, queues)
                found.setdefault(f"worker of {name}, to serving", []).append(first)
                if name == "everything":
                    found.setdefault(f"worker of {name}, to serving all of it", []).append(whole)
    loads = tuple(load)
    return [
        Figure(f"start, {name}", "s", tuple(times), loads, None if "all of it" in name or "imports" in name else _GOAL)
        for name, times in found.items()
    ]


async def _importing(module: str) -> float:
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import {module}")
    await process.wait()
    return perf_counter() - began


async def _start(installation: Installation, queues: str) -> tuple[float, float]:
    """Seconds until it serves something, and until it serves all that it was told to."""
    began = perf_counter()
    server = await installation.start("worker", worker_queues=queues)
    first = await _said(server, lambda line: line["event"] == "serving", began)
    whole = await _said(server, lambda line: line["event"] == "serving" and not line["later"], began)
    await server.stop(signal.SIGTERM, grace=_STOP_SECONDS)
    return first, whole


async def _said(server: Server, wanted: Callable[[dict[str, object]], bool], began: float) -> float:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not any(wanted(line) for line in _lines(server)):
            if not server.running:
                raise server.failure("did not start")
            await asyncio.sleep(_LOOK_SECONDS)
    return perf_counter() - began


def _lines(server: Server) -> list[dict[str, object]]:
    whole = server.log.read_bytes().split(b"\n")[:-1]
    return [orjson.loads(line) for line in whole if b'"serving"' in line]
