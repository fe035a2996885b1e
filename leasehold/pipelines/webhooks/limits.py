"""Limits how many deliveries of one tenant, and to one host, a worker makes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DeliveryLimits:
    """The deliveries in progress. A host that does not answer holds at most `per_host` slots, and a tenant at most
    `per_tenant`.
    """

    def __init__(self, *, per_tenant: int, per_host: int) -> None:
        self._at_most = {"tenant": per_tenant, "host": per_host}
        self._busy: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def try_acquire(self, *, tenant: str, host: str) -> Iterator[bool]:
        """Count one delivery while the block runs. Yields False, and counts nothing, if the tenant or the host has
        reached its limit.
        """
        needed = (("tenant", tenant), ("host", host))
        if any(self._busy[holder] >= self._at_most[holder[0]] for holder in needed):
            yield False
            return
        self._busy.update(needed)
        try:
            yield True
        finally:
            for holder in needed:
                self._busy[holder] -= 1
                if not self._busy[holder]:
                    del self._busy[holder]
