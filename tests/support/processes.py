"""The processes of this machine, as the kernel tells."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

END_SECONDS = 20.0


def descendants(root: int) -> set[int]:
    """Every process below `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def users_of_servers(pids: set[int]) -> set[int]:
    """Who they run as, but for the guards: those must be able to end them."""
    return {Path(f"/proc/{pid}").stat().st_uid for pid in pids if "guard.py" not in command_of(pid)}


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def command_lines() -> list[str]:
    """What everybody can read of all processes."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text(errors="replace"))
        except OSError:  # it has ended
            continue
    return lines


class Witness:
    """Sees processes end, whoever their parent is: made while they live."""

    def __init__(self, pids: set[int]) -> None:
        self._living = {os.pidfd_open(pid): pid for pid in pids}

    async def all_ended(self) -> None:
        """Wait until the last has ended.

        Raises:
            AssertionError: one lives on.
        """
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        for ended, pid in self._living.items():
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            assert poll.poll(END_SECONDS * 1000), f"still there: {pid} {command_of(pid)}"
            os.close(ended)
        self._living = {}
