"""`delays`: how long a job of ours, and of each peer, waits for its handler, at a steady pace, in turns.

From just before the submission to the first line of the handler, by one machine's clock.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from bench.figure import Figure, quantile
from bench.latency import WARM_UP_JOBS, paced_run
from bench.peers.measure import driven, environment_of, worker_of
from bench.peers.peer import PEERS, Peer
from bench.scale import Scale
from bench.testbed import Testbed

#: Ours: its name, and its broker.
OURS = {"leasehold amqp": "amqp", "leasehold postgres": "postgres"}
_PATIENCE = 60.0
_LOOK_SECONDS = 0.1


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    wanted = [peer for peer in PEERS if peer.name in scale.peers]
    waits: dict[str, list[list[float]]] = {name: [] for name in (*OURS, *(peer.name for peer in wanted))}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        for name, broker in OURS.items():
            waits[name].append(await paced_run(testbed, scale, broker))
        for peer in wanted:
            waits[peer.name].append(await _theirs(testbed, scale, peer))
    return [
        Figure(f"delay, {name}, {said}", "ms", tuple(quantile(run, part) for run in runs), tuple(load))
        for name, runs in waits.items()
        for said, part in (("p50", 0.5), ("p99", 0.99))
    ]


async def _theirs(testbed: Testbed, scale: Scale, peer: Peer) -> list[float]:
    python = str(await peer.environment())
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory) / "stamps"
        stamps.touch()
        async with testbed.installation() as installation:
            environment = environment_of(installation) | {"PEER_STAMPS": str(stamps)}
            await driven(python, peer, ["prepare"], environment)
            async with worker_of(python, peer, environment) as start:
                await start()
                await driven(python, peer, ["pace", str(WARM_UP_JOBS), str(scale.paced_rate)], environment)
                await _stamped(stamps, WARM_UP_JOBS)
                await driven(python, peer, ["pace", str(scale.paced_jobs), str(scale.paced_rate)], environment)
                return (await _stamped(stamps, WARM_UP_JOBS + scale.paced_jobs))[WARM_UP_JOBS:]


async def _stamped(stamps: Path, jobs: int) -> list[float]:
    """What each waited, in ms, once there are so many."""
    async with asyncio.timeout(_PATIENCE):
        while True:
            found = (await asyncio.to_thread(stamps.read_text)).splitlines()
            if len(found) >= jobs:
                return [1000 * float(waited) for waited in found]
            await asyncio.sleep(_LOOK_SECONDS)
