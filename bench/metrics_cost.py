"""`metrics`: the cost of metrics: the time of a scrape of the process with the longest page, in a fleet of a hundred
workers; and the share of the drain's throughput that counting takes.

Only one worker of the fleet is real, and the other ninety-nine are rows in the registry: on two cores a hundred
processes would disturb each other. The real worker is the elected exporter, whose page is the longest. `details` has
the size of a hundred such pages.
"""

from __future__ import annotations

import asyncio
import os
import timeit
from contextlib import ExitStack
from statistics import mean, median
from time import perf_counter
from uuid import uuid4

from bench.figure import Figure, Goal
from bench.http import Connection, request
from bench.jobs import now, seconds_of, until_finished
from bench.processes import Meter, main_processes_of, paused
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.db.database import connect
from leasehold.embedded.ports import free_port
from leasehold.exporter.exporter import EVERY_SECONDS
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.pipelines.demo.pipeline import noop
from leasehold.transitions import workers
from leasehold.transitions.endings import JobEnded
from leasehold.worker import metrics

_FLEET = 100
_SCRAPES = 20
_QUEUES = ("default", "media", "conversion", "generation")
_MILLISECONDS = Goal(50)
_KILOBYTES = Goal(500)
_PERCENT = Goal(2)
#: With metrics and without: the name, and the setting.
_CASES = (("on", True), ("off", False))
#: The line of the exporter's page once it has read the whole fleet.
_WHOLE_FLEET = f'leasehold_workers{{state="serving"}} {_FLEET}.0'.encode()


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [*await _scrapes(testbed, scale), *await _cost(testbed, scale)]


async def _scrapes(testbed: Testbed, scale: Scale) -> list[Figure]:
    times, sizes, loads = [], [], []
    for _ in range(scale.runs):
        async with testbed.installation(broker="amqp") as installation:
            loads.append(os.getloadavg()[0])
            milliseconds, size = await _scrape(installation, scale)
            times.append(milliseconds)
            sizes.append(size / 1000)
    fleet = {"kilobytes_of_all_targets": round(median(sizes) * _FLEET), "workers": _FLEET}
    return [
        Figure("scrape of the elected exporter, 100 workers", "ms", tuple(times), tuple(loads), _MILLISECONDS),
        Figure("its page, 100 workers", "kB", tuple(sizes), tuple(loads), _KILOBYTES, fleet),
    ]


async def _scrape(installation: Installation, scale: Scale) -> tuple[float, int]:
    """The median milliseconds and the bytes of a scrape, after jobs have run and the exporter has read the fleet."""
    port = free_port()
    worker = await installation.start_worker(metrics_port=port)
    await _register(installation, _FLEET - 1)
    async with submitter(installation) as submitting:
        await submitting.fill(noop, scale.warm_up_jobs)
        await until_finished(installation, worker)
    async with asyncio.timeout(12 * EVERY_SECONDS):
        while _WHOLE_FLEET not in await _page(port):  # noqa: ASYNC110 - only a scrape shows that the exporter has read the fleet
            await asyncio.sleep(0.2)
    times = []
    for _ in range(_SCRAPES):
        started = perf_counter()
        page = await _page(port)
        times.append((perf_counter() - started) * 1000)
    return median(times), len(page)


async def _page(port: int) -> bytes:
    connection = await Connection.open(port)
    _, body = await connection.send(request("GET", "/metrics"))
    await connection.close()
    return body


async def _register(installation: Installation, count: int) -> None:
    connection = await connect(installation.settings, "bench")
    try:
        for number in range(count):
            await workers.register(
                connection, uuid4(), host=f"host-{number}", pid=number, version="0", queues=list(_QUEUES)
            )
    finally:
        await connection.close()


async def _cost(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Each run drains with metrics, twice without, and with metrics again. So a change of the machine's load, and the
    effect of one drain on the next, affect both.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    loads, shares, extra_cpu = [], [], []
    for _ in range(scale.runs):
        loads.append(os.getloadavg()[0])
        drains = [(on, await _drain(testbed, scale, on=on)) for on in (True, False, False, True)]
        for on in (True, False):
            rates[on].append(mean(rate for drain_on, (rate, _) in drains if drain_on is on))
            seconds[on].append(mean(cpu for drain_on, (_, cpu) in drains if drain_on is on))
        shares.append(100 * (1 - rates[True][-1] / rates[False][-1]))
        extra_cpu.append(100 * (seconds[True][-1] / seconds[False][-1] - 1))
    counting = await asyncio.to_thread(_seconds_of_counting)
    share = tuple(100 * counting / cpu for cpu in seconds[True])
    jobs_per_second = {name: [round(rate) for rate in rates[on]] for name, on in _CASES}
    microseconds = {name: [round(cpu * 1e6, 1) for cpu in seconds[on]] for name, on in _CASES}
    return [
        Figure(
            "throughput that metrics cost",
            "%",
            tuple(shares),
            tuple(loads),
            _PERCENT,
            {"jobs_per_second": jobs_per_second},
        ),
        Figure(
            "worker CPU a job that metrics cost",
            "%",
            tuple(extra_cpu),
            tuple(loads),
            None,
            {"microseconds": microseconds},
        ),
        Figure("counting of an attempt, of its worker CPU", "%", share, tuple(loads), None, {"seconds": counting}),
    ]


def _seconds_of_counting() -> float:
    """The seconds that the worker needs to count one attempt in all its metrics: the best of many rounds."""
    ended = [JobEnded("noop", "succeeded", 0.2)]

    def attempt() -> None:
        metrics.HINTS.labels("claimed").inc()
        metrics.CLAIMS.labels("hint").inc()
        metrics.count_claim("default", "pending", 0.05)
        metrics.count_end("noop", "only", "succeeded", 0.01, None)
        count_ended_jobs(ended)

    return min(timeit.repeat(attempt, number=10_000, repeat=20)) / 10_000


async def _drain(testbed: Testbed, scale: Scale, *, on: bool) -> tuple[float, float]:
    """Jobs a second, and the worker's CPU seconds a job. With metrics on, the worker is scraped every five seconds."""
    port = free_port()
    settings = {"broker": "amqp", "amqp_heartbeat": 60, "metrics": str(on).lower(), "metrics_port": port}
    async with testbed.installation(**settings) as installation:
        worker = await installation.start_worker()
        async with submitter(installation) as submitting:
            await submitting.fill(noop, scale.warm_up_jobs)
            await until_finished(installation, worker)
            since = await now(installation)
            with ExitStack() as measuring:
                with paused(main_processes_of("worker")):
                    await submitting.fill(noop, scale.jobs)
                    await testbed.checkpoint()
                    meter = measuring.enter_context(Meter())  # before the worker goes on: it may finish immediately
                scraping = asyncio.create_task(_keep_scraping(port)) if on else None
                await until_finished(installation, worker)
        if scraping is not None:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
        return scale.jobs / await seconds_of(installation, since), meter.by_role["worker"] / scale.jobs


async def _keep_scraping(port: int) -> None:
    while True:
        await _page(port)
        await asyncio.sleep(5)
