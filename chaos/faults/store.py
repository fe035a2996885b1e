"""Faults of the object store. The proxy before the store makes the trouble (chaos/store_front.py)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from chaos.faults.effects import FaultMaker, wait_until
from chaos.plan import Fault
from chaos.stack import Installation
from chaos.store_front import Trouble

#: The share of the requests that the trouble hits. OVERWRITE must hit all: it has an effect only if it hits a put and
#: the repetition of that put.
_SHARES = {Trouble.OVERWRITE: 1.0}
_SHARE = 0.5


class StoreFaults:
    """Each fault returns the number of requests that it hit."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {"F31": self._trouble, "F9 hold a put": self._hold_put}

    async def _trouble(self, fault: Fault) -> int:
        faults = self._installation.front.faults
        trouble = Trouble(fault.name.rpartition(" ")[2])
        faults.begin(trouble, _SHARES.get(trouble, _SHARE))
        await asyncio.sleep(fault.seconds)
        fired = faults.fired
        faults.heal()
        return fired

    async def _hold_put(self, fault: Fault) -> int:
        """Hold a put, and stop its worker. The put arrives when another attempt has been committed."""
        faults = self._installation.front.faults
        faults.held.clear()
        faults.hold_put = "unlike.txt"
        if not await wait_until(faults.held.is_set):
            faults.hold_put = ""
            return 0
        slot = self._installation.slots[faults.held_of]
        slot.stopped_by_us = slot.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        faults.released.set()
        await asyncio.sleep(0.2)
        slot.signal(signal.SIGCONT)
        slot.stopped_by_us = False
        return 1
