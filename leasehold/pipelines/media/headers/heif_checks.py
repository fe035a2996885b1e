"""Checks of the items of a HEIF file that HEIC and AVIF share."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.heif_items import Item, Items
from leasehold.pipelines.media.refusals import corrupt_image

Size = tuple[int, int]

_MAX_COPIED_BYTES = 64 * 1024 * 1024  # of properties and metadata, counted once for each item that names them
_LONG_SIZES = 0x01
_MAX_AUXILIARIES = 16  # transparency, depth, portrait and gain maps of one picture


def check_copies(items: Items) -> None:
    """Bound the bytes that a decoder copies: it reads properties and metadata again for each item that names them."""
    copied = sum(end - start for item in items.all.values() for _, start, end in item.properties)
    for item in items.all.values():
        copied += sum(end - start for start, end in item.parts) * len(item.references.get(b"cdsc", []))
    if copied > _MAX_COPIED_BYTES:
        raise corrupt_image("the items name more bytes than the file has")


def declared_size(item: Item, data: bytes) -> Size:
    size_property = item.property(b"ispe")
    if size_property is None:
        raise corrupt_image("an item has no size")
    width, height = struct.unpack_from(">II", data, size_property[1] + 4)
    return width, height


def check_grid(item: Item, data: bytes, sizes: dict[int, Size]) -> Size:
    """The size of a grid. Its tiles are stills, each is used once, and together they are not much larger than the grid.

    `sizes`: number of an item -> its size, for the file's stills.
    """
    content = item.bytes_of(data)
    _, flags, rows, columns = struct.unpack_from(">4B", content, 0)
    rows, columns = rows + 1, columns + 1
    width, height = struct.unpack_from(">II" if flags & _LONG_SIZES else ">HH", content, 4)
    tiles = item.references.get(b"dimg", [])
    if (
        (width, height) != declared_size(item, data)
        or len(set(tiles)) != rows * columns
        or len(tiles) != rows * columns
    ):
        raise corrupt_image("its header and its content disagree")
    for number in tiles:
        if number not in sizes:
            raise corrupt_image("the tiles of the picture are no stills")
        tile_width, tile_height = sizes[number]
        if (columns - 1) * tile_width >= width or (rows - 1) * tile_height >= height:
            raise corrupt_image("the tiles are larger than the picture")
    return width, height


def check_auxiliaries(items: Items, sizes: dict[int, Size]) -> None:
    """An auxiliary picture, such as the transparency, is no larger than its picture, and a picture has few of them.

    A decoder also decodes those of each tile: else a small grid could cost the area of a large picture for each tile.
    """
    counts: dict[int, int] = {}
    for number, item in items.all.items():
        for target in item.references.get(b"auxl", []):
            counts[target] = counts.get(target, 0) + 1
            if number in sizes and target in sizes and not _fits(sizes[number], sizes[target]):
                raise corrupt_image("an auxiliary picture is larger than its picture")
            if counts[target] > _MAX_AUXILIARIES:
                raise corrupt_image("a picture has too many auxiliary pictures")


def _fits(size: Size, other: Size) -> bool:
    return size[0] <= other[0] and size[1] <= other[1]
