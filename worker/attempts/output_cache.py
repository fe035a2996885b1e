"""Keeps recent outputs in memory. A job's next step usually runs in the same worker, which then downloads nothing."""

from __future__ import annotations

from collections import OrderedDict

#: The attempts (publishing.py) cache no larger output, because its download takes little time, compared with the work
#: on it.
MAX_OUTPUT_BYTES = 8 * 1024 * 1024
#: All cached outputs together have at most this many bytes. The cache removes the oldest outputs first.
MAX_BYTES = 32 * 1024 * 1024


class OutputCache:
    """The cached outputs by object key and digest. If other bytes are stored under the same key, they have another
    digest. So `find` never returns wrong bytes.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._outputs: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def add(self, key: str, sha256: str, data: bytes) -> None:
        """Cache `data`, which is in the store under `key` and has the digest `sha256`."""
        self._bytes += len(data) - len(self._outputs.pop((key, sha256), b""))
        self._outputs[key, sha256] = data
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._outputs.popitem(last=False)[1])

    def find(self, key: str, sha256: str | None) -> bytes | None:
        """The cached bytes, or None. If the digest is unknown (`sha256` is None), the result is None, because the
        object may have changed since it was cached.
        """
        return None if sha256 is None else self._outputs.get((key, sha256))
