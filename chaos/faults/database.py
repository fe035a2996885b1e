"""Faults of PostgreSQL's server and sessions: they are killed, stopped, frozen, locked out, or read-only."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Mapping
from contextlib import suppress

import asyncpg

from chaos.faults.effects import FaultMaker, LogWatch, TrafficWatch
from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

_RECOVERY_SECONDS = 20.0
_LOCK_TIMEOUT = "1s"
_ALTERED = ("task", "job", "outbox")
_OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


class DatabaseFaults:
    """Each fault returns the number of sessions that it broke, or of bytes or statements that it hit."""

    def __init__(self, installation: Installation, server_lock: asyncio.Lock) -> None:
        self._installation = installation
        self._server_lock = server_lock

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F21": self._terminate_sessions,
            "F22": self._kill_backend,
            "F23": self._kill,
            "F24": self._kill,
            "F25": self._lock_job,
            "F26": self._read_only,
            "F35": self._freeze,
            "F44": self._alter_tables,
        }

    async def _terminate_sessions(self, _fault: Fault) -> int:
        async with self._installation.connection() as connection:
            rows = await connection.fetch(
                f"SELECT pg_terminate_backend(pid) AS ended {_OTHERS} ORDER BY random() LIMIT 8"
            )
        return sum(row["ended"] for row in rows)

    async def _kill_backend(self, _fault: Fault) -> int:
        """Kill one session's process. PostgreSQL treats this as a crash: it ends all sessions, and recovers."""
        async with self._server_lock, self._installation.connection() as connection:
            pid = await connection.fetchval(f"SELECT pid {_OTHERS} LIMIT 1")
            if pid in self._installation.servers.processes("postgres"):
                with suppress(ProcessLookupError):  # the session has just ended
                    os.kill(pid, signal.SIGKILL)
                    return 1
        return 0

    async def _kill(self, fault: Fault) -> int:
        postgres = self._installation.servers.postgres
        async with self._server_lock:
            hit = sum(link.open_connections for link in self._installation.links_to("postgres"))
            await (postgres.kill() if "kill" in fault.name else postgres.stop("immediate"))
            await asyncio.sleep(fault.seconds)
            await self._installation.servers.restart_postgres()
        return hit

    async def _freeze(self, fault: Fault) -> int:
        """Stop all processes of the server. The kernel still accepts connections and bytes, but nothing answers."""
        servers = self._installation.servers
        async with self._server_lock:
            try:
                servers.signal("postgres", signal.SIGSTOP)
                await asyncio.sleep(0.1)
                servers.signal("postgres", signal.SIGSTOP)  # for processes that were being forked at the first signal
                traffic = TrafficWatch(self._installation.links_to("postgres"))
                await asyncio.sleep(fault.seconds)
                return traffic.since.sent if not traffic.since.passed_back else 0
            finally:
                servers.signal("postgres", signal.SIGCONT)

    async def _lock_job(self, fault: Fault) -> int:
        """Lock the row of a running job. Returns how many sessions waited for the lock."""
        async with self._installation.connection() as connection, connection.transaction():
            await connection.fetchval("SELECT id FROM job WHERE status = 'running' ORDER BY id DESC LIMIT 1 FOR UPDATE")
            return len(await self._sessions_waiting_for(connection, fault.seconds))

    async def _alter_tables(self, fault: Fault) -> int:
        """Add a column to each busy table, as a migration does, and keep the lock for a while: it also stops reads.
        Returns how many sessions waited for a lock, plus how often this fault did not get a lock and tried again.
        """
        waits = 0
        async with self._installation.connection() as connection:
            await connection.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
            for table in _ALTERED:
                while True:
                    try:
                        async with connection.transaction():
                            column = f"chaos_{secrets.token_hex(4)}"
                            await connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} text DEFAULT 'new'")
                            waits += len(await self._sessions_waiting_for(connection, fault.seconds / len(_ALTERED)))
                            break
                    except asyncpg.LockNotAvailableError:
                        waits += 1
        return waits

    async def _sessions_waiting_for(self, connection: asyncpg.Connection[asyncpg.Record], seconds: float) -> set[int]:
        """The sessions that waited for a lock of this connection during the next `seconds`."""
        waited: set[int] = set()
        for _ in range(round(seconds / 0.2)):
            await asyncio.sleep(0.2)
            rows = await connection.fetch(f"SELECT pid {_OTHERS} AND pg_backend_pid() = ANY(pg_blocking_pids(pid))")
            waited |= {row["pid"] for row in rows}
        return waited

    async def _read_only(self, fault: Fault) -> int:
        watch = LogWatch(self._installation.servers.postgres_log)
        await self._set_read_only("on")
        await asyncio.sleep(fault.seconds)
        await self._set_read_only("off")
        return watch.count("in a read-only transaction")

    async def _set_read_only(self, value: str) -> None:
        servers, name = self._installation.servers, self._installation.name

        async def set_it() -> None:
            await servers.administer(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
            await servers.administer(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

        async with self._server_lock:
            await until_answered(set_it, within=_RECOVERY_SECONDS)  # F22 may have made the server recover meanwhile
