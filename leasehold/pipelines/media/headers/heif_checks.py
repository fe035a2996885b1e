"""The checks that are the same for HEIC and AVIF. Both are HEIF files, which have numbered items, such as pictures,
tiles of pictures and metadata.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.heif_items import Item, Items
from leasehold.pipelines.media.refusals import corrupt_image

Size = tuple[int, int]  # width and height in pixels

#: The most bytes of properties and metadata. If two items refer to the same bytes, these bytes count twice, because a
#: decoder copies them twice.
_MAX_COPIED_BYTES = 64 * 1024 * 1024
#: The kind of the reference from a metadata item to the items that it describes. "cdsc" stands for "content describes".
_DESCRIBES = b"cdsc"
#: The position of the width and the height in a size property (`ispe`). Before them are the version and the flags.
_SIZE_OFFSET = 4
_LONG_SIZES = 0x01  # the flag of a grid whose width and height have 32 bits each, not 16
_MAX_AUXILIARIES = 16  # transparency, depth, portrait and gain maps of one picture


def check_bytes_to_copy(items: Items) -> None:
    """Refuse a file of which a decoder would copy too many bytes. For each item, a decoder copies all properties and
    metadata of the item, even those that it has copied for another item. Raises Permanent `corrupt_image`.
    """
    copied = sum(end - start for item in items.all.values() for _, start, end in item.properties)
    # A decoder copies a metadata item once for each item that it describes.
    for item in items.all.values():
        copied += sum(end - start for start, end in item.pieces) * len(item.references.get(_DESCRIBES, []))
    if copied > _MAX_COPIED_BYTES:
        raise corrupt_image("its items have more than 64 MiB of properties and metadata")


def declared_size(item: Item, data: bytes) -> Size:
    """The size in the item's properties. Raises Permanent `corrupt_image` if the properties have no size."""
    size_property = item.property(b"ispe")
    if size_property is None:
        raise corrupt_image("an item has no size")
    _, start, _ = size_property
    width, height = struct.unpack_from(">II", data, start + _SIZE_OFFSET)
    return width, height


def check_grid(item: Item, data: bytes, sizes: dict[int, Size]) -> Size:
    """Check a grid (a picture that is made of tiles), and return its size. Each tile must be a still image, and the
    grid must use it only once. No row or column of tiles may lie outside the picture. Raises Permanent `corrupt_image`.

    `sizes`: the number of each still image of the file -> its size.
    """
    content = item.bytes_of(data)
    _, flags, rows, columns = struct.unpack_from(">4B", content, 0)
    rows, columns = rows + 1, columns + 1  # the file has both numbers minus 1
    width, height = struct.unpack_from(">II" if flags & _LONG_SIZES else ">HH", content, 4)
    tiles = item.references.get(b"dimg", [])  # the numbers of the items that are the tiles
    if (
        (width, height) != declared_size(item, data)
        or len(set(tiles)) != rows * columns
        or len(tiles) != rows * columns
    ):
        raise corrupt_image("its header and its content disagree")
    for number in tiles:
        if number not in sizes:
            raise corrupt_image("the tiles of the picture are not still images")
        tile_width, tile_height = sizes[number]
        if (columns - 1) * tile_width >= width or (rows - 1) * tile_height >= height:
            raise corrupt_image("a row or column of tiles lies outside the picture")
    return width, height


def check_auxiliaries(items: Items, sizes: dict[int, Size]) -> None:
    """Check that an auxiliary picture (such as the transparency) is no larger than its picture, and that a picture has
    few auxiliary pictures. Raises Permanent `corrupt_image`.

    A decoder decodes the auxiliary pictures of each tile, too. Without this check, each tile of a small grid could cost
    the time of a large picture.
    """
    counts: dict[int, int] = {}
    for number, item in items.all.items():
        for target in item.references.get(b"auxl", []):  # the pictures to which this auxiliary picture belongs
            counts[target] = counts.get(target, 0) + 1
            if number in sizes and target in sizes and not _fits_into(sizes[number], sizes[target]):
                raise corrupt_image("an auxiliary picture is larger than its picture")
            if counts[target] > _MAX_AUXILIARIES:
                raise corrupt_image("a picture has too many auxiliary pictures")


def _fits_into(inner: Size, outer: Size) -> bool:
    return inner[0] <= outer[0] and inner[1] <= outer[1]
