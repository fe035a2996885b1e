"""How many deliveries of one tenant, and to one host, are under way in this worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DeliveryShares:
    """A receiver that does not answer holds at most `per_host` slots, and its tenant at most `per_tenant`."""

    def __init__(self, *, per_tenant: int, per_host: int) -> None:
        self._at_most = {"tenant": per_tenant, "host": per_host}
        self._busy: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def taken(self, *, tenant: str, host: str) -> Iterator[bool]:
        """False, and nothing is taken: the tenant or the host has as many under way as it may."""
        wanted = (("tenant", tenant), ("host", host))
        if any(self._busy[one] >= self._at_most[one[0]] for one in wanted):
            yield False
            return
        self._busy.update(wanted)
        try:
            yield True
        finally:
            for one in wanted:
                self._busy[one] -= 1
                if not self._busy[one]:
                    del self._busy[one]
