"""The processes of this machine, as the kernel tells."""

from __future__ import annotations

import asyncio
import os
import select
from contextlib import suppress
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
    users = set()
    for pid in pids:
        with suppress(OSError):  # it has ended: PostgreSQL's own processes come and go
            if "guard.py" not in command_of(pid):
                users.add(Path(f"/proc/{pid}").stat().st_uid)
    return users


def command_of(pid: int) -> str:
    """What it was started with.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def command_lines_of(pids: set[int]) -> list[str]:
    lines = []
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines.append(command_of(pid))
    return lines


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
    """Sees processes end, whoever their parent is: made while they live, or when they have ended already."""

    def __init__(self, pids: set[int]) -> None:
        self._living: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):  # between the listing and here: PostgreSQL's own come and go
                self._living[os.pidfd_open(pid)] = pid

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
            assert poll.poll(END_SECONDS * 1000), f"still there: {pid} {command_lines_of({pid})}"
            os.close(ended)
        self._living = {}
