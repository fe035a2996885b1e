"""Reads the items of a HEIF file: their kinds, properties and references, and the positions of their bytes. A box is a
part of the file. `Box` is a tuple: the box's kind, and the start and the end of its content in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from leasehold.pipelines.media.headers.boxes import Box, boxes
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

MAX_ITEMS = 1000
MAX_BOXES = 5000  # side by side in the file, or directly inside one box
#: The most pieces of all items together. The box `iloc`, which lists the pieces, may describe a piece in zero bytes, so
#: a small file can name very many pieces.
MAX_PIECES = 20_000
_FULL_HEADER = 4  # bytes of version and flags at the start of a full box (a box that has them)
# The construction method of an item: its pieces are at positions in the file, or in the content of the box `idat`.
_IN_FILE, _IN_DATA = 0, 1


@dataclass(slots=True)
class Item:
    """One item of the file. `pieces`: the start and the end of each piece of its bytes in the file.

    `references`: the kind of a reference -> the numbers of the items that this item refers to.
    """

    kind: bytes
    pieces: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    properties: list[Box] = field(default_factory=list[Box])
    references: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])

    def bytes_of(self, data: bytes) -> bytes:
        return b"".join(data[start:end] for start, end in self.pieces)

    def property(self, kind: bytes) -> Box | None:
        return next((box for box in self.properties if box[0] == kind), None)


@dataclass(slots=True)
class Items:
    """The items of a file, by their numbers. `primary`: the item that is the picture itself."""

    all: dict[int, Item]
    primary: Item


def top_boxes(data: bytes) -> list[Box]:
    """The boxes of the file that are in no other box."""
    return _bounded_list(boxes(data, 0, len(data)))


def read_items(data: bytes, outer_boxes: list[Box], *, may_share_bytes: bool = False) -> Items:
    """Read the items. `outer_boxes`: from `top_boxes`. `may_share_bytes`: several items may have the same pieces.

    Raises Permanent `corrupt_image` or `unsupported_format`. Raises struct.error or IndexError if the file ends too
    early.
    """
    meta = _meta_boxes(data, outer_boxes)
    items = _list_items(data, meta[b"iinf"])
    data_box = meta.get(b"idat", (b"", 0, 0))  # a file without this box: an empty box
    for number, pieces in _read_locations(data, meta[b"iloc"], data_box) if b"iloc" in meta else ():
        _item_of(items, number).pieces += pieces
    _check_bytes(data, items, may_share_bytes=may_share_bytes)
    for number, properties in _read_properties(data, meta[b"iprp"]):
        _item_of(items, number).properties += properties
    for kind, source, targets in _read_references(data, meta[b"iref"]) if b"iref" in meta else ():
        _item_of(items, source).references.setdefault(kind, []).extend(targets)
    _, start, _ = meta[b"pitm"]
    (primary_number,) = struct.unpack_from(">H" if data[start] == 0 else ">I", data, start + _FULL_HEADER)
    return Items(items, _item_of(items, primary_number))


def _item_of(items: dict[int, Item], number: int) -> Item:
    if number not in items:
        raise corrupt_image("a reference names an item that the file does not have")
    return items[number]


def _bounded_list(sequence: Iterator[Box]) -> list[Box]:
    """The boxes as a list. Raises Permanent if there are more than MAX_BOXES."""
    bounded: list[Box] = []
    for box in sequence:
        bounded.append(box)
        if len(bounded) > MAX_BOXES:
            raise corrupt_image("the file has too many boxes")
    return bounded


def _meta_boxes(data: bytes, outer_boxes: list[Box]) -> dict[bytes, Box]:
    """The boxes in the file's only `meta` box, by kind. Each kind occurs once.

    `iinf` lists the items. `iloc` has the positions of their bytes, `iprp` their properties, and `iref` their
    references. `pitm` has the number of the primary item.
    """
    metas = [box for box in outer_boxes if box[0] == b"meta"]
    if len(metas) != 1:
        raise corrupt_image("the file has no meta box, or several")
    _, start, end = metas[0]
    by_kind: dict[bytes, Box] = {}
    for box in _bounded_list(boxes(data, start + _FULL_HEADER, end)):
        if box[0] in by_kind:
            raise corrupt_image("the meta box has a box twice")
        by_kind[box[0]] = box
    if not {b"iinf", b"iprp", b"pitm"} <= by_kind.keys():
        raise corrupt_image("the meta box is not complete")
    return by_kind


# The items that the box `iinf` lists, by their numbers. An item has only its kind yet.
def _list_items(data: bytes, box: Box) -> dict[int, Item]:
    _, start, end = box
    items: dict[int, Item] = {}
    # Skip the number of items, which has 2 or 4 bytes.
    for _, position, _ in _bounded_list(boxes(data, start + _FULL_HEADER + (2 if data[start] == 0 else 4), end)):
        version = data[position]
        number, kind = struct.unpack_from(">I2x4s" if version == 3 else ">H2x4s", data, position + _FULL_HEADER)  # noqa: PLR2004
        if version < 2 or number in items:  # noqa: PLR2004 - versions 0 and 1 have no kind
            raise corrupt_image("the list of items contradicts itself")
        items[number] = Item(kind)
    if len(items) > MAX_ITEMS:
        raise corrupt_image("the file has too many items")
    return items


def _read_locations(data: bytes, box: Box, data_box: Box) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The number of each item, with start and end of each of its pieces. `box`: the box `iloc`. `data_box`: `idat`.

    After the version and flags come four numbers of 4 bits each. They say how many bytes four later fields have: the
    offset and the length of a piece, the base offset of an item, and the index of a piece.
    """
    _, start, _ = box
    version = data[start]
    offset_size, length_size = data[start + 4] >> 4, data[start + 4] & 15
    base_size, index_size = data[start + 5] >> 4, data[start + 5] & 15 if version else 0
    number_size = 4 if version > 1 else 2
    reader = _Reader(data, start + 6)
    total = 0
    for _ in range(reader.unsigned(number_size)):
        number = reader.unsigned(number_size)
        construction_method = reader.unsigned(2) & 15 if version else _IN_FILE
        reader.unsigned(2)  # data_reference_index
        base = reader.unsigned(base_size)
        if construction_method not in (_IN_FILE, _IN_DATA):
            raise unsupported_format("items that are made of other items are not accepted")
        origin, limit = (0, len(data)) if construction_method == _IN_FILE else data_box[1:]
        count = reader.unsigned(2)
        total += count
        if total > MAX_PIECES:
            raise corrupt_image("the items have too many pieces")
        pieces = []
        for _ in range(count):
            reader.unsigned(index_size)  # extent_index
            piece_start = origin + base + reader.unsigned(offset_size)
            length = reader.unsigned(length_size)
            piece_end = piece_start + length if length else limit  # length 0: the piece goes up to the end
            if not origin <= piece_start <= piece_end <= limit:
                raise corrupt_image("the items name more bytes than the file has")
            pieces.append((piece_start, piece_end))
        yield number, pieces


