"""Makes AV1 streams and AVIF files for tests, bit by bit and box by box. The pixels are coded by Pillow's encoder."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BytesIO

from PIL import Image

from tests import heif
from tests.heif import Heif

SEQUENCE, FRAME_HEADER, FRAME, PADDING = 1, 3, 6, 15
KEY, INTER, INTRA_ONLY, SWITCH = range(4)
ALPHA = heif.full(b"auxC", b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0")


class Writer:
    """Bits, written one number after the other."""

    def __init__(self) -> None:
        self.bits = ""

    def put(self, value: int, count: int = 1) -> None:
        self.bits += f"{value:0{count}b}" if count else ""

    def exp_golomb(self, value: int) -> None:
        self.bits += "0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}"

    def done(self) -> bytes:
        return packed(self.bits + "1")


def packed(bits: str) -> bytes:
    size = -(-len(bits) // 8)
    return int(bits.ljust(8 * size, "0"), 2).to_bytes(size, "big")


def unpacked(data: bytes) -> str:
    return "".join(f"{byte:08b}" for byte in data)


def unit(kind: int, content: bytes, *, layers: int | None = None, has_length: bool = True) -> bytes:
    head = bytes([kind << 3 | (layers is not None) << 2 | has_length << 1])
    extension = b"" if layers is None else bytes([layers])
    return head + extension + (leb128(len(content)) if has_length else b"") + content


def leb128(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@dataclass(frozen=True)
class Sequence:
    """The fields of a sequence header. The defaults are a plain stream without times, ids and orders."""

    size: tuple[int, int] = (96, 64)
    spare_bits: int = 0  # of the size, more than it needs
    is_reduced: bool = False
    has_times: bool = False
    equal_interval: int | None = None
    removal_bits: int = 0  # 0: no model of the decoder
    presentation_bits: int = 1
    buffer_bits: int = 1
    has_delays: bool = False
    points: tuple[tuple[int, int, bool], ...] = ((0, 0, False),)  # layers, level, whether frames have a time for it
    id_bits: tuple[int, int] | None = None  # of a difference, and more of an id
    screen_content: int = 2
    integer_vectors: int = 2
    order_bits: int = 0

    @property
    def side_bits(self) -> tuple[int, int]:
        width, height = (min(16, (side - 1).bit_length() + self.spare_bits) or 1 for side in self.size)
        return width, height

    def unit(self) -> bytes:
        out = Writer()
        out.put(0, 3)
        out.put(self.is_reduced)
        out.put(self.is_reduced)
        if self.is_reduced:
            out.put(0, 5)
        else:
            self._put_times(out)
            self._put_points(out)
        for bits in self.side_bits:
            out.put(bits - 1, 4)
        for side, bits in zip(self.size, self.side_bits, strict=True):
            out.put(side - 1, bits)
        if not self.is_reduced:
            out.put(self.id_bits is not None)
            if self.id_bits is not None:
                out.put(self.id_bits[0] - 2, 4)
                out.put(self.id_bits[1] - 1, 3)
        out.put(0, 3)
        if not self.is_reduced:
            self._put_tools(out)
        out.put(0, 20)  # everything behind is of no concern for the size
        return unit(SEQUENCE, out.done())

    def _put_times(self, out: Writer) -> None:
        out.put(self.has_times)
        if not self.has_times:
            return
        out.put(1, 32)
        out.put(30, 32)
        out.put(self.equal_interval is not None)
        if self.equal_interval is not None:
            out.exp_golomb(self.equal_interval)
        out.put(self.removal_bits > 0)
        if self.removal_bits:
            out.put(self.buffer_bits - 1, 5)
            out.put(1, 32)
            out.put(self.removal_bits - 1, 5)
            out.put(self.presentation_bits - 1, 5)

    @property
    def has_model(self) -> bool:
        return self.has_times and self.removal_bits > 0

    def _put_points(self, out: Writer) -> None:
        out.put(self.has_delays)
        out.put(len(self.points) - 1, 5)
        for layers, level, has_time in self.points:
            out.put(layers, 12)
            out.put(level, 5)
            if level > 7:
                out.put(1)
            if self.has_model:
                out.put(has_time)
                if has_time:
                    out.put(0, 2 * self.buffer_bits + 1)
            if self.has_delays:
                out.put(1)
                out.put(3, 4)

    def _put_tools(self, out: Writer) -> None:
        out.put(0, 4)
        out.put(self.order_bits > 0)
        if self.order_bits:
            out.put(0, 2)
        for value, is_asked in ((self.screen_content, True), (self.integer_vectors, self.screen_content > 0)):
            if is_asked:
                out.put(value == 2)
                if value != 2:
                    out.put(value)
        if self.order_bits:
            out.put(self.order_bits - 1, 3)


@dataclass(frozen=True)
class Frame:
    """The fields of a frame header, up to the size. `size`: its own one."""

    kind: int = KEY
    is_shown: bool = True
    is_resilient: bool = False
    has_screen_content: bool = False
    size: tuple[int, int] | None = None
    found_at: int | None = None  # the reference that has its size
    removal_times: bool = False
    refreshed: int = 1
    is_short: bool = False
    layers: int | None = None

    @property
    def is_intra(self) -> bool:
        return self.kind in (KEY, INTRA_ONLY)

    @property
    def refreshes_all(self) -> bool:
        return self.kind == SWITCH or (self.kind == KEY and self.is_shown)

    @property
    def has_own_size(self) -> bool:
        return self.size is not None or self.found_at is not None or self.kind == SWITCH

    def unit(self, sequence: Sequence) -> bytes:
        out = Writer()
        resilient = self.is_resilient or sequence.is_reduced or self.refreshes_all
        if not sequence.is_reduced:
            self._put_kind(out, sequence, resilient=resilient)
        self._put_tools(out, sequence)
        if not self.is_intra and not resilient:
            out.put(7, 3)
        self._put_removals(out, sequence)
        self._put_slots(out, sequence, resilient=resilient)
        if not self.is_intra:
            self._put_references(out, sequence)
        if self.has_own_size and not self.is_intra and not resilient:
            for index in range(7 if self.found_at is None else self.found_at + 1):
                out.put(index == self.found_at)
        if self.has_own_size and self.found_at is None:
            for side, bits in zip(self.size or sequence.size, sequence.side_bits, strict=True):
                out.put(side - 1, bits)
        return unit(FRAME_HEADER, out.done(), layers=self.layers)

    def _put_tools(self, out: Writer, sequence: Sequence) -> None:
        out.put(0)
        screen_content = sequence.screen_content
        if screen_content == 2:
            screen_content = int(self.has_screen_content)
            out.put(screen_content)
        if screen_content and sequence.integer_vectors == 2:
            out.put(0)
        out.put(0, sum(sequence.id_bits or ()))
        if not sequence.is_reduced and self.kind != SWITCH:
            out.put(self.has_own_size)
        out.put(0, sequence.order_bits)

    def _put_slots(self, out: Writer, sequence: Sequence, *, resilient: bool) -> None:
        refreshed = 255 if self.refreshes_all else self.refreshed
        if not self.refreshes_all:
            out.put(refreshed, 8)
        if resilient and not (self.is_intra and refreshed == 255):
            out.put(0, 8 * sequence.order_bits)

    def _put_kind(self, out: Writer, sequence: Sequence, *, resilient: bool) -> None:
        out.put(0)
        out.put(self.kind, 2)
        out.put(self.is_shown)
        if self.is_shown and sequence.has_model and sequence.equal_interval is None:
            out.put(0, sequence.presentation_bits)
        if not self.is_shown:
            out.put(1)
        if not self.refreshes_all:
            out.put(resilient)

    def _put_removals(self, out: Writer, sequence: Sequence) -> None:
        if not sequence.has_model:
            return
        out.put(self.removal_times)
        if self.removal_times:
            temporal, spatial = (self.layers or 0) >> 5, (self.layers or 0) >> 3 & 3
            for layers, _, has_time in sequence.points:
                if has_time and (not layers or (layers >> temporal & 1 and layers >> (8 + spatial) & 1)):
                    out.put(0, sequence.removal_bits)

    def _put_references(self, out: Writer, sequence: Sequence) -> None:
        is_short = self.is_short and sequence.order_bits > 0
        if sequence.order_bits:
            out.put(is_short)
        if is_short:
            out.put(0, 6)
        for _ in range(7):
            out.put(0, 0 if is_short else 3)
            if sequence.id_bits is not None:
                out.put(0, sequence.id_bits[0])


def units(data: bytes) -> list[tuple[int, bytes]]:
    """The units of a stream whose units all have a length and no layers: kind and content."""
    found, position = [], 0
    while position < len(data):
        kind, length, shift = data[position] >> 3, 0, 0
        assert data[position] & 6 == 2
        while True:
            position += 1
            length |= (data[position] & 0x7F) << shift
            shift += 7
            if data[position] < 0x80:
                break
        found.append((kind, data[position + 1 : position + 1 + length]))
        position += 1 + length
    return found


def coded(image: Image.Image, **options: object) -> tuple[bytes, bytes]:
    """A picture as the encoder codes it: its stream, and its `av1C` box."""
    buffer = BytesIO()
    image.save(buffer, "AVIF", speed=10, **options)
    data = buffer.getvalue()
    start = data.index(b"av1C") - 4
    (size,) = struct.unpack_from(">I", data, start)
    content = data[data.index(b"mdat") + 4 :]
    return content, data[start : start + size]


def file_of(stream: bytes, size: tuple[int, int], *properties: bytes) -> bytes:
    made = Heif(brands=b"avifavifmif1miaf")
    made.add(b"av01", stream, heif.size(*size), *properties)
    return made.build()


def first_of_a_sequence(image: Image.Image) -> bytes:
    """A stream of one key frame, whose headers are not reduced: only those can have a size for each frame."""
    buffer = BytesIO()
    image.save(buffer, "AVIF", speed=10, save_all=True, append_images=[image.rotate(180)])
    data = buffer.getvalue()
    table = data.index(b"stsz")
    (size,) = struct.unpack_from(">I", data, table + 16)
    (start,) = struct.unpack_from(">I", data, data.index(b"stco") + 12)
    return data[start : start + size]


def with_own_size(stream: bytes, claimed: tuple[int, int]) -> bytes:
    """The same frame, with its size in the frame header. The sequence header claims another one, of 8 bits a side.

    So 16 bits more are in the frame header, and the pixels behind them still begin with a byte.
    """
    out = b""
    for kind, content in units(stream):
        bits = unpacked(content)
        if kind == SEQUENCE:
            assert bits[3:7] == "0000"  # no reduced header, no times, no delays
            assert bits[7:12] == "00000"  # one operating point
            at = 29 + (int(bits[24:29], 2) > 7)
            sides = [int(bits[at + 4 * n : at + 4 * n + 4], 2) + 1 for n in (0, 1)]
            behind = at + 8 + sum(sides)
            size = int(bits[at + 8 : at + 8 + sides[0]], 2), int(bits[at + 8 + sides[0] : behind], 2)
            fields = "0111" * 2 + "".join(f"{side - 1:08b}" for side in claimed)
            content = packed(bits[:at] + fields + bits[behind:])  # noqa: PLW2901 - the unit, changed
            assert bits[behind : behind + 1] == "0"  # no ids
            has_order = bits[behind + 8] == "1"
            tools = behind + (11 if has_order else 9)
            assert bits[tools : tools + 2] == "11"  # each frame says whether it is screen content
            order_bits = int(bits[tools + 2 : tools + 5], 2) + 1 if has_order else 0
        elif kind == FRAME:
            assert bits[:4] == "0001"  # a key frame that is shown
            flag = 6 + (bits[5] == "1") * (1 + (bits[6] == "0"))
            assert bits[flag] == "0"
            own = "".join(f"{side:08b}" for side in size)
            at = flag + 1 + order_bits
            content = packed(bits[:flag] + "1" + bits[flag + 1 : at] + own + bits[at:])  # noqa: PLW2901 - see above
        out += unit(kind, content)
    return out
