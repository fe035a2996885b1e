"""The items of a HEIF file: which there are, what they are made of, and where their bytes lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from leasehold.pipelines.media.headers.boxes import Box, boxes
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

MAX_ITEMS = 1000
MAX_BOXES = 5000
_FULL = 4  # bytes of version and flags that a full box begins with
_SEQUENCES = {b"moov", b"moof"}
_IN_FILE, _IN_DATA = 0, 1


@dataclass(slots=True)
class Item:
    kind: bytes
    parts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    properties: list[Box] = field(default_factory=list[Box])
    #: kind of reference -> the items that this one names
    names: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])

    def bytes_of(self, data: bytes) -> bytes:
        return b"".join(data[start:end] for start, end in self.parts)

    def property(self, kind: bytes) -> Box | None:
        return next((box for box in self.properties if box[0] == kind), None)


@dataclass(slots=True)
class Items:
    all: dict[int, Item]
    primary: Item


def read_items(data: bytes) -> Items:
    """Raises Permanent: corrupt_image, unsupported_format; struct.error or IndexError where it ends too early."""
    meta = _meta(data)
    listed = _list_items(data, meta[b"iinf"])
    inside = meta.get(b"idat", (b"", 0, 0))
    for number, parts in _places(data, meta[b"iloc"], inside) if b"iloc" in meta else ():
        _of(listed, number).parts = parts
    for number, properties in _properties(data, meta[b"iprp"]):
        _of(listed, number).properties += properties
    for kind, source, targets in _references(data, meta[b"iref"]) if b"iref" in meta else ():
        _of(listed, source).names.setdefault(kind, []).extend(targets)
    _, start, _ = meta[b"pitm"]
    (first,) = struct.unpack_from(">H" if data[start] == 0 else ">I", data, start + _FULL)
    return Items(listed, _of(listed, first))


def _of(listed: dict[int, Item], number: int) -> Item:
    if number not in listed:
        raise corrupt_image("it names a part that it does not have")
    return listed[number]


def _bounded(found: Iterator[Box]) -> list[Box]:
    kept: list[Box] = []
    for box in found:
        kept.append(box)
        if len(kept) > MAX_BOXES:
            raise corrupt_image("it is cut into too many boxes")
    return kept


def _meta(data: bytes) -> dict[bytes, Box]:
    """The boxes of the file's one `meta`, each kind once."""
    top = _bounded(boxes(data, 0, len(data)))
    if any(kind in _SEQUENCES for kind, _, _ in top):
        raise unsupported_format("HEIC sequences are not")
    metas = [box for box in top if box[0] == b"meta"]
    if len(metas) != 1:
        raise corrupt_image("it has no contents, or several")
    _, start, end = metas[0]
    found: dict[bytes, Box] = {}
    for box in _bounded(boxes(data, start + _FULL, end)):
        if box[0] in found:
            raise corrupt_image("its contents contradict each other")
        found[box[0]] = box
    if not {b"iinf", b"iprp", b"pitm"} <= found.keys():
        raise corrupt_image("its contents are not complete")
    return found


def _list_items(data: bytes, box: Box) -> dict[int, Item]:
    _, start, end = box
    listed: dict[int, Item] = {}
    for _, at, _ in _bounded(boxes(data, start + _FULL + (2 if data[start] == 0 else 4), end)):
        version = data[at]
        number, kind = struct.unpack_from(">I2x4s" if version == 3 else ">H2x4s", data, at + _FULL)  # noqa: PLR2004
        if version < 2 or number in listed:  # noqa: PLR2004 - 0 and 1 tell no kind
            raise corrupt_image("its contents contradict each other")
        listed[number] = Item(kind)
    if len(listed) > MAX_ITEMS:
        raise corrupt_image("it has too many parts")
    return listed


def _places(data: bytes, box: Box, inside: Box) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Where each item's bytes lie. All together are not more than the file has: none may be read again and again."""
    _, start, _ = box
    version = data[start]
    sizes = data[start + 4], data[start + 5]
    offset_size, length_size, base_size = sizes[0] >> 4, sizes[0] & 15, sizes[1] >> 4
    index_size = sizes[1] & 15 if version else 0
    walk = _Walk(data, start + 6)
    named = 0
    for _ in range(walk.take(4 if version > 1 else 2)):
        number = walk.take(4 if version > 1 else 2)
        where = walk.take(2) & 15 if version else _IN_FILE
        walk.take(2)
        base = walk.take(base_size)
        if where not in (_IN_FILE, _IN_DATA):
            raise unsupported_format("HEIC whose parts are made of other parts is not")
        origin, limit = (0, len(data)) if where == _IN_FILE else inside[1:]
        parts = []
        for _ in range(walk.take(2)):
            walk.take(index_size)
            first = origin + base + walk.take(offset_size)
            length = walk.take(length_size)
            last = first + length if length else limit
            named += last - first
            if not origin <= first <= last <= limit or named > len(data):
                raise corrupt_image("its contents name more bytes than it has")
            parts.append((first, last))
        yield number, parts


class _Walk:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, size: int) -> int:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise corrupt_image("it ends inside its header")
        self._at += size
        return int.from_bytes(taken, "big")


def _properties(data: bytes, box: Box) -> Iterator[tuple[int, list[Box]]]:
    _, start, end = box
    inner = _bounded(boxes(data, start, end))
    kept = [found for kind, begin, stop in inner if kind == b"ipco" for found in _bounded(boxes(data, begin, stop))]
    for kind, begin, _ in inner:
        if kind != b"ipma":
            continue
        wide = data[begin + 3] & 1
        walk = _Walk(data, begin + _FULL)
        for _ in range(walk.take(4)):
            number = walk.take(4 if data[begin] else 2)
            indices = [walk.take(2) & 0x7FFF if wide else walk.take(1) & 0x7F for _ in range(walk.take(1))]
            if max(indices, default=0) > len(kept):
                raise corrupt_image("it names a property that it does not have")
            yield number, [kept[index - 1] for index in indices if index]


def _references(data: bytes, box: Box) -> Iterator[tuple[bytes, int, list[int]]]:
    _, start, end = box
    size = 4 if data[start] else 2
    for kind, at, _ in _bounded(boxes(data, start + _FULL, end)):
        walk = _Walk(data, at)
        source = walk.take(size)
        yield kind, source, [walk.take(size) for _ in range(walk.take(2))]
