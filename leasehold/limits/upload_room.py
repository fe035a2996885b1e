"""How much of a tenant's bound on unfinished uploads is in use, remembered by each API process for a moment.

Counting a tenant's uploads under a lock lets one upload of the tenant begin after another: a commit each. Far from the
bound nobody needs that: the process counts without the lock, and reckons with what it counted until it counts again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic

from leasehold.db.database import Connection

#: An unfinished upload counts at least this much, so that a tenant's rows are bounded, too.
LEAST_COUNTED = 1024 * 1024
#: A count is good for so long, in seconds.
FRESH_SECONDS = 1.0
#: Up to this part of the bound a tenant is far from it. Each process may let in as much by itself while its count is
#: fresh, so that three of them at once stay below the bound.
_FAR = 0.25
#: Tenants that are remembered.
_MOST_TENANTS = 10_000

_COUNT = """
-- upload_room
SELECT coalesce(sum(greatest(bytes, $2)), 0)::bigint FROM upload WHERE tenant_id = $1 AND open
"""


async def count(connection: Connection, tenant_id: str) -> int:
    """Sum the bytes of the tenant's unfinished uploads."""
    counted: int = await connection.fetchval(_COUNT, tenant_id, LEAST_COUNTED)
    return counted


@dataclass(slots=True)
class _Count:
    used: int
    until: float  # by the monotonic clock


class UploadRoom:
    """`bound`: the bytes of unfinished uploads that a tenant may have."""

    def __init__(self, bound: int) -> None:
        self._far = _FAR * bound
        self._counts: OrderedDict[str, _Count] = OrderedDict()

    async def is_far(self, connection: Connection, tenant_id: str, size: int) -> bool:
        """Whether the tenant stays far from its bound with `size` bytes more. If so, they are reckoned with."""
        known = self._counts.get(tenant_id)
        if known is None or known.until <= monotonic():
            known = self._counts[tenant_id] = _Count(await count(connection, tenant_id), monotonic() + FRESH_SECONDS)
            self._counts.move_to_end(tenant_id)
            if len(self._counts) > _MOST_TENANTS:
                self._counts.popitem(last=False)
        if known.used + size > self._far:
            return False
        known.used += size
        return True
