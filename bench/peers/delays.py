"""`delays`: how long a job of the platform, and of each peer, waits for its handler at a steady pace, measured in
turns.

The time is from just before the submission to the first line of the handler, by the same clock.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from bench.figure import Figure, quantile
from bench.latency import WARM_UP_JOBS, paced_run
from bench.peers.measure import environment_of, run_driver, worker_of
from bench.peers.peer import PEERS, Peer
from bench.scale import Scale
from bench.testbed import Testbed

#: The platform's own systems by name: the broker.
OWN_SYSTEMS = {"leasehold amqp": "amqp", "leasehold postgres": "postgres"}
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.1


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    peers = [peer for peer in PEERS if peer.name in scale.peers]
    waits: dict[str, list[list[float]]] = {name: [] for name in (*OWN_SYSTEMS, *(peer.name for peer in peers))}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        for name, broker in OWN_SYSTEMS.items():
            waits[name].append((await paced_run(testbed, scale, broker)).whole)
        for peer in peers:
            waits[peer.name].append(await _waits_of_peer(testbed, scale, peer))
    return [
        Figure(f"delay, {name}, {quantile_name}", "ms", tuple(quantile(run, part) for run in runs), tuple(load))
        for name, runs in waits.items()
        for quantile_name, part in (("p50", 0.5), ("p99", 0.99))
    ]


async def _waits_of_peer(testbed: Testbed, scale: Scale, peer: Peer) -> list[float]:
    python = str(await peer.environment())
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory) / "stamps"
        stamps.touch()
        async with testbed.installation() as installation:
            environment = environment_of(installation) | {"PEER_STAMPS": str(stamps)}
            await run_driver(python, peer, ["prepare"], environment)
            async with worker_of(python, peer, environment) as start:
                await start()
                await run_driver(python, peer, ["pace", str(WARM_UP_JOBS), str(scale.paced_rate)], environment)
                await _read_stamps(stamps, WARM_UP_JOBS)
                await run_driver(python, peer, ["pace", str(scale.paced_jobs), str(scale.paced_rate)], environment)
                return (await _read_stamps(stamps, WARM_UP_JOBS + scale.paced_jobs))[WARM_UP_JOBS:]


async def _read_stamps(stamps: Path, jobs: int) -> list[float]:
    """Wait until `jobs` handlers have written their waits. Returns the waits in milliseconds."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            waits = (await asyncio.to_thread(stamps.read_text)).splitlines()
            if len(waits) >= jobs:
                return [1000 * float(seconds) for seconds in waits]
            await asyncio.sleep(_POLL_SECONDS)
