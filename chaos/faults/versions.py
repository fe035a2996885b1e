"""Faults of releases: an old process runs beside new ones, or the whole installation is upgraded or rolled back.

"Old" means of the published release, and "new" means of this code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from chaos import journal
from chaos.faults.effects import FaultMaker
from chaos.plan import Fault
from chaos.release import migrate_with
from chaos.row_changes import WATCH_LATER_TABLES
from chaos.slots import Slot
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered
from leasehold.settings import as_variables, servers_of_database

_ROOT = Path(__file__).parents[2]
#: Far more than any step of an upgrade takes. An overloaded machine needs a minute to start a process.
_PATIENCE_SECONDS = 300.0
_MIGRATIONS = 5
#: How long a try of the migration waits for the locks of one revision.
_REVISION_SECONDS = 20


class VersionFaults:
    """Each fault returns the number of steps that an old process began, or of upgraded revisions and processes."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {"F42": self._old_beside_new, "F43": self._upgrade, "F49": self._roll_back}

    async def _old_beside_new(self, fault: Fault) -> int:
        """Replace a process by an old one, as a rollback does. Later replace the old one by a new one, as an upgrade
        does.
        Returns how many steps the old worker began, or how many bytes the old API sent to PostgreSQL.
        """
        slot = self._installation.slots[fault.target]
        slot.release = await self._installation.servers.release()
        link = self._installation.links[fault.target, "postgres"]
        old = await self._replace(slot)
        sent_before = link.carried.sent
        await asyncio.sleep(fault.seconds)
        sent = link.carried.sent - sent_before
        name, slot.release = slot.process_name, None
        slot.signal(signal.SIGTERM)
        if not old or name != old:
            return 0
        return sent if slot.name.startswith("api") else self._steps_begun_by(old)

    def _steps_begun_by(self, process: str) -> int:
        lines = journal.read(self._installation.journal)
        return sum(line["what"] == "begin" and line["process"] == process for line in lines)

    async def _upgrade(self, _fault: Fault) -> int:
        """Upgrade the schema while the old processes serve; then each process, one after another."""
        before = await self._revision()
        for nth in range(_MIGRATIONS):
            try:
                await self._migrate(2**nth)
                break
            except RuntimeError:
                if nth == _MIGRATIONS - 1:
                    raise
        applied = await self._revision() - before
        await until_answered(self._watch_later_tables, within=_PATIENCE_SECONDS)
        replaced = 0
        for slot in self._installation.slots.values():
            if slot.release is not None:
                slot.release = None
                replaced += bool(await self._replace(slot))
        return applied + replaced if applied and replaced == len(self._installation.slots) else 0

    async def _roll_back(self, fault: Fault) -> int:
        """Replace every process by an old one for a while. The old processes use the new schema, with rows of new
        processes.

        Returns how many steps the old workers began; 0 if any old or new process did not serve.
        """
        slots, release = list(self._installation.slots.values()), await self._installation.servers.release()
        for slot in slots:
            slot.release = release
        old = [await self._replace(slot) for slot in slots]
        await asyncio.sleep(fault.seconds)
        begun = sum(map(self._steps_begun_by, old))
        for slot in slots:
            slot.release = None
        new = [await self._replace(slot) for slot in slots]
        return begun if all(old) and all(new) else 0

    async def _migrate(self, lock_seconds: int) -> None:
        """Run `leasehold migrate`. `lock_seconds`: how long it waits for a lock. On a busy machine transactions last
        for seconds: the caller lets each try wait longer than the last, as an operator would.
        """
        environment = {
            **os.environ,
            **as_variables(servers_of_database(self._installation.database_url)),
            "LEASEHOLD_MIGRATE_LOCK_SECONDS": str(lock_seconds),
            "LEASEHOLD_MIGRATE_SECONDS": str(_REVISION_SECONDS),
        }
        await migrate_with(_ROOT, environment, self._installation.directory / "migrate.log")

    async def _watch_later_tables(self) -> None:
        """Record the changes of the tables that the release lacks, for I10 and I25. Call this before a process of this
        code writes them.
        """
        async with self._installation.connection() as connection:
            await connection.execute(WATCH_LATER_TABLES)

    async def _revision(self) -> int:
        async def read() -> int:
            async with self._installation.connection() as connection:
                name = await connection.fetchval("SELECT version_num FROM alembic_version")
                return int(name.partition("_")[0])

        return await until_answered(read, within=_PATIENCE_SECONDS)

    async def _replace(self, slot: Slot) -> str:
        """Drain the slot's process. Returns the name of the next process once it serves; "" if it does not in time."""
        before = slot.generation
        slot.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while slot.generation == before:  # noqa: ASYNC110 - a slot has no event for it
                    await asyncio.sleep(0.05)
                await slot.until_up('"serving"' if slot.name.startswith("worker") else "Uvicorn")
                return slot.process_name
        return ""
