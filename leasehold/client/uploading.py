"""Reads files from the disk while they are sent, and reports how much of them was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

#: A function that the client calls with the number of bytes that were sent, and the number of all bytes.
OnProgress: TypeAlias = Callable[[int, int], None]
#: A file is read, and its progress is reported, in pieces of this many bytes.
_PIECE_BYTES = 256 * 1024


def pieces(path: Path, on_progress: OnProgress | None) -> Iterator[bytes]:
    """The file's bytes, piece by piece. Each piece counts as sent when the next one is requested."""
    size, sent_bytes = path.stat().st_size, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
            sent_bytes += len(piece)
            if on_progress is not None:
                on_progress(sent_bytes, size)


async def async_pieces(path: Path, on_progress: OnProgress | None) -> AsyncIterator[bytes]:
    """As `pieces`, without blocking the event loop."""
    piece_iterator = pieces(path, on_progress)
    while (piece := await asyncio.to_thread(next, piece_iterator, None)) is not None:
        yield piece


class ReportedFile:
    """A file of a form. Each read reports how many bytes of the whole form were sent.

    `total`: the bytes of all files of the form. `sent`: a list with one number, the bytes that were read so far. All
    files of the form share this list.
    """

    def __init__(self, file: IO[bytes], on_progress: OnProgress | None, total: int, sent: list[int]) -> None:
        self._file = file
        self._on_progress = on_progress
        self._total = total
        self._sent = sent

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._sent[0] += len(piece)
        if self._on_progress is not None and piece:
            self._on_progress(self._sent[0], self._total)
        return piece

    def __getattr__(self, name: str) -> Any:  # the HTTP library finds the length by seek, tell and fileno
        return getattr(self._file, name)
