"""Makes HEIC files for tests, box by box. The stills in them were encoded once, by x265 at 96x64 and 64x64."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass, field

Box = bytes


def box(kind: bytes, *contents: bytes) -> Box:
    body = b"".join(contents)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def full(kind: bytes, *contents: bytes, version: int = 0, flags: int = 0) -> Box:
    return box(kind, struct.pack(">I", version << 24 | flags), *contents)


@dataclass(frozen=True)
class Still:
    """A coded picture: its parameters, and its pixels, each unit behind its length."""

    width: int
    height: int
    parameters: bytes
    pixels: bytes

    @property
    def properties(self) -> list[Box]:
        return [box(b"hvcC", self.parameters), size(self.width, self.height)]


def size(width: int, height: int) -> Box:
    return full(b"ispe", struct.pack(">II", width, height))


def turned(quarters: int) -> Box:
    return box(b"irot", bytes([quarters]))


def mirrored(axis: int) -> Box:
    return box(b"imir", bytes([axis]))


def profile(icc: bytes) -> Box:
    return box(b"colr", b"prof", icc)


ALPHA = full(b"auxC", b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0")


@dataclass
class Heif:
    """A file under construction. An item's number is what `add` gave."""

    brands: bytes = b"heicmif1heic"
    primary: int = 1
    items: list[tuple[bytes, bytes, list[Box]]] = field(default_factory=list)
    names: list[tuple[bytes, int, list[int]]] = field(default_factory=list)
    extra: bytes = b""
    places: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, kind: bytes, content: bytes, *properties: Box) -> int:
        self.items.append((kind, content, list(properties)))
        return len(self.items)

    def still(self, still: Still, *properties: Box) -> int:
        return self.add(b"hvc1", still.pixels, *still.properties, *properties)

    def grid(self, rows: int, columns: int, area: tuple[int, int], tiles: list[int], *properties: Box) -> int:
        content = struct.pack(">4BHH", 0, 0, rows - 1, columns - 1, *area)
        made = self.add(b"grid", content, size(*area), *properties)
        self.names.append((b"dimg", made, tiles))
        return made

    def build(self) -> bytes:
        start = box(b"ftyp", self.brands[:4], b"\0\0\0\0", self.brands[4:])
        at = len(start) + len(self._meta(0)) + 8
        return start + self._meta(at) + box(b"mdat", *(content for _, content, _ in self.items)) + self.extra

    def _meta(self, at: int) -> bytes:
        kept = list(dict.fromkeys(found for _, _, properties in self.items for found in properties))
        listed, places, said = b"", b"", b""
        for number, (kind, content, properties) in enumerate(self.items, 1):
            listed += full(b"infe", struct.pack(">HH4s", number, 0, kind), b"\0", version=2)
            parts = self.places.get(number, [(at, len(content))])
            places += struct.pack(">HHH", number, 0, len(parts))
            places += b"".join(struct.pack(">II", *part) for part in parts)
            said += struct.pack(">HB", number, len(properties))
            said += b"".join(struct.pack(">H", 0x8000 | kept.index(found) + 1) for found in properties)
            at += len(content)
        count = len(self.items)
        references = b"".join(
            box(kind, struct.pack(f">HH{len(to)}H", source, len(to), *to)) for kind, source, to in self.names
        )
        return full(
            b"meta",
            full(b"hdlr", b"\0\0\0\0pict", bytes(13)),
            full(b"pitm", struct.pack(">H", self.primary)),
            full(b"iloc", b"\x44\x00", struct.pack(">H", count), places),
            full(b"iinf", struct.pack(">H", count), listed),
            full(b"iref", references) if references else b"",
            box(b"iprp", box(b"ipco", *kept), full(b"ipma", struct.pack(">I", count), said, flags=1)),
        )


def of(still: Still, *properties: Box) -> bytes:
    made = Heif()
    made.still(still, *properties)
    return made.build()


def photo(icc: bytes, exif: bytes, *properties: Box) -> bytes:
    """As a camera writes one. `exif` begins with its TIFF header."""
    made = Heif()
    made.still(CORNERS, profile(icc), *properties)
    made.names.append((b"cdsc", made.add(b"Exif", bytes(4) + exif), [1]))
    return made.build()


def with_size(still: Still, width: int, height: int) -> Still:
    """The same bytes, whose parameters say another size."""
    arrays = _arrays(width, height)
    return Still(still.width, still.height, still.parameters[:22] + arrays, still.pixels)


