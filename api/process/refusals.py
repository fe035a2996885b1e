"""Records refused requests (no valid key, or a missing scope) in the audit. The API counts them in memory and writes
them every few seconds. Refusals with the same code, source and key are counted in one row.

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
#: The refusals that one row of the audit counts have the same code, and the same actor apart from the request's id.
_Group: TypeAlias = tuple[str, Actor]
#: If a chain has too many groups, the further refusals count as those of an actor with this name, in a row for each
#: code.
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class _FirstRefusal:
    """The first refusal of a group."""

    at: datetime
    path: str
    request_id: str | None


class Refusals:
    """Counts refusals, and writes them. An audit chain is the rows of one tenant, or the rows of unknown callers.
    `at_most`: the most groups of one chain in one write. The refusals of further groups of the chain are counted
    together, by code. Each chain has its own bound, so unknown callers and other tenants cannot use up the rows of a
    tenant. A process that is killed loses the refusals of its last ten seconds.
    """

    def __init__(self, pool: Pool, at_most: int) -> None:
        self._pool = pool
        self._at_most = at_most
        self._counts: dict[str, Counter[_Group]] = {}  # audit chain -> group -> number of refusals
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
        """Count a refusal. `code`: the problem's code."""
        first = _FirstRefusal(datetime.now(UTC), path[:_MAX_PATH_CHARACTERS], actor.request_id)
        self._count((code, replace(actor, request_id=None)), 1, first)

    def _count(self, group: _Group, number: int, first: _FirstRefusal) -> None:
        # Count a group beyond the bound of its chain as _OTHERS. Keep the earliest refusal of each group.
        code, actor = group
        counts = self._counts.setdefault(_chain_of(actor), Counter())
        if group not in counts and len(counts) >= self._at_most:
            group = (code, Actor("key", _OTHERS, actor.tenant_id))
        counts[group] += number
        known_first = self._firsts.get(group)
        if known_first is None or first.at < known_first.at:
            self._firsts[group] = first

    async def _flush(self) -> None:
        """Write all counted refusals, with one transaction for each audit chain. After an error, the refusals that were
        not written stay counted.
        """
        counts_by_chain, firsts = self._counts, self._firsts
        self._counts, self._firsts = {}, {}
        while counts_by_chain:
            chain, counts = next(iter(counts_by_chain.items()))
            try:
                async with self._pool.acquire() as connection, connection.transaction():
                    for (code, actor), number in counts.items():
                        first = firsts[code, actor]
                        await audit.record(
                            connection, replace(actor, request_id=first.request_id), "sign_in.refused",
                            Target("sign_in", code, chain),
                            count=number, first_at=first.at, first_path=first.path,
                        )  # fmt: skip
            except BaseException:
                for unwritten in counts_by_chain.values():  # count the refusals again; `_count` enforces the bound
                    for group, number in unwritten.items():
                        self._count(group, number, firsts[group])
                raise
            del counts_by_chain[chain]


def _chain_of(actor: Actor) -> str:
    """The audit chain that gets the actor's rows: the chain of the caller's tenant, or SHARED_CHAIN for an unknown
    caller. In a chain, each audit row has the hash of the previous row.
    """
    return actor.tenant_id or SHARED_CHAIN
