"""Makes each fault of a plan happen at its time, and counts the effects."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from dataclasses import replace

import structlog

from chaos.catalogue import APIS
from chaos.faults.broker import BrokerFaults
from chaos.faults.clock import ClockFaults
from chaos.faults.database import DatabaseFaults
from chaos.faults.disks import DiskFaults
from chaos.faults.effects import FaultMaker
from chaos.faults.failover import FailoverFaults
from chaos.faults.network import NetworkFaults
from chaos.faults.processes import ProcessFaults
from chaos.faults.store import StoreFaults
from chaos.faults.versions import VersionFaults
from chaos.history import Failover
from chaos.plan import Fault
from chaos.settings import LEASE_SECONDS
from chaos.stack import Installation
from leasehold.runtime.transient import TRY_AGAIN

log = structlog.get_logger(__name__)

#: How long a failpoint's SIGSTOP holds a process: longer than its leases last.
ZOMBIE_SECONDS = LEASE_SECONDS * 1.6
#: A fault that did nothing is tried again, with this pause between the tries, until it had this many tries and this
#: much time. Another fault may take away for many seconds what this one needs.
_TRIES = 8
_TRY_SECONDS = 20.0
_PAUSE_SECONDS = 1.0


class Faults:
    """Carries out the plan of an installation. `fired`: how often each fault had an effect. `effects`: how large the
    effects were. A planned fault that is not in `fired` did not happen.
    """

    def __init__(self, installation: Installation) -> None:
        self.fired: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        self.spans: list[tuple[str, float, float]] = []  # the faults that fired: (name, since, until), since 1970
        self._installation = installation
        server_lock = asyncio.Lock()  # held while a fault takes a server away: one fault at a time
        rng = random.Random(f"faults {installation.plan.seed}")  # noqa: S311 - to be repeated
        self._processes = ProcessFaults(installation)
        self._clock = ClockFaults(installation, asyncio.Lock())
        self._failover = FailoverFaults(installation, server_lock)
        self._makers: dict[str, FaultMaker] = {
            **self._processes.makers,
            **BrokerFaults(installation, server_lock, rng).makers,
            **DatabaseFaults(installation, server_lock).makers,
            **NetworkFaults(installation).makers,
            **StoreFaults(installation).makers,
            **DiskFaults(installation, server_lock).makers,
            **self._clock.makers,
            **VersionFaults(installation).makers,
            **self._failover.makers,
        }

    @property
    def children_killed(self) -> int:
        return self._processes.children_killed

    @property
    def jumps(self) -> list[tuple[float, float]]:
        return self._clock.jumps

    @property
    def failovers(self) -> list[Failover]:
        return self._failover.failovers

    def maker_of(self, name: str) -> FaultMaker:
        """The function that makes the fault `name`: the maker with the longest key with which `name` begins. Raises
        ValueError if no key fits.
        """
        return self._makers[max((known for known in self._makers if name.startswith(known)), key=len)]

    async def run(self) -> None:
        """Make all blows of the plan happen. Returns when the last one is over."""
        async with asyncio.TaskGroup() as blows:
            for fault in self._installation.plan.blows:
                blows.create_task(self._at_its_time(fault))

    async def wake_zombies(self) -> None:
        """Let processes that a failpoint has stopped go on after ZOMBIE_SECONDS. Runs until it is cancelled."""
        stopped_since: dict[int, float] = {}  # by pid
        while True:
            for slot in self._installation.slots.values():
                pid = slot.pid
                if pid is not None and slot.is_stopped() and not slot.stopped_by_us:
                    since = stopped_since.setdefault(pid, time.monotonic())
                    if time.monotonic() - since > ZOMBIE_SECONDS:
                        slot.signal(signal.SIGCONT)
                        del stopped_since[pid]
            await asyncio.sleep(0.1)

    async def _at_its_time(self, fault: Fault) -> None:
        """Wait for the fault's time, then make it happen. A fault that did nothing is tried again, on the next process
        that it may hit: another fault may have prevented it, or there was nothing to break. A fault that never has an
        effect makes the run red (run.Report).
        """
        await asyncio.sleep(fault.at)
        slots = (*self._installation.plan.workers, *APIS)
        targets = [slot for slot in fault.kind.on if slot in slots]
        first = targets.index(fault.target) if targets else 0
        deadline = time.monotonic() + _TRY_SECONDS
        for nth in itertools.count():
            target = targets[(first + nth) % len(targets)] if targets else fault.target
            since = time.time()
            effect = await self._make(replace(fault, target=target))
            if effect:
                self.fired[fault.name] += 1
                self.effects[fault.name] += effect
                self.spans.append((fault.name, since, time.time()))
                return
            log.warning("a fault did nothing", fault=fault.name, target=target)
            if nth + 1 >= _TRIES and time.monotonic() > deadline:
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _make(self, fault: Fault) -> int:
        try:
            return await self.maker_of(fault.name)(fault)
        except TRY_AGAIN as error:  # another fault has taken away the server that this one needs
            log.warning("a fault did nothing because of another one", fault=fault.name, error=type(error).__name__)
            return 0
