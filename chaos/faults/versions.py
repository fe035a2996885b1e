"""Releases: a process of the one that is out beside the new ones, and an upgrade from it under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from chaos import journal
from chaos.audit import WATCH_CALLS
from chaos.faults.effects import Deal
from chaos.plan import Fault
from chaos.release import migrate_with
from chaos.slots import Slot
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

_ROOT = Path(__file__).parents[2]
_PATIENCE = 90.0
_MIGRATIONS = 5
#: How long a try of the migration asks for the locks of one revision.
_REVISION_SECONDS = 20


class VersionFaults:
    """Each returns how many steps an old process did, or how many revisions and processes were brought up to date."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    @property
    def deals(self) -> Mapping[str, Deal]:
        return {"F42": self._old_beside_new, "F43": self._upgrade}

    async def _old_beside_new(self, fault: Fault) -> int:
        """A process is replaced by one of the release, as by a rollback, and that one by a new one, as by an upgrade.

        Returns how many steps the old one did; of an API, how many bytes it asked the database for.
        """
        slot = self._installation.slots[fault.target]
        slot.release = await self._installation.servers.release()
        link = self._installation.links[fault.target, "postgres"]
        old = await self._replaced(slot)
        asked = link.carried.sent
        await asyncio.sleep(fault.seconds)
        asked = link.carried.sent - asked
        name, slot.release = slot.process_name, None
        slot.signal(signal.SIGTERM)
        if not old or name != old:
            return 0
        return asked if slot.name.startswith("api") else self._begun_by(old)

    def _begun_by(self, process: str) -> int:
        lines = journal.read(self._installation.journal)
        return sum(line["what"] == "begin" and line["process"] == process for line in lines)

    async def _upgrade(self, _fault: Fault) -> int:
        """The schema first, while the old processes serve; then each process, one after another."""
        before = await self._revision()
        for nth in range(_MIGRATIONS):
            try:
                await self._migrate(2**nth)
                break
            except RuntimeError:
                if nth == _MIGRATIONS - 1:
                    raise
        applied = await self._revision() - before
        await until_answered(self._watch_calls, within=_PATIENCE)
        replaced = 0
        for slot in self._installation.slots.values():
            if slot.release is not None:
                slot.release = None
                replaced += bool(await self._replaced(slot))
        return applied + replaced if applied and replaced == len(self._installation.slots) else 0

    async def _migrate(self, lock_seconds: int) -> None:
        """On a busy machine transactions last for seconds, and no lock is free within one. The next try waits longer,
        as an operator would have it.
        """
        environment = {
            **os.environ,
            "LEASEHOLD_DATABASE_URL": self._installation.database_url,
            "LEASEHOLD_MIGRATE_LOCK_SECONDS": str(lock_seconds),
            "LEASEHOLD_MIGRATE_SECONDS": str(_REVISION_SECONDS),
        }
        await migrate_with(_ROOT, environment, self._installation.directory / "migrate.log")

    async def _watch_calls(self) -> None:
        """Before the first process that knows workflows: what they write is judged (I25)."""
        async with self._installation.connection() as connection:
            await connection.execute(WATCH_CALLS)

    async def _revision(self) -> int:
        async def ask() -> int:
            async with self._installation.connection() as connection:
                found = await connection.fetchval("SELECT version_num FROM alembic_version")
                return int(found.partition("_")[0])

        return await until_answered(ask, within=_PATIENCE)

    async def _replaced(self, slot: Slot) -> str:
        """Drain its process; returns the next one's name once that serves, or "" when it does not come."""
        before = slot.generation
        slot.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while slot.generation == before:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)
                await slot.until_up('"serving"' if slot.name.startswith("worker") else "Uvicorn")
                return slot.process_name
        return ""
