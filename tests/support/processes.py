"""Reads the processes of this machine from /proc."""

from __future__ import annotations

import asyncio
import os
import select
from contextlib import suppress
from pathlib import Path

END_SECONDS = 60.0


def descendants(root: int) -> set[int]:
    """The ids of all processes below `root`."""
    return _below(root, _children())


def started_since(before: set[int]) -> set[int]:
    """The ids of the children that this process did not have `before`, and of all below them: processes below the older
    children, which are servers of other tests, come and go.
    """
    children = _children()
    new = [pid for pid in children.get(os.getpid(), []) if pid not in before]
    return set(new).union(*(_below(pid, children) for pid in new))


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_bytes().rpartition(b")")[2].split()  # a name may be no text
        except OSError:  # the process has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    return children


def _below(root: int, children: dict[int, list[int]]) -> set[int]:
    pids: set[int] = set()
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        pids.update(below)
        pending += below
    return pids


def users_of_servers(pids: set[int]) -> set[int]:
    """The users of the processes, except of the guards: a guard must be able to end its server."""
    users = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended: PostgreSQL's own come and go
            if "guard.py" not in command_of(pid):
                users.add(Path(f"/proc/{pid}").stat().st_uid)
    return users


def command_of(pid: int) -> str:
    """The command line of the process.

    Raises:
        OSError: the process has ended.
    """
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def command_lines_of(pids: set[int]) -> list[str]:
    lines = []
    for pid in pids:
        with suppress(OSError):  # the process has ended
            lines.append(command_of(pid))
    return lines


def command_lines() -> list[str]:
    """The command lines of all processes. Every user can read them."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text(errors="replace"))
        except OSError:  # the process has ended
            continue
    return lines


class Witness:
    """Waits for the end of processes of any parent. Some of them may have ended already."""

    def __init__(self, pids: set[int]) -> None:
        self._living: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):  # PostgreSQL's own processes come and go
                self._living[os.pidfd_open(pid)] = pid

    async def all_ended(self) -> None:
        """Wait until the last process has ended.

        Raises:
            AssertionError: a process still runs.
        """
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        for ended, pid in self._living.items():
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            assert poll.poll(END_SECONDS * 1000), f"still running: {pid} {command_lines_of({pid})}"
            os.close(ended)
        self._living = {}
