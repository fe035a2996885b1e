"""Reads the tracks of an AVIF sequence: their declared sizes, and the positions of their samples (frames). AVIF is made
of nested boxes (ISO 14496-12). A `Box` is (kind, start of its content, end). A chunk is a piece of the file that has
several samples of a track, without gaps between them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

from leasehold.pipelines.media.headers.boxes import Box, boxes
from leasehold.pipelines.media.refusals import corrupt_image

MAX_SAMPLES = 20_000  # all tracks together may have at most this many
MAX_BOXES = 1000  # a box may directly contain at most this many

_FULL_HEADER = 4  # bytes of version and flags at the start of a full box
_FIXED_POINT_BITS = 16  # a track's width and height have a fraction of this many bits
_SIZE_AT = {0: 76, 1: 88}  # where a `tkhd` box has its width and height, by its version
_ENTRY_SIZE_AT = 24  # where an `av01` box has its width and height


@dataclass(frozen=True, slots=True)
class Track:
    """An AV1 track with its declared size. `samples`: start and end of each sample in the file."""

    width: int
    height: int
    samples: list[tuple[int, int]]


def read_tracks(data: bytes, movie: Box) -> list[Track]:
    """The AV1 tracks in a `moov` box.

    Raises Permanent `corrupt_image`; struct.error or IndexError if the file ends too early.
    """
    tracks: list[Track] = []
    samples_left, bytes_left = MAX_SAMPLES, len(data)
    for box in _children_of(data, movie, b"trak"):
        track = _read_track(data, box, samples_left, bytes_left)
        if track is not None:
            tracks.append(track)
            samples_left -= len(track.samples)
            bytes_left -= sum(end - start for start, end in track.samples)
    return tracks


def _read_track(data: bytes, box: Box, samples_left: int, bytes_left: int) -> Track | None:
    """The track in the box `trak`. Returns None if a decoder skips the track, because it is no picture or has an
    unknown codec.

    `samples_left`, `bytes_left`: how many samples and bytes this track may have. All tracks together may have
    MAX_SAMPLES samples, and as many bytes as the file. The two numbers are what the earlier tracks have left.
    """
    table = _sample_table(data, box)
    if table is None:
        return None
    entries = [
        entry
        for kind, start, end in _children_of(data, table, b"stsd")
        # Skip the number of entries, which has 4 bytes. An entry `av01` describes samples of AV1.
        for entry in _children_of(data, (kind, start + _FULL_HEADER + 4, end), b"av01")
    ]
    if not entries:
        return None
    _, header_start, _ = _only_child(data, box, b"tkhd")
    if data[header_start] not in _SIZE_AT:
        raise corrupt_image("a track has a header of an unknown version")
    track_size = struct.unpack_from(">II", data, header_start + _SIZE_AT[data[header_start]])
    sizes = [struct.unpack_from(">HH", data, start + _ENTRY_SIZE_AT) for _, start, _ in entries]
    sizes.append((track_size[0] >> _FIXED_POINT_BITS, track_size[1] >> _FIXED_POINT_BITS))
    width, height = (max(sides) for sides in zip(*sizes, strict=True))
    return Track(width, height, list(_read_samples(data, table, samples_left, bytes_left)))


def _sample_table(data: bytes, track: Box) -> Box | None:
    """The `stbl` box, which is three levels down in the track."""
    box = track
    for kind in (b"mdia", b"minf", b"stbl"):
        inner = _children_of(data, box, kind)
        if len(inner) > 1:
            raise corrupt_image("a track has a box twice")
        if not inner:
            return None
        box = inner[0]
    return box


def _read_samples(data: bytes, table: Box, samples_left: int, bytes_left: int) -> Iterator[tuple[int, int]]:
    """Start and end of each sample in the file. `table`: the `stbl` box. `samples_left`, `bytes_left`: as for
    `_read_track`.
    """
    offsets, sample_counts, sizes = _sample_tables(data, table)
    total = 0
    for offset, count in zip(offsets, sample_counts, strict=True):
        total += count
        # An empty chunk (a `count` of 0) is refused.
        if not 0 < count <= total <= samples_left:
            raise corrupt_image("a track has too many samples, or a chunk without one")
        position = offset
        for _ in range(count):
            size = next(sizes, 0)  # 0: there are fewer sizes than samples
            if not 0 < size <= len(data) - position:
                raise corrupt_image("a sample has no bytes, or more bytes than the file")
            bytes_left -= size
            if bytes_left < 0:
                raise corrupt_image("the tracks name more bytes than the file has")
            yield position, position + size
            position += size


def _sample_tables(data: bytes, table: Box) -> tuple[Sequence[int], Sequence[int], Iterator[int]]:
    """The position of each chunk (from `stco` or `co64`), the number of samples in each chunk (`stsc`), and the size of
    each sample (`stsz`).
    """
    is_long = not _children_of(data, table, b"stco")
    offsets = _read_numbers(data, _only_child(data, table, b"co64" if is_long else b"stco"), "Q" if is_long else "I")
    chunk_rows = _read_numbers(data, _only_child(data, table, b"stsc"), "III")
    sizes_box = _only_child(data, table, b"stsz")
    (same_size,) = struct.unpack_from(">I", data, sizes_box[1] + _FULL_HEADER)  # 0: each sample has a size of its own
    sizes = repeat(same_size) if same_size else iter(_read_numbers(data, sizes_box, "I", skipped=4))
    return offsets, _samples_by_chunk(chunk_rows[::3], chunk_rows[1::3], len(offsets)), sizes


def _samples_by_chunk(first_chunks: Sequence[int], counts: Sequence[int], chunks: int) -> list[int]:
    """How many samples each of the `chunks` chunks has. `counts[i]` is the number for each chunk from `first_chunks[i]`
    up to the chunk before `first_chunks[i + 1]`. Chunks are numbered from 1.

    For example, with 5 chunks, `first_chunks` (1, 4) and `counts` (10, 3), the result is [10, 10, 10, 3, 3].
    """
    if not first_chunks or first_chunks[0] != 1 or any(later <= first for first, later in pairwise(first_chunks)):
        raise corrupt_image("the samples of a track contradict themselves")
    ends = [min(end, chunks + 1) for end in (*first_chunks[1:], chunks + 1)]
    ranges = zip(first_chunks, ends, counts, strict=True)
    return [count for first, end, count in ranges for _ in range(first, end)]


def _read_numbers(data: bytes, box: Box, row_format: str, *, skipped: int = 0) -> tuple[int, ...]:
    """The numbers in a table with rows of `row_format`. `skipped`: how many bytes are between the full header (version
    and flags) and the number of rows.
    """
    _, start, _ = box
    (count,) = struct.unpack_from(">I", data, start + _FULL_HEADER + skipped)
    if count > MAX_SAMPLES:
        raise corrupt_image("a track has too many samples")
    return struct.unpack_from(f">{row_format * count}", data, start + _FULL_HEADER + skipped + 4)


def _only_child(data: bytes, parent: Box, kind: bytes) -> Box:
    children = _children_of(data, parent, kind)
    if len(children) != 1:
        raise corrupt_image("a track lacks a box, or has it twice")
    return children[0]


def _children_of(data: bytes, parent: Box, kind: bytes) -> list[Box]:
    """The boxes of this kind in the box `parent`."""
    _, start, end = parent
    children: list[Box] = []
    for number, box in enumerate(boxes(data, start, end)):
        if number >= MAX_BOXES:
            raise corrupt_image("the file has too many boxes")
        if box[0] == kind:
            children.append(box)
    return children
