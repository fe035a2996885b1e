"""Limits how many deliveries a worker makes at once for one tenant, and to one host. The step `deliver` uses this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

#: The kind of limit ("tenant" or "host"), and the name of the tenant or host.
_Key: TypeAlias = tuple[str, str]


class DeliveryLimits:
    """The deliveries in progress in this worker. A host gets at most `per_host` deliveries at once, and a tenant makes
    at most `per_tenant`. So a host that does not answer cannot hold all slots of the worker.

    A delivery may end, for example by its timeout, while a thread still resolves the name of its host. Such a delivery
    counts until the thread is free, because the deliveries of all tenants use the same threads.
    """

    def __init__(self, *, per_tenant: int, per_host: int) -> None:
        self._at_most = {"tenant": per_tenant, "host": per_host}
        self._in_progress: Counter[_Key] = Counter()
        #: Deliveries that have ended, each with its lookups, some of which may not have ended yet.
        self._resolving: list[tuple[Sequence[_Key], Sequence[Future[Any]]]] = []

    @contextmanager
    def try_acquire(self, *, tenant: str, host: str, lookups: Sequence[Future[Any]] = ()) -> Iterator[bool]:
        """Count one delivery while the block runs, and after the block until all `lookups` have ended. `lookups`: a
        future for each thread that resolves the host's name; the block may add to the list. Yields False, and counts
        nothing, if the tenant or the host has reached its limit.
        """
        self._release_resolved()
        keys = (("tenant", tenant), ("host", host))
        if any(self._in_progress[key] >= self._at_most[key[0]] for key in keys):
            yield False
            return
        self._in_progress.update(keys)
        try:
            yield True
        finally:
            self._resolving.append((keys, lookups))
            self._release_resolved()

    def _release_resolved(self) -> None:
        """Stop counting the ended deliveries whose lookups have all ended."""
        still_resolving = []
        for keys, lookups in self._resolving:
            if not all(lookup.done() for lookup in lookups):
                still_resolving.append((keys, lookups))
                continue
            for key in keys:
                self._in_progress[key] -= 1
                if not self._in_progress[key]:
                    del self._in_progress[key]
        self._resolving = still_resolving
