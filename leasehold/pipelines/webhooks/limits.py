"""Limits how many deliveries a worker makes at once for one tenant, and to one host. The `deliver` step calls it."""

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
        self._in_progress: Counter[tuple[str, str]] = Counter()  # by ("tenant" or "host", name)

    @contextmanager
    def try_acquire(self, *, tenant: str, host: str) -> Iterator[bool]:
        """Count one delivery while the block runs. Yields False, and counts nothing, if the tenant or the host has
        reached its limit.
        """
        keys = (("tenant", tenant), ("host", host))
        if any(self._in_progress[key] >= self._at_most[key[0]] for key in keys):
            yield False
            return
        self._in_progress.update(keys)
        try:
            yield True
        finally:
            for key in keys:
                self._in_progress[key] -= 1
                if not self._in_progress[key]:
                    del self._in_progress[key]
