"""Faults of the platform's processes: they are killed, drained, stopped or out of memory, or their clocks are wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from chaos import journal
from chaos.faults.effects import FaultMaker, wait_until
from chaos.memory import MemoryLimit
from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.embedded.guard import descendants

#: The memory that a process may still allocate before the kernel ends it.
_MEGABYTES = 32


class ProcessFaults:
    """Each fault returns the number of processes that it hit."""

    def __init__(self, installation: Installation) -> None:
        self.children_killed = 0
        self._installation = installation

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F4 kill a child": self._kill_child,
            "F10": self._drain,
            "F11 stop": self._stop_worker,
            "F33": self._move_clock,
            "F34": self._restart_everything,
            "F41": self._exhaust_memory,
        }

    async def _kill_child(self, fault: Fault) -> int:
        pid = self._installation.slots[fault.target].pid
        children = descendants(pid) if pid is not None else []
        killed = 0
        for child in children[:1]:
            with suppress(ProcessLookupError):  # the child has just ended
                os.kill(child, signal.SIGKILL)
                killed += 1
        self.children_killed += killed
        return killed

    async def _drain(self, fault: Fault) -> int:
        slot = self._installation.slots[fault.target]
        pid = slot.pid
        hit = slot.signal(signal.SIGTERM)
        if fault.seconds:
            await asyncio.sleep(fault.seconds)
            if slot.pid == pid:
                slot.signal(signal.SIGKILL)
        return int(hit)

    async def _stop_worker(self, fault: Fault) -> int:
        slot = self._installation.slots[fault.target]
        slot.stopped_by_us = True
        slot.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        was_stopped = slot.is_stopped()
        slot.signal(signal.SIGCONT)
        slot.stopped_by_us = False
        return int(was_stopped)

    async def _move_clock(self, fault: Fault) -> int:
        """Move the clock of a process, and move it back later. The process writes a journal line for each move."""
        slot = self._installation.slots[fault.target]
        pid, process = slot.pid, slot.process_name
        if pid is None or not slot.log.stat().st_size:
            return 0  # the process does not listen for the signal yet
        is_ahead = "ahead" in fault.name
        move, move_back = (signal.SIGUSR1, signal.SIGUSR2) if is_ahead else (signal.SIGUSR2, signal.SIGUSR1)
        slot.signal(move)
        await asyncio.sleep(fault.seconds)
        if slot.pid == pid:  # else the process has ended meanwhile
            slot.signal(move_back)
        return sum(
            line["what"] == "clock" and line["process"] == process for line in journal.read(self._installation.journal)
        )

    async def _restart_everything(self, fault: Fault) -> int:
        hit = [slot.signal(signal.SIGKILL) for slot in self._installation.slots.values()]
        await asyncio.sleep(fault.seconds)
        return sum(hit)

    async def _exhaust_memory(self, fault: Fault) -> int:
        """Make the process allocate memory until the kernel's OOM killer ends it. Returns how many processes that
        killed.
        """
        slot = self._installation.slots[fault.target]
        pid = slot.pid
        if pid is None or not slot.log.stat().st_size:
            return 0  # the process does not listen for the signal yet
        with MemoryLimit(_MEGABYTES) as limit:
            limit.enter(pid)
            slot.signal(signal.SIGRTMIN)
            await wait_until(lambda: slot.pid != pid)
            return limit.killed()
