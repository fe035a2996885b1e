"""Records refused requests (no valid key, or no scope) in the audit. They are counted in memory and written every few
seconds. Refusals with the same code, source and key share a row.

A stranger can send requests without end. So a refusal costs no statement and no lock, and the number of rows in one
write is bounded.
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

_EVERY_SECONDS = 10.0
_MAX_PATH_CHARACTERS = 200
#: The code of a refusal, and the actor without the id of the request. Refusals with equal values share a count.
_Refused: TypeAlias = tuple[str, Actor]
#: The actor of all refusals beyond the bound.
_OTHERS = Actor("key", "others")


@dataclass(frozen=True, slots=True)
class _FirstRefusal:
    """The first of equal refusals."""

    at: datetime
    path: str
    request_id: str | None


class Refusals:
    """Counts refusals, and writes them. `at_most`: the number of different refusals in one write; further ones are
    counted together, by code. A process that is killed loses the refusals of the last ten seconds.
    """

    def __init__(self, pool: Pool, at_most: int) -> None:
        self._pool = pool
        self._at_most = at_most
        self._counts: Counter[_Refused] = Counter()
        self._firsts: dict[_Refused, _FirstRefusal] = {}
        self._periodic_flush = Periodic("refusals", self._flush, every=_EVERY_SECONDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._periodic_flush.run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self.flush()

    async def flush(self) -> None:
        """Write the rows now. If the database is away, the refusals stay counted until the next write."""
        await self._periodic_flush.once()

    def add(self, code: str, actor: Actor, path: str) -> None:
        """Count a refusal: `code` is the problem's code."""
        first = _FirstRefusal(datetime.now(UTC), path[:_MAX_PATH_CHARACTERS], actor.request_id)
        self._count((code, replace(actor, request_id=None)), 1, first)

    def _count(self, refused: _Refused, number: int, first: _FirstRefusal) -> None:
        if refused not in self._counts and len(self._counts) >= self._at_most:
            refused = (refused[0], _OTHERS)
        self._counts[refused] += number
        known = self._firsts.get(refused)
        if known is None or first.at < known.at:
            self._firsts[refused] = first

    async def _flush(self) -> None:
        """Write the rows of each audit chain in a transaction of its own."""
        counts, firsts = self._counts, self._firsts
        self._counts, self._firsts = Counter(), {}
        while counts:  # each turn writes one chain
            chain = _chain_of(next(iter(counts)))
            in_chain = [refused for refused in counts if _chain_of(refused) == chain]
            try:
                async with self._pool.acquire() as connection, connection.transaction():
                    for code, actor in in_chain:
                        first = firsts[code, actor]
                        await audit.record(
                            connection, replace(actor, request_id=first.request_id), "sign_in.refused",
                            Target("sign_in", code, chain),
                            count=counts[code, actor], first_at=first.at, first_path=first.path,
                        )  # fmt: skip
            except BaseException:
                for refused, number in counts.items():  # count them again: `_count` keeps the bound
                    self._count(refused, number, firsts[refused])
                raise
            for refused in in_chain:
                del counts[refused]


def _chain_of(refused: _Refused) -> str:
    """The audit chain of the row: the chain of the caller's tenant, or for a stranger the chain of all tenants."""
    return refused[1].tenant_id or SHARED_CHAIN
