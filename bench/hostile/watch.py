"""Watches processes during an attack: their resident memory and their sessions of PostgreSQL. It finds the sessions by
the ports of the processes' sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import asyncpg

from bench.processes import resident_bytes

_EVERY_SECONDS = 0.25
_MIB = 1024 * 1024
_SESSIONS = "SELECT client_port FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


class Watch:
    """Measures until `run` is cancelled. `mib`, `sessions`: the largest values by role."""

    def __init__(self, url: str, pids: dict[str, int]) -> None:
        self._url = url
        self._pids = pids
        self.mib: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()

    async def run(self) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            while True:
                ports = {row["client_port"] for row in await connection.fetch(_SESSIONS)}
                for role, pid in self._pids.items():
                    with contextlib.suppress(OSError):  # the process has ended, so the honest runs fail
                        self.mib[role] = max(self.mib[role], resident_bytes(pid) // _MIB)
                        self.sessions[role] = max(self.sessions[role], len(ports & _ports(pid)))
                await asyncio.sleep(_EVERY_SECONDS)
        finally:
            await connection.close()


def _ports(pid: int) -> set[int]:
    """The local ports of the process's TCP connections."""
    process = Path("/proc") / str(pid)
    inodes = set()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in (process / "net/tcp").read_text().splitlines()[1:]]
    return {int(fields[1].partition(":")[2], 16) for fields in lines if fields[9] in inodes}
