"""Remembers, in an API process and for a moment, how many bytes of unfinished uploads each tenant has.

An exact count needs a lock, and the tenant's other uploads must wait for this lock. While a tenant is far from its
bound, an estimate is enough. In that case the process counts without a lock, remembers the count for a moment, and adds
each new upload to the count.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic

from leasehold.db.database import Connection

#: An unfinished upload counts at least this many bytes, because the bound on bytes must also bound the number of rows.
LEAST_COUNTED = 1024 * 1024
#: Seconds for which a process uses a count.
FRESH_SECONDS = 1.0
#: A tenant is far from its bound while it uses at most this fraction of the bound. A process with a fresh count does
#: not see the uploads that other processes admit. So in the worst case, within FRESH_SECONDS, each process except one
#: admits this fraction of the bound in addition to the bound itself.
_FAR_SHARE = 0.25
#: A process remembers the counts of at most this many tenants.
_MAX_TENANTS = 10_000

# $1 tenant, $2 LEAST_COUNTED.
_COUNT = """
-- upload_room
SELECT coalesce(sum(greatest(bytes, $2)), 0)::bigint FROM upload WHERE tenant_id = $1 AND open
"""


async def count(connection: Connection, tenant_id: str) -> int:
    """Sum the bytes of the tenant's unfinished uploads, each with at least LEAST_COUNTED."""
    counted: int = await connection.fetchval(_COUNT, tenant_id, LEAST_COUNTED)
    return counted


@dataclass(slots=True)
class _Count:
    used_bytes: int
    fresh_until: float  # by the monotonic clock


class UploadRoom:
    """The remembered counts of all tenants. To each count, this process adds the uploads that it has admitted since.
    `bound`: the bytes of unfinished uploads that a tenant may have.
    """

    def __init__(self, bound: int) -> None:
        self._far_bytes = _FAR_SHARE * bound
        self._counts: OrderedDict[str, _Count] = OrderedDict()

    async def reserve(self, connection: Connection, tenant_id: str, size: int) -> bool:
        """Add `size` bytes to the remembered count if the tenant stays far from its bound, and return True. Otherwise
        add nothing and return False. The caller must then count exactly, and call `add_exactly`.
        """
        cached = self._fresh_count(tenant_id)
        if cached is None:
            used_bytes = await count(connection, tenant_id)
            cached = self._fresh_count(tenant_id)  # meanwhile, another upload of the tenant may have stored its count
        if cached is None:
            cached = self._remember(tenant_id, used_bytes)
        if cached.used_bytes + size > self._far_bytes:
            return False
        cached.used_bytes += size
        return True

    def add_exactly(self, tenant_id: str, used_bytes: int, size: int) -> None:
        """Add an upload of `size` bytes to the remembered count. The upload was admitted by an exact count of
        `used_bytes`. Without this call, `reserve` would not know of the upload, and would give its room to other
        uploads.
        """
        cached = self._fresh_count(tenant_id)
        if cached is None:
            self._remember(tenant_id, used_bytes + size)
        else:  # the exact count may be lower than the remembered count, because it lacks uncommitted uploads
            cached.used_bytes = max(cached.used_bytes, used_bytes) + size

    def _remember(self, tenant_id: str, used_bytes: int) -> _Count:
        counted = self._counts[tenant_id] = _Count(used_bytes, monotonic() + FRESH_SECONDS)
        self._counts.move_to_end(tenant_id)
        if len(self._counts) > _MAX_TENANTS:
            self._counts.popitem(last=False)
        return counted

    def _fresh_count(self, tenant_id: str) -> _Count | None:
        cached = self._counts.get(tenant_id)
        return None if cached is None or cached.fresh_until <= monotonic() else cached
