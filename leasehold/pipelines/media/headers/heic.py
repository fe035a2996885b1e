"""HEIC: a picture that is one HEVC still or a grid of them, as cameras write them.

A file may also be made of overlays, of copies, of other codecs, or be a sequence: that is refused here. The library
behind has had a long list of faults in those, and no camera writes them.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers import hevc
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.headers.heif_items import Item, Items, read_items
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

#: Stills, grids of them, and what lies beside: thumbnails, the map of a wider range of light, metadata.
_KINDS = {b"hvc1", b"grid", b"jpeg", b"tmap", b"Exif", b"mime", b"uri ", b"iptc"}
_MAX_COPIED = 64 * 1024 * 1024  # bytes of properties and metadata, for each item that has them
_BLOCK = 64  # the largest block of HEVC: a coded picture is filled up to whole ones
_SPARE = 0x01


def read(data: bytes) -> Header:
    """Raises Permanent: corrupt_image, unsupported_format; struct.error or IndexError where it ends too early."""
    items = read_items(data)
    for item in items.all.values():
        if item.kind not in _KINDS:
            raise unsupported_format(f"HEIC with a part of kind {item.kind.decode('ascii', 'replace')!r} is not")
    if items.primary.kind not in (b"hvc1", b"grid"):
        raise unsupported_format("HEIC whose picture is no HEVC still is not")
    _check_copies(items)
    _check_chains(items)
    sizes = [_check(items, item, data) for item in items.all.values() if item.kind in (b"hvc1", b"grid")]
    width, height = (max(sides) for sides in zip(*sizes, strict=True))
    turns = sum(data[start] & 1 for kind, start, _ in items.primary.properties if kind == b"irot")
    return Header(height, width) if turns % 2 else Header(width, height)


def _check_copies(items: Items) -> None:
    """A decoder reads an item's properties and metadata for each item that names them."""
    copied = sum(end - start for item in items.all.values() for _, start, end in item.properties)
    for item in items.all.values():
        copied += sum(end - start for start, end in item.parts) * len(item.names.get(b"cdsc", []))
    if copied > _MAX_COPIED:
        raise corrupt_image("its contents name more bytes than it has")


def _check_chains(items: Items) -> None:
    """What belongs to a picture has nothing that belongs to it, so nothing goes in a circle."""
    for kind in (b"auxl", b"thmb"):
        for item in items.all.values():
            for number in item.names.get(kind, []):
                if number not in items.all or items.all[number].names.get(kind):
                    raise corrupt_image("its parts belong to each other")


def _check(items: Items, item: Item, data: bytes) -> hevc.Size:
    """Give the item's size when what it is made of agrees."""
    said = item.property(b"ispe")
    if said is None:
        raise corrupt_image("it does not say its size")
    width, height = struct.unpack_from(">II", data, said[1] + 4)
    if item.kind == b"hvc1":
        _check_still(item, data, width, height)
    else:
        _check_grid(items, item, data, (width, height))
    return width, height


def _check_still(item: Item, data: bytes, width: int, height: int) -> None:
    configuration = item.property(b"hvcC")
    if configuration is None:
        raise corrupt_image("it has no parameters")
    length_size, sizes = hevc.configured(data, *configuration[1:])
    sizes += hevc.coded(item.bytes_of(data), length_size)
    for wide, high in sizes:
        if wide >= width + _BLOCK or high >= height + _BLOCK:
            raise corrupt_image("its header and its content disagree")


def _check_grid(items: Items, item: Item, data: bytes, size: hevc.Size) -> None:
    """Its tiles are stills, each is used once, and together they are not much larger than it is."""
    content = item.bytes_of(data)
    _, flags, rows, columns = struct.unpack_from(">4B", content, 0)
    rows, columns = rows + 1, columns + 1
    width, height = struct.unpack_from(">II" if flags & _SPARE else ">HH", content, 4)
    tiles = item.names.get(b"dimg", [])
    if (width, height) != size or len(set(tiles)) != rows * columns or len(tiles) != rows * columns:
        raise corrupt_image("its header and its content disagree")
    for number in tiles:
        tile = items.all.get(number)
        said = tile.property(b"ispe") if tile is not None and tile.kind == b"hvc1" else None
        if said is None:
            raise corrupt_image("its tiles are no pictures")
        wide, high = struct.unpack_from(">II", data, said[1] + 4)
        if (columns - 1) * wide >= width or (rows - 1) * high >= height:
            raise corrupt_image("its tiles are larger than the picture")
