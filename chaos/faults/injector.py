"""Makes the faults of a plan happen, and counts their effects."""

from __future__ import annotations

import asyncio
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
from chaos.faults.effects import Deal
from chaos.faults.failover import FailoverFaults
from chaos.faults.network import NetworkFaults
from chaos.faults.processes import ProcessFaults
from chaos.faults.store import StoreFaults
from chaos.faults.versions import VersionFaults
from chaos.plan import Fault
from chaos.settings import LEASE_SECONDS
from chaos.stack import Installation
from leasehold.runtime.transient import TRY_AGAIN

log = structlog.get_logger(__name__)

#: How long a failpoint's SIGSTOP holds a process: longer than its leases last.
ZOMBIE_SECONDS = LEASE_SECONDS * 1.6
#: A fault that did nothing is tried again: at most this many tries, with this pause between them.
_TURNS = 4
_AGAIN_SECONDS = 1.0


class Faults:
    """Carries the plan of an installation out. `fired`: how often each fault did something; `effects`: how much it did.
    A planned fault that is not in `fired` did not happen.
    """

    def __init__(self, installation: Installation) -> None:
        self.fired: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        self.spans: list[tuple[str, float, float]] = []  # the faults that fired: (name, since, until), since 1970
        self._installation = installation
        broken = asyncio.Lock()  # held while a server is away: one at a time, except for a fault that takes both
        rng = random.Random(f"faults {installation.plan.seed}")  # noqa: S311 - to be repeated
        self._processes = ProcessFaults(installation)
        self._clock = ClockFaults(installation, asyncio.Lock())
        self._failover = FailoverFaults(installation, broken)
        self._deals: dict[str, Deal] = {
            **self._processes.deals,
            **BrokerFaults(installation, broken, rng).deals,
            **DatabaseFaults(installation, broken).deals,
            **NetworkFaults(installation).deals,
            **StoreFaults(installation).deals,
            **DiskFaults(installation, broken).deals,
            **self._clock.deals,
            **VersionFaults(installation).deals,
            **self._failover.deals,
        }

    @property
    def children_killed(self) -> int:
        return self._processes.children_killed

    @property
    def jumps(self) -> list[tuple[float, float]]:
        return self._clock.jumps

    @property
    def promotions(self) -> list[float]:
        return self._failover.promotions

    def deal_of(self, name: str) -> Deal:
        """The function for the fault `name`: the one with the longest key that `name` begins with. Raises ValueError
        without one.
        """
        return self._deals[max((known for known in self._deals if name.startswith(known)), key=len)]

    async def run(self) -> None:
        """Make all blows of the plan happen. Returns when the last one is over."""
        async with asyncio.TaskGroup() as blows:
            for fault in self._installation.plan.blows:
                blows.create_task(self._at_its_time(fault))

    async def wake_zombies(self) -> None:
        """Let processes that a failpoint has stopped go on after ZOMBIE_SECONDS. Runs until it is cancelled."""
        asleep: dict[int, float] = {}
        while True:
            for slot in self._installation.slots.values():
                pid = slot.pid
                if pid is not None and slot.is_stopped() and not slot.stopped_by_us:
                    since = asleep.setdefault(pid, time.monotonic())
                    if time.monotonic() - since > ZOMBIE_SECONDS:
                        slot.signal(signal.SIGCONT)
                        del asleep[pid]
            await asyncio.sleep(0.1)

    async def _at_its_time(self, fault: Fault) -> None:
        """Wait for the fault's time, then make it happen. A fault that did nothing is tried again, on another target if
        it has one: another fault may have been in its way, or there was nothing to break. A fault that never does
        anything makes the run red (run.Report).
        """
        await asyncio.sleep(fault.at)
        slots = (*self._installation.plan.workers, *APIS)
        on = [slot for slot in fault.kind.on if slot in slots]
        for turn in range(_TURNS):
            again = replace(fault, target=on[(on.index(fault.target) + turn) % len(on)] if on else fault.target)
            since = time.time()
            effect = await self._dealt(again)
            if effect:
                self.fired[fault.name] += 1
                self.effects[fault.name] += effect
                self.spans.append((fault.name, since, time.time()))
                return
            log.warning("a fault did nothing", fault=fault.name, target=again.target)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _dealt(self, fault: Fault) -> int:
        try:
            return await self.deal_of(fault.name)(fault)
        except TRY_AGAIN as error:  # another fault is on, and this one cannot reach its server
            log.warning("a fault met another one", fault=fault.name, error=type(error).__name__)
            return 0
