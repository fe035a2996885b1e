"""The object store: its front makes the trouble."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from chaos.faults.effects import Deal, becomes
from chaos.plan import Fault
from chaos.stack import Installation
from chaos.store_front import Trouble

#: Every create-only put meets the lie: a share of them would leave nothing to overwrite.
_SHARES = {Trouble.OVERWRITE: 1.0}
_SHARE = 0.5


class StoreFaults:
    """Each returns how many requests met the trouble."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    @property
    def deals(self) -> Mapping[str, Deal]:
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
        """A put is on its way while its worker stands still; it arrives when another attempt has been committed."""
        faults = self._installation.front.faults
        faults.held.clear()
        faults.hold_put = "unlike.txt"
        if not await becomes(faults.held.is_set):
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
