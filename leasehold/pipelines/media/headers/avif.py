"""Reads the header of an AVIF file: the size of its largest item or track, and the number of frames. An item is a still
image. A track is an animation; the format calls its frames samples.

The items and tracks of a file declare sizes. But a decoder allocates memory by the coded sizes, which are in the AV1
streams of the items and tracks. So this module refuses a file if a coded frame is larger than its item or track
declares. Exception: an item with several layers may declare the size of a small layer. Then the larger of its declared
and its coded width counts as its width, and likewise for its height.
"""

from __future__ import annotations

from collections.abc import Iterator

from leasehold.pipelines.media.headers import av1, heif_checks
from leasehold.pipelines.media.headers.avif_tracks import read_tracks
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.headers.heif_items import Item, Items, read_items, top_boxes
from leasehold.pipelines.media.refusals import corrupt_image

_LAYERS = (b"a1lx", b"a1op", b"lsel")  # properties of an item with layers
#: The start and the end of each piece of an item's bytes.
_Pieces = tuple[tuple[int, int], ...]


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image` or `unsupported_format`; struct.error or IndexError if the file
    ends too early.
    """
    outer_boxes = top_boxes(data)
    by_kind = {kind: [box for box in outer_boxes if box[0] == kind] for kind in (b"meta", b"moov")}
    movies = by_kind[b"moov"]
    if len(movies) > 1:
        raise corrupt_image("the file has several moov boxes")
    tracks = [track for movie in movies for track in read_tracks(data, movie)]
    streams = _Streams(data)
    sizes = [_checked_size(streams.read_track(track.samples), (track.width, track.height)) for track in tracks]
    if by_kind[b"meta"] or not movies:  # with neither of the boxes, `read_items` refuses the file
        sizes += _item_sizes(data, read_items(data, outer_boxes, may_share_bytes=True), streams)
    if not sizes:
        raise corrupt_image("the file has no picture")
    width, height = (max(sides) for sides in zip(*sizes, strict=True))
    return Header(width, height, max((len(track.samples) for track in tracks), default=1))


def _item_sizes(data: bytes, items: Items, streams: _Streams) -> list[av1.Size]:
    """Check the file's items. Returns the sizes of the stills, and of the grids (items that are put together from
    stills).
    """
    heif_checks.check_bytes_to_copy(items)
    # Items without bytes are left out, because a decoder skips them, too.
    stills = {
        number: _still_size(item, data, streams)
        for number, item in items.all.items()
        if item.kind == b"av01" and item.pieces
    }
    grids = {
        number: heif_checks.check_grid(item, data, stills)
        for number, item in items.all.items()
        if item.kind == b"grid" and item.pieces
    }
    heif_checks.check_auxiliaries(items, stills | grids)
    return [*stills.values(), *grids.values()]


# The size of a still. Raises Permanent `corrupt_image` if a coded frame is too large for it.
def _still_size(item: Item, data: bytes, streams: _Streams) -> av1.Size:
    declared, coded = heif_checks.declared_size(item, data), streams.read_item(item)
    if any(item.property(kind) is not None for kind in _LAYERS):
        return max(declared[0], coded[0]), max(declared[1], coded[1])
    return _checked_size(coded, declared)


def _checked_size(coded: av1.Size, declared: av1.Size) -> av1.Size:
    """The declared size. Raises Permanent `corrupt_image` if a coded frame is larger."""
    if coded[0] > declared[0] or coded[1] > declared[1]:
        raise corrupt_image("its header and its content disagree")
    return declared


class _Streams:
    """Reads the AV1 streams of a file: at most `av1.MAX_UNITS` units (headers, tiles, metadata) in all."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._units = 0
        self._by_pieces: dict[_Pieces, av1.Size] = {}

    def read_item(self, item: Item) -> av1.Size:
        """The largest coded width and height in an item. Encoders store equal tiles only once, so several items may
        have the same pieces. This class reads such pieces only once.
        """
        pieces = tuple(item.pieces)
        if pieces not in self._by_pieces:
            self._by_pieces[pieces] = self._read(iter([item.bytes_of(self._data)]))
        return self._by_pieces[pieces]

    def read_track(self, samples: list[tuple[int, int]]) -> av1.Size:
        return self._read(self._data[start:end] for start, end in samples)

    # The largest coded width and height in one AV1 stream, whose bytes are `samples`.
    def _read(self, samples: Iterator[bytes]) -> av1.Size:
        stream = av1.Stream(av1.MAX_UNITS - self._units)
        for sample in samples:
            stream.read(sample)
        self._units += stream.units
        if not stream.frames:
            raise corrupt_image("an item has no coded picture")
        return stream.width, stream.height
