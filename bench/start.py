"""`start`: the time from a worker's start to its log line `serving`, with running servers and cached files."""

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

_GOAL = Goal(1)  # at most one second
_POLL_SECONDS = 0.005
_PATIENCE_SECONDS = 60.0
_STOP_SECONDS = 40.0
#: The kinds of work that a worker serves -> the value of LEASEHOLD_WORKER_QUEUES for it.
_WORKERS = {"runs only": "default", "pictures only": "media", "conversions only": "conversion", "everything": ""}


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    seconds_by_name: dict[str, list[float]] = {}
    load = []
    async with testbed.installation() as installation:
        await _start(installation, "")  # once, so that everything is in the page cache
        for _ in range(scale.runs):
            load.append(os.getloadavg()[0])
            seconds_by_name.setdefault("a worker's imports", []).append(await _import_seconds("leasehold.worker.main"))
            for name, queues in _WORKERS.items():
                first, complete = await _start(installation, queues)
                seconds_by_name.setdefault(f"worker of {name}, to serving", []).append(first)
                if name == "everything":
                    seconds_by_name.setdefault(f"worker of {name}, to serving all of it", []).append(complete)
    loads = tuple(load)
    return [
        Figure(f"start, {name}", "s", tuple(seconds), loads, _goal_of(name))
        for name, seconds in seconds_by_name.items()
    ]


def _goal_of(name: str) -> Goal | None:
    """Only the time until a worker serves its first queues has a goal."""
    return _GOAL if name.endswith(", to serving") else None


async def _import_seconds(module: str) -> float:
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import {module}")
    await process.wait()
    return perf_counter() - began


async def _start(installation: Installation, queues: str) -> tuple[float, float]:
    """The seconds until the worker serves some queues, and until it serves all of its queues. The worker logs `serving`
    each time; `later` has the queues that it does not serve yet.
    """
    began = perf_counter()
    server = await installation.start("worker", worker_queues=queues)
    first = await _until_logged(server, lambda line: line["event"] == "serving", began)
    complete = await _until_logged(server, lambda line: line["event"] == "serving" and not line["later"], began)
    await server.stop(signal.SIGTERM, grace=_STOP_SECONDS)
    return first, complete


async def _until_logged(server: Server, is_sign: Callable[[dict[str, object]], bool], began: float) -> float:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not any(is_sign(line) for line in _lines(server)):
            if not server.running:
                raise server.failure("did not start")
            await asyncio.sleep(_POLL_SECONDS)
    return perf_counter() - began


def _lines(server: Server) -> list[dict[str, object]]:
    complete = server.log.read_bytes().split(b"\n")[:-1]
    return [orjson.loads(line) for line in complete if b'"serving"' in line]
