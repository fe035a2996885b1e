"""Outputs of late, in memory: a job's next step usually runs in the same worker, which then need not download them."""

from __future__ import annotations

from collections import OrderedDict

#: Larger outputs are not kept: to download them costs little beside what is done with them.
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
#: All of them together; the oldest go first.
MAX_BYTES = 32 * 1024 * 1024


class OutputCache:
    """By key and digest: other bytes that were committed under the same key are not found."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, key: str, sha256: str, data: bytes) -> None:
        """`sha256`: of `data`, which the store has."""
        self._bytes += len(data) - len(self._kept.pop((key, sha256), b""))
        self._kept[key, sha256] = data
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def find(self, key: str, sha256: str | None) -> bytes | None:
        """None also for what is of unknown digest: nobody knows whether it is still the same."""
        return None if sha256 is None else self._kept.get((key, sha256))
