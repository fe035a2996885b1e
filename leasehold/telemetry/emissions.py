"""Collects the chunks that a handler emits (the stream of an attempt) until the worker writes them to the database."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import orjson

#: The escape of a NUL character in JSON: `\u0000`. If an odd number of backslashes stands before `\u0000`, the last of
#: these backslashes escapes the backslash of `\u0000`, and the text is no NUL.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
#: The last chunk of a stream that is cut. It tells readers that further chunks were dropped.
_CUT = b'{"cut":true}'


def encoded_chunk(chunk: Any) -> bytes:
    """The JSON `{"chunk": ...}` of a chunk. A chunk is a text, or another JSON value. A text loses its NUL characters.

    Raises ValueError for another JSON value with a NUL character, and TypeError for a value without a JSON form.
    """
    if isinstance(chunk, str):
        chunk = chunk.replace("\x00", "")
    encoded = orjson.dumps({"chunk": chunk})
    if _NUL.search(encoded):
        raise ValueError("a chunk cannot hold a NUL character")
    return encoded


class Emissions:
    """The chunks of one attempt. Any thread may emit.

    `on_first`: called when a chunk arrives and `take` has returned all earlier chunks. The stream is cut at the first
    chunk beyond `max_chunks` or `max_bytes`. `_CUT` replaces this chunk, and later chunks are dropped.
    """

    __slots__ = ("_bytes", "_chunks", "_closed", "_cut", "_lock", "_max_bytes", "_max_chunks", "_written", "on_first")

    def __init__(self, max_chunks: int, max_bytes: int, lock: Lock, on_first: Callable[[], None] | None = None) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self._lock = lock
        self._chunks: list[bytes] = []
        self._written = 0  # chunks that `take` has returned
        self._bytes = 0
        self._cut = self._closed = False
        self.on_first = on_first

    def resume(self, chunks: int, size: int) -> None:
        """Count the chunks of the attempt that are stored already. `chunks`: their number; `size`: their bytes."""
        self._written, self._bytes = chunks, size

    def emit(self, chunk: Any) -> bool:
        """Add a chunk. Returns False if the stream has no room for it or is closed. Raises the errors of
        `encoded_chunk`.
        """
        return self._add(encoded_chunk(chunk))

    def _add(self, encoded: bytes) -> bool:
        with self._lock:
            if self._cut or self._closed:
                return False
            earlier_chunks = self._written + len(self._chunks)
            self._cut = earlier_chunks >= self._max_chunks or self._bytes + len(encoded) > self._max_bytes
            self._chunks.append(_CUT if self._cut else encoded)
            self._bytes += len(encoded)
            is_first = len(self._chunks) == 1
            fits = not self._cut
        if is_first and self.on_first is not None:
            self.on_first()
        return fits

    def take(self) -> tuple[int, list[bytes]]:
        """Take the chunks that came since the last call. Returns (number, chunks): the number of the first of these
        chunks, and the chunks, each as JSON. The attempt's first chunk has number 1.
        """
        with self._lock:
            chunks, self._chunks = self._chunks, []
            first_number = self._written + 1
            self._written += len(chunks)
        return first_number, chunks

    def for_later(self) -> Emissions:
        """Emissions with the same bounds, for a later step that this attempt's worker starts speculatively (before it
        has claimed the step). The step's own attempt may take the chunks over (`hand_over`).
        """
        return Emissions(self._max_chunks, self._max_bytes, self._lock)

    def hand_over(self, other: Emissions) -> None:
        """Give the chunks so far, and all later chunks, to `other`."""
        # `take` empties the buffer. So each later chunk comes into an empty buffer, and for such a chunk `_add` calls
        # `on_first`, which is this function.
        self.on_first = partial(self.hand_over, other)
        for chunk in self.take()[1]:
            other._add(chunk)

    def close(self) -> None:
        self._closed = True