def _check_bytes(data: bytes, items: dict[int, Item], *, may_share_bytes: bool) -> None:
    """Refuse a file whose pieces together have more bytes than the file, because a decoder would read the same bytes
    again and again. `may_share_bytes`: items with exactly the same pieces count once.
    """
    pieces_by_item = [tuple(item.pieces) for item in items.values()]
    counted_pieces = set(pieces_by_item) if may_share_bytes else pieces_by_item
    if sum(end - start for pieces in counted_pieces for start, end in pieces) > len(data):
        raise corrupt_image("the items name more bytes than the file has")


class _Reader:
    """Reads big-endian integers one after the other."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def unsigned(self, size: int) -> int:
        chunk = self._data[self._position : self._position + size]
        if len(chunk) < size:
            raise corrupt_image("the file ends inside its header")
        self._position += size
        return int.from_bytes(chunk, "big")


def _read_properties(data: bytes, box: Box) -> Iterator[tuple[int, list[Box]]]:
    """The number of each item, with its properties. `ipco` has all properties, and `ipma` has the indices of each
    item's properties, which begin at 1.
    """
    _, start, end = box
    inner = _bounded_list(boxes(data, start, end))
    properties = [
        property_box
        for kind, begin, stop in inner
        if kind == b"ipco"
        for property_box in _bounded_list(boxes(data, begin, stop))
    ]
    for kind, begin, _ in inner:
        if kind != b"ipma":
            continue
        has_long_indices = data[begin + 3] & 1  # the last of the flags
        reader = _Reader(data, begin + _FULL_HEADER)
        for _ in range(reader.unsigned(4)):
            number = reader.unsigned(4 if data[begin] else 2)
            indices = [
                reader.unsigned(2) & 0x7FFF if has_long_indices else reader.unsigned(1) & 0x7F
                for _ in range(reader.unsigned(1))
            ]
            if max(indices, default=0) > len(properties):
                raise corrupt_image("an item names a property that the file does not have")
            yield number, [properties[index - 1] for index in indices if index]  # index 0: no property


def _read_references(data: bytes, box: Box) -> Iterator[tuple[bytes, int, list[int]]]:
    """The references: the kind, the number of the item that refers, and the numbers of the items that it refers to."""
    _, start, end = box
    size = 4 if data[start] else 2
    for kind, position, _ in _bounded_list(boxes(data, start + _FULL_HEADER, end)):
        reader = _Reader(data, position)
        source = reader.unsigned(size)
        yield kind, source, [reader.unsigned(size) for _ in range(reader.unsigned(2))]
