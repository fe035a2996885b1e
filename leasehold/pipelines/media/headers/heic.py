"""Reads and checks the header of a HEIC file that is one HEVC still or a grid of stills, as cameras write them.

HEIC also allows overlays, copies, other codecs and sequences. These are refused: the decoder's library has had a long
list of faults in them, and no camera writes them.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers import hevc
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.headers.heif_items import Item, Items, read_items
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

#: The accepted kinds of items: stills, grids of stills, thumbnails, gain maps (HDR) and metadata.
_ITEM_KINDS = {b"hvc1", b"grid", b"jpeg", b"tmap", b"Exif", b"mime", b"uri ", b"iptc"}
_MAX_COPIED_BYTES = 64 * 1024 * 1024  # of properties and metadata, counted once for each item that names them
_BLOCK = 64  # pixels of the largest block of HEVC: a coded picture is filled up to whole blocks
_LONG_SIZES = 0x01


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image` or `unsupported_format`; struct.error or IndexError if the file
    ends too early.
    """
    items = read_items(data)
    for item in items.all.values():
        if item.kind not in _ITEM_KINDS:
            raise unsupported_format(
                f"HEIC with a part of kind {item.kind.decode('ascii', 'replace')!r} is not accepted"
            )
    if items.primary.kind not in (b"hvc1", b"grid"):
        raise unsupported_format("HEIC whose picture is no HEVC still is not accepted")
    _check_copies(items)
    _check_chains(items)
    sizes = [_checked_size(items, item, data) for item in items.all.values() if item.kind in (b"hvc1", b"grid")]
    width, height = (max(sides) for sides in zip(*sizes, strict=True))
    quarter_turns = sum(data[start] & 1 for kind, start, _ in items.primary.properties if kind == b"irot")
    return Header(height, width) if quarter_turns % 2 else Header(width, height)


def _check_copies(items: Items) -> None:
    """Bound the bytes that a decoder copies: it reads properties and metadata again for each item that names them."""
    copied = sum(end - start for item in items.all.values() for _, start, end in item.properties)
    for item in items.all.values():
        copied += sum(end - start for start, end in item.parts) * len(item.references.get(b"cdsc", []))
    if copied > _MAX_COPIED_BYTES:
        raise corrupt_image("the items name more bytes than the file has")


def _check_chains(items: Items) -> None:
    """Refuse chains: an item that another item refers to must refer to none, so that references form no circle."""
    for kind in (b"auxl", b"thmb"):
        for item in items.all.values():
            for target in item.references.get(kind, []):
                if target not in items.all or items.all[target].references.get(kind):
                    raise corrupt_image("the references between its items form a chain")


def _checked_size(items: Items, item: Item, data: bytes) -> hevc.Size:
    """The declared size of an item. Raises Permanent if the item's content disagrees with it."""
    size_property = item.property(b"ispe")
    if size_property is None:
        raise corrupt_image("an item has no size")
    width, height = struct.unpack_from(">II", data, size_property[1] + 4)
    if item.kind == b"hvc1":
        _check_still(item, data, width, height)
    else:
        _check_grid(items, item, data, (width, height))
    return width, height


def _check_still(item: Item, data: bytes, width: int, height: int) -> None:
    configuration = item.property(b"hvcC")
    if configuration is None:
        raise corrupt_image("an item has no decoder parameters")
    length_size, sizes = hevc.parameter_sizes(data, *configuration[1:])
    sizes += hevc.coded_sizes(item.bytes_of(data), length_size)
    for coded_width, coded_height in sizes:
        if coded_width >= width + _BLOCK or coded_height >= height + _BLOCK:
            raise corrupt_image("its header and its content disagree")


def _check_grid(items: Items, item: Item, data: bytes, size: hevc.Size) -> None:
    """Check a grid: its tiles are stills, each is used once, and together they are not much larger than the grid."""
    content = item.bytes_of(data)
    _, flags, rows, columns = struct.unpack_from(">4B", content, 0)
    rows, columns = rows + 1, columns + 1
    width, height = struct.unpack_from(">II" if flags & _LONG_SIZES else ">HH", content, 4)
    tiles = item.references.get(b"dimg", [])
    if (width, height) != size or len(set(tiles)) != rows * columns or len(tiles) != rows * columns:
        raise corrupt_image("its header and its content disagree")
    for number in tiles:
        tile = items.all.get(number)
        size_property = tile.property(b"ispe") if tile is not None and tile.kind == b"hvc1" else None
        if size_property is None:
            raise corrupt_image("the tiles of the picture are no stills")
        tile_width, tile_height = struct.unpack_from(">II", data, size_property[1] + 4)
        if (columns - 1) * tile_width >= width or (rows - 1) * tile_height >= height:
            raise corrupt_image("the tiles are larger than the picture")
