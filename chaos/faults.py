"""Making the faults of a plan happen, and counting only those that did."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from chaos.plan import Fault
from chaos.proxy import Link, Weather
from chaos.server_faults import ServerFaults
from chaos.settings import LEASE_SECONDS
from chaos.stack import Installation
from chaos.store_front import Trouble
from leasehold.embedded.guard import descendants
from leasehold.runtime.transient import TRY_AGAIN

log = structlog.get_logger(__name__)

#: How long a process that a failpoint stopped stays so: longer than its leases.
ZOMBIE_SECONDS = LEASE_SECONDS * 1.6
_HELD = ("leasehold settlements", "leasehold heartbeat")
_SETTLEMENTS = "leasehold settlements"
_WAIT_SECONDS = 6.0


class Faults:
    """`fired` counts by the fault's name; what is planned and not in there did not happen."""

    def __init__(self, installation: Installation) -> None:
        self.fired: Counter[str] = Counter()
        self.children_killed = 0
        self._it = installation
        rng = random.Random(f"faults {installation.plan.seed}")  # noqa: S311 - to be repeated
        self._by_prefix: dict[str, Callable[[Fault], Awaitable[bool]]] = {
            "F4 kill a child": self._kill_child,
            "F7": self._cut_settlement,
            "F9 hold a settlement": self._hold_settlement,
            "F9 hold a put": self._hold_put,
            "F10": self._drain,
            "F11 stop": self._stop_worker,
            "F27": self._slow,
            "F28": self._reset,
            "F29": self._half_open,
            "F30": self._one_way,
            "F31": self._trouble_store,
            "F32": self._fill_the_disk,
            "F33": self._turn_the_clock,
            "F34": self._restart_everything,
            **ServerFaults(installation, rng).by_prefix,
        }

    async def run(self) -> None:
        """Carry the plan out; returns when the last fault is over."""
        async with asyncio.TaskGroup() as blows:
            for fault in self._it.plan.blows:
                blows.create_task(self._at_its_time(fault))

    async def wake_zombies(self) -> None:
        """For ever: let go on, later, what a failpoint has stopped."""
        asleep: dict[int, float] = {}
        while True:
            for slot in self._it.slots.values():
                pid = slot.pid
                if pid is not None and slot.is_stopped() and not slot.stopped_by_us:
                    since = asleep.setdefault(pid, time.monotonic())
                    if time.monotonic() - since > ZOMBIE_SECONDS:
                        slot.signal(signal.SIGCONT)
                        del asleep[pid]
            await asyncio.sleep(0.1)

    async def _at_its_time(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        inject = next(work for prefix, work in self._by_prefix.items() if fault.name.startswith(prefix))
        try:
            happened = await inject(fault)
        except TRY_AGAIN as error:  # another fault of the plan is on, and this one cannot reach what it would break
            log.warning("a fault met another one", fault=fault.name, error=type(error).__name__)
            happened = False
        if happened:
            self.fired[fault.name] += 1
        else:
            log.warning("a fault did not fire", fault=fault.name, target=fault.target)

    def _link(self, fault: Fault) -> Link:
        return self._it.links[fault.target, fault.kind.link]

    # --- workers

    async def _kill_child(self, fault: Fault) -> bool:
        pid = self._it.slots[fault.target].pid
        children = descendants(pid) if pid is not None else []
        for child in children[:1]:
            os.kill(child, signal.SIGKILL)
        self.children_killed += len(children[:1])
        return bool(children)

    async def _drain(self, fault: Fault) -> bool:
        slot = self._it.slots[fault.target]
        pid = slot.pid
        fired = slot.signal(signal.SIGTERM)
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
            if slot.pid == pid:
                slot.signal(signal.SIGKILL)
        return fired

    async def _stop_worker(self, fault: Fault) -> bool:
        slot = self._it.slots[fault.target]
        slot.stopped_by_us = True
        fired = slot.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        slot.signal(signal.SIGCONT)
        slot.stopped_by_us = False
        return fired

    async def _fill_the_disk(self, fault: Fault) -> bool:
        """All workers of a run keep their scratch files there."""
        full = await asyncio.to_thread(self._it.disk.fill)
        await asyncio.sleep(fault.seconds)
        self._it.disk.empty()
        return full

    async def _turn_the_clock(self, fault: Fault) -> bool:
        slot = self._it.slots[fault.target]
        pid = slot.pid
        if pid is None or not slot.log.stat().st_size:
            return False  # it has not begun to listen for the signal
        there, back = (signal.SIGUSR1, signal.SIGUSR2)[:: 1 if "ahead" in fault.name else -1]
        slot.signal(there)
        await asyncio.sleep(fault.seconds)
        if slot.pid != pid:
            return True  # it was wrong for the rest of its life
        slot.signal(back)
        return True

    async def _restart_everything(self, fault: Fault) -> bool:
        fired = [slot.signal(signal.SIGKILL) for slot in self._it.slots.values()]
        await asyncio.sleep(fault.seconds)
        return any(fired)

    # --- a write that arrives late

    async def _cut_settlement(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.cut_next_request(_SETTLEMENTS)
        return await _becomes(lambda: not link.cut_pending)

    async def _hold_settlement(self, fault: Fault) -> bool:
        """What the worker settles now arrives when another one has its lease, for it cannot renew meanwhile."""
        link = self._link(fault)
        link.hold(_HELD)
        await asyncio.sleep(fault.seconds)
        link.heal()
        return True

    async def _hold_put(self, fault: Fault) -> bool:
        """A put is on its way while its worker stands still; it arrives when another attempt has been committed."""
        faults = self._it.front.faults
        faults.held.clear()
        faults.hold_put = "unlike.txt"
        if not await _becomes(faults.held.is_set):
            faults.hold_put = ""
            return False
        slot = self._it.slots[faults.held_of]
        slot.stopped_by_us = slot.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        faults.released.set()
        await asyncio.sleep(0.2)
        slot.signal(signal.SIGCONT)
        slot.stopped_by_us = False
        return True

    # --- links and store

    async def _slow(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.weather = Weather(0.25, 0.2, 64_000 if fault.kind.link == "s3" else 0)
        await asyncio.sleep(fault.seconds)
        link.heal()
        return True

    async def _reset(self, fault: Fault) -> bool:
        link = self._link(fault)
        for _ in range(3):
            if link.reset():
                return True
            await asyncio.sleep(0.5)
        return False

    async def _half_open(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.hold()
        await asyncio.sleep(fault.seconds)
        link.reset()
        link.heal()
        return True

    async def _one_way(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.drop_replies()
        await asyncio.sleep(fault.seconds)
        link.heal()
        return True

    async def _trouble_store(self, fault: Fault) -> bool:
        faults = self._it.front.faults
        faults.begin(Trouble(fault.name.rpartition(" ")[2]), 0.5)
        await asyncio.sleep(fault.seconds)
        fired = faults.fired
        faults.heal()
        return fired > 0


async def _becomes(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + _WAIT_SECONDS
    while not true() and time.monotonic() < until:  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.02)
    return true()
