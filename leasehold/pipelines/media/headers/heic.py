"""Reads and checks the header of a HEIC file. The file must be one HEVC still or a grid of stills, as cameras write it.

HEIC also allows overlays, copies, other codecs and sequences. This module refuses these, because no camera writes them,
and the decoder's library has had many faults with them.
"""

from __future__ import annotations

from leasehold.pipelines.media.headers import heif_checks, hevc
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.headers.heif_items import Item, Items, read_items, top_boxes
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

#: The accepted kinds of items: stills, grids of stills, thumbnails, gain maps (HDR) and metadata.
_ITEM_KINDS = {b"hvc1", b"grid", b"jpeg", b"tmap", b"Exif", b"mime", b"uri ", b"iptc"}
_BLOCK = 64  # pixels along one side of the largest block of HEVC; a coded picture is filled up to whole blocks
_SEQUENCE_BOXES = {b"moov", b"moof"}  # parts that only the file of a sequence has


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image` or `unsupported_format`. Raises struct.error or IndexError if
    the file ends too early.
    """
    outer_boxes = top_boxes(data)  # the parts of the file: (kind, start, end) of each
    if any(kind in _SEQUENCE_BOXES for kind, _, _ in outer_boxes):
        raise unsupported_format("HEIC sequences are not accepted")
    items = read_items(data, outer_boxes)
    for item in items.all.values():
        if item.kind not in _ITEM_KINDS:
            raise unsupported_format(
                f"HEIC with a part of kind {item.kind.decode('ascii', 'replace')!r} is not accepted"
            )
    if items.primary.kind not in (b"hvc1", b"grid"):
        raise unsupported_format("HEIC whose picture is not an HEVC still image is not accepted")
    heif_checks.check_bytes_to_copy(items)
    _check_chains(items)
    # The number of a still or a grid -> its width and height.
    sizes = {number: _still_size(item, data) for number, item in items.all.items() if item.kind == b"hvc1"}
    grids = {number: item for number, item in items.all.items() if item.kind == b"grid"}
    sizes |= {number: heif_checks.check_grid(item, data, sizes) for number, item in grids.items()}
    heif_checks.check_auxiliaries(items, sizes)
    # A decoder allocates memory for each still and grid, so the header gets the largest width and the largest height.
    width, height = (max(sides) for sides in zip(*sizes.values(), strict=True))
    # The decoder also turns the picture (property `irot`). After an odd number of quarter turns the sides are swapped.
    quarter_turns = sum(data[start] & 1 for kind, start, _ in items.primary.properties if kind == b"irot")
    return Header(height, width) if quarter_turns % 2 else Header(width, height)


def _check_chains(items: Items) -> None:
    """Refuse chains of references. If item A refers to item B, then B must exist, and may have no reference of the same
    kind. So the references form no circle.
    """
    for kind in (b"auxl", b"thmb"):  # the references of auxiliary images and of thumbnails
        for item in items.all.values():
            for target in item.references.get(kind, []):
                if target not in items.all or items.all[target].references.get(kind):
                    raise corrupt_image("the references between its items form a chain")


def _still_size(item: Item, data: bytes) -> hevc.Size:
    """The declared size of a still. Raises Permanent if the item's content has a size that is larger by a block or
    more. A smaller difference is allowed, because a coded picture is filled up to whole blocks.
    """
    width, height = heif_checks.declared_size(item, data)
    configuration = item.property(b"hvcC")
    if configuration is None:
        raise corrupt_image("an item has no decoder parameters")
    # `length_size`: the number of bytes of the length before each unit of the content.
    length_size, sizes = hevc.parameter_sizes(data, *configuration[1:])
    sizes += hevc.coded_sizes(item.bytes_of(data), length_size)
    for coded_width, coded_height in sizes:
        if coded_width >= width + _BLOCK or coded_height >= height + _BLOCK:
            raise corrupt_image("its header and its content disagree")
    return width, height