def _arrays(width: int, height: int) -> bytes:
    unit = parameters(width, height)
    return bytes([1, 0xA1]) + struct.pack(">HH", 1, len(unit)) + unit


def parameters(width: int, height: int) -> bytes:
    """The beginning of a sequence's parameters, up to its size."""
    head = "0" * 4 + "000" + "1" + "0" * 88 + "0" * 8
    codes = "".join("0" * ((n + 1).bit_length() - 1) + f"{n + 1:b}" for n in (0, 1, width, height))
    bits = head + codes + "1"
    body = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    safe = bytearray()
    for value in body:  # no start of a unit inside one
        if value <= 3 and safe[-2:] == b"\0\0":
            safe.append(3)
        safe.append(value)
    return b"\x42\x01" + bytes(safe)


def _still(width: int, height: int, parameters: str, pixels: str) -> Still:
    return Still(width, height, base64.b64decode(parameters), base64.b64decode(pixels))


_OF_96 = (
    "AQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoDCBBZbq"
    "SSmubgIaDAgAAAMAyAAAAwAIQGIAAQAHRAHBcrAiQA=="
)
_OF_64 = (
    "AQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq"
    "SSmubgIaDAgAAAMAyAAAAwAIQGIAAQAHRAHBcrAiQA=="
)

#: tests/pictures.py has the same ones.
CORNERS = _still(
    96, 64,
    _OF_96,
    "AAAArygBrwngITl1X//8gj///GI3IfwJzUkEpPPXKhPo5//zE0NYsm7AqcwBSaF5bQV87tI0ylnzuZIjwj4/aR5NUmgv9UZCx+cGAfXkWyau"
    "HwD3GbX/+X9Jj+X8nv/lPl6BHwj62ZSgIculkl886GqXOwN8867epHkVDjoV9JH3Hs934uozH4cf+e5Zf+D2yLxigk/+69CP0kRiA7iU+WTc"
    "HT7kNf0M13xf0xRoEp/vv78=",
)  # fmt: skip
#: The corners, 10 bits a channel.
TEN_BITS = _still(
    96, 64,
    "AQQIAAAAnbgAAAAAHvAA/P36+gAADwNgAAEAF0ABDAH//wQIAAADAJ24AAADAAAeugJAYQABAClCAQEECAAAAwCduAAAAwAAHqAwgQTZbqSS"
    "mubgIaDAgAAADIAAAAMAhGIAAQAHRAHBcrAiQA==",
    "AAAAkigBrwng44Ocvef//sOr//+j3eQ/m6LKSCUnnwgnH1d//7gmBpl02tsxK3NV/F495E92AghnMAG/G2eFR9BN/1dKnp87Ub/+tIwj+p3C"
    "v/p83WdAmJ1+R/df3zoVfRk/c1+Ac4AR2KF1UCRepNNvgtE3Z6KYb6EOBUgBMQINSVmzaNJ6t6SDVdPV1So13wAM/gQO",
)  # fmt: skip
#: Grey: what pictures.with_alpha has in its fourth channel.
OPACITY = _still(
    96, 64,
    "AQQIAAAAn/gAAAAAHvAA/Pz4+AAADwNgAAEAF0ABDAH//wQIAAADAJ/4AAADAAAeugJAYQABACZCAQEECAAAAwCf+AAAAwAAHsDCBBZbqSSm"
    "ubAgAAADAyAAAAMAIWIAAQAHRAHBcrAiQA==",
    "AAAAIigBrhPAO4jr9f/ucOrn//qmZkvP/+QKMTf/6n+St/+zIPw=",
)  # fmt: skip
#: Squares of one colour.
RED_TILE, GREEN_TILE, BLUE_TILE, YELLOW_TILE = (
    _still(64, 64, _OF_64, pixels)
    for pixels in (
        "AAAAGSgBrxOA5qhw0//9oFH/8AmeH5Pcy0nm/fA=",
        "AAAAGCgBrxOA5TPAn/+NKP/4rtX/qULrVD1PgA==",
        "AAAAGCgBrxOA5TPAn//x6qK/9FjV/yLJrVD1Pg==",
        "AAAAGCgBrxOA5TPAnf/0OqP/9XXPDyeOrVD1Pg==",
    )
)
