"""Records refused requests (no valid key, or a missing scope) in the audit. The API counts them in memory and writes
them every few seconds. Refusals with the same code, source and key share a row.

Anybody can send requests without end. So a refusal costs no statement and no lock, and one write has a bounded number
of rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeAlias

from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Pool
from leasehold.domain.audit import SHARED_CHAIN, Actor
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.periodic import Periodic

#: Seconds between two writes to the audit.
_FLUSH_SECONDS = 10.0
_MAX_PATH_CHARACTERS = 200
#: The code of a refusal, and the actor without the id of the request. Refusals with the same group share a row.
_Group: TypeAlias = tuple[str, Actor]
#: The actor of all refusals beyond the bound on groups. They are counted together, by code.
_OTHERS = Actor("key", "others")


@dataclass(frozen=True, slots=True)
class _FirstRefusal:
    """The first refusal of a group."""

    at: datetime
    path: str
    request_id: str | None


class Refusals:
    """Counts refusals, and writes them. `at_most`: the number of groups in one write; refusals of further groups are
    counted together, by code. A process that is killed loses the refusals of its last ten seconds.
    """

    def __init__(self, pool: Pool, at_most: int) -> None:
        self._pool = pool
        self._at_most = at_most
        self._counts: Counter[_Group] = Counter()
        self._firsts: dict[_Group, _FirstRefusal] = {}
        self._periodic_flush = Periodic("refusals", self._flush, every=_FLUSH_SECONDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._periodic_flush.run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self.flush()

    async def flush(self) -> None:
        """Write the rows now. If PostgreSQL does not answer, the refusals stay counted until the next write."""
        await self._periodic_flush.once()

    def add(self, code: str, actor: Actor, path: str) -> None:
        """Count a refusal: `code` is the problem's code."""
        first = _FirstRefusal(datetime.now(UTC), path[:_MAX_PATH_CHARACTERS], actor.request_id)
        self._count((code, replace(actor, request_id=None)), 1, first)

    def _count(self, group: _Group, number: int, first: _FirstRefusal) -> None:
        if group not in self._counts and len(self._counts) >= self._at_most:
            group = (group[0], _OTHERS)
        self._counts[group] += number
        known_first = self._firsts.get(group)
        if known_first is None or first.at < known_first.at:
            self._firsts[group] = first

    async def _flush(self) -> None:
        """Write all counted refusals, with one transaction for each audit chain. After an error, the refusals that were
        not written stay counted.
        """
        counts, firsts = self._counts, self._firsts
        self._counts, self._firsts = Counter(), {}
        while counts:
            chain = _chain_of(next(iter(counts)))
            groups = [group for group in counts if _chain_of(group) == chain]
            try:
                async with self._pool.acquire() as connection, connection.transaction():
                    for code, actor in groups:
                        first = firsts[code, actor]
                        await audit.record(
                            connection, replace(actor, request_id=first.request_id), "sign_in.refused",
                            Target("sign_in", code, chain),
                            count=counts[code, actor], first_at=first.at, first_path=first.path,
                        )  # fmt: skip
            except BaseException:
                for group, number in counts.items():  # put back what is not written; `_count` enforces the bound
                    self._count(group, number, firsts[group])
                raise
            for group in groups:
                del counts[group]


def _chain_of(group: _Group) -> str:
    """The audit chain that gets the group's row: the chain of the caller's tenant, or SHARED_CHAIN for an unknown
    caller. In a chain, each audit row has the hash of the row before.
    """
    return group[1].tenant_id or SHARED_CHAIN
