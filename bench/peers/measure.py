"""Measures the platform and each peer in turns, so that a change of the machine's load affects all of them.

Each round begins with another system, because the page cache differs for the first and the last system of a round. A
ratio compares two rates of the same round.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import asyncpg

from bench.figure import Figure
from bench.peers.peer import CORES, PEERS, Peer
from bench.processes import Meter
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.pipelines.demo.pipeline import noop

_PATIENCE_SECONDS = 180.0
_FIRST = 0.1  # this share of the jobs is not counted: the workers start meanwhile
_POLL_SECONDS = 0.05
_OUR_DONE = "SELECT count(*) FROM job WHERE finished_at IS NOT NULL"
#: The platform's own systems by name: the broker, and the number of workers. "a worker a core": one for each core.
OWN_SYSTEMS = {
    "leasehold amqp": ("amqp", 1),
    "leasehold amqp, a worker a core": ("amqp", CORES),
    "leasehold postgres": ("postgres", 1),
    "leasehold postgres, a worker a core": ("postgres", CORES),
}


@dataclass(slots=True)
class _Runs:
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds for 1,000 jobs, of all processes
    load: list[float] = field(default_factory=list)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    peers = {peer.name: peer for peer in PEERS if peer.name in scale.peers}
    runs = {name: _Runs() for name in (*OWN_SYSTEMS, *peers)}
    broken: dict[str, str] = {}
    for turn in range(scale.runs):
        for name in _rotated([*OWN_SYSTEMS, *peers], turn):
            if name in OWN_SYSTEMS:
                await _measure_own(testbed, scale, *OWN_SYSTEMS[name], runs[name])
            elif name not in broken:
                try:
                    await _measure_peer(testbed, scale, peers[name], runs[name])
                except (RuntimeError, TimeoutError, asyncpg.PostgresError) as error:
                    broken[name] = f"{type(error).__name__}: {error}"[:500]
    rates = [_figure(name, system_runs, broken.get(name)) for name, system_runs in runs.items()]
    ratios = [_ratio(ours, name, runs) for ours in OWN_SYSTEMS for name in peers if name not in broken]
    return rates + ratios


def _rotated(names: list[str], turn: int) -> list[str]:
    """The names in their order, beginning with another name in each turn."""
    start = turn % len(names)
    return names[start:] + names[:start]


def _ratio(ours: str, name: str, runs: Mapping[str, _Runs]) -> Figure:
    """The ratio of the platform's rate to the peer's, for each round."""
    pairs = zip(runs[ours].rates, runs[name].rates, strict=True)
    return Figure(f"peers, {ours} to {name}", "ratio", tuple(a / b for a, b in pairs), tuple(runs[ours].load))


def _figure(name: str, runs: _Runs, broken: str | None) -> Figure:
    """The figure of a system. A system without any rate has the rate 0. `broken`: why it did not work."""
    details: dict[str, object] = {"cpu_seconds_a_1000_jobs": runs.cpu}
    if broken is not None:
        details["broken"] = broken
    return Figure(f"peers, {name}", "jobs/s", tuple(runs.rates) or (0.0,), tuple(runs.load) or (0.0,), None, details)


async def _measure_own(testbed: Testbed, scale: Scale, broker: str, workers: int, runs: _Runs) -> None:
    async with testbed.installation(broker=broker, worker_queues="default") as installation:
        async with submitter(installation) as submitting:
            await submitting.fill(noop, scale.jobs)

        async def start() -> None:
            for _ in range(workers):
                await installation.start("worker")

        await testbed.checkpoint()
        await _drain(installation, _OUR_DONE, scale.jobs, start, runs)


async def _measure_peer(testbed: Testbed, scale: Scale, peer: Peer, runs: _Runs) -> None:
    python = str(await peer.environment())
    jobs = min(peer.jobs, scale.jobs)
    async with testbed.installation() as installation:
        environment = environment_of(installation)
        for arguments in (["prepare"], ["submit", str(jobs)]):
            await run_driver(python, peer, arguments, environment)
        await testbed.checkpoint()
        async with worker_of(python, peer, environment) as start:
            await _drain(installation, peer.done, jobs, start, runs)


def environment_of(installation: Installation) -> dict[str, str]:
    """The environment of a peer's driver."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")} | {
        "PEER_DATABASE_URL": installation.url,
        "PEER_PROCESSES": str(CORES),
        "PEER_AMQP_URL": installation.environment["LEASEHOLD_AMQP_URL"],
    }


async def run_driver(python: str, peer: Peer, arguments: list[str], environment: dict[str, str]) -> str:
    """Run the peer's driver with `arguments`. Returns its output. Raises RuntimeError with it, or TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        python, str(peer.driver), *arguments, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _PATIENCE_SECONDS)
    except TimeoutError:
        process.kill()
        raise
    if process.returncode != 0:
        raise RuntimeError(output.decode(errors="replace")[-1500:])
    return output.decode(errors="replace")


@asynccontextmanager
async def worker_of(
    python: str, peer: Peer, environment: dict[str, str]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Yields a function that starts the peer's worker, with a process for each core. Kills their process groups at the
    end.
    """
    started: list[asyncio.subprocess.Process] = []

    async def start() -> None:
        quiet = asyncio.subprocess.DEVNULL
        for _ in range(1 if peer.has_processes else CORES):
            process = await asyncio.create_subprocess_exec(
                python, str(peer.driver), "worker", env=environment, start_new_session=True, stdout=quiet, stderr=quiet
            )
            started.append(process)

    try:
        yield start
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _drain(
    installation: Installation, done: str, jobs: int, start: Callable[[], Awaitable[None]], runs: _Runs
) -> None:
    """Start the workers, and wait until all jobs are done. Adds a rate to `runs`: it counts from the moment when the
    first jobs are done. `done`: the query that counts the finished jobs.
    """
    load = os.getloadavg()[0]
    async with installation.connection() as connection, asyncio.timeout(_PATIENCE_SECONDS):
        await start()
        done_before = await _until_done(connection, done, int(jobs * _FIRST))
        with Meter() as meter:
            began = monotonic()
            done_after = await _until_done(connection, done, jobs)
            seconds = monotonic() - began
    measured = done_after - done_before
    runs.rates.append(measured / seconds)
    cpu_seconds = sum(used for role, used in meter.by_role.items() if role != "bench")
    runs.cpu.append(round(1000 * cpu_seconds / measured, 2))
    runs.load.append(load)


async def _until_done(connection: asyncpg.Connection[asyncpg.Record], done: str, jobs: int) -> int:
    while True:
        with suppress(asyncpg.UndefinedTableError):
            count: int = await connection.fetchval(done)
            if count >= jobs:
                return count
        await asyncio.sleep(_POLL_SECONDS)
