"""Makes small pictures for tests in code: nothing is downloaded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import Image, ImageDraw

from leasehold.pipelines.media import heic_decoder
from tests import heif
from tests.support.not_here import only_where

Colour = tuple[int, int, int]
RED, GREEN, BLUE, YELLOW = (220, 30, 30), (30, 180, 60), (40, 60, 220), (230, 210, 40)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corners(width: int = 96, height: int = 64) -> Image.Image:
    """A picture that is red top left, green top right, blue bottom left and yellow bottom right."""
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    for at, colour in (((0, 0), RED), ((1, 0), GREEN), ((0, 1), BLUE), ((1, 1), YELLOW)):
        left, top = at[0] * width // 2, at[1] * height // 2
        draw.rectangle((left, top, left + width // 2, top + height // 2), fill=colour)
    return image


# EXIF orientation -> the visual sides of the stored first row and first column, in the words of the EXIF standard.
_FIRST_ROW_AND_COLUMN = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def stored_as(upright: Image.Image, orientation: int) -> Image.Image:
    """The pixels as a camera stores them for `orientation`, pixel by pixel from the standard's words."""
    row, column = _FIRST_ROW_AND_COLUMN[orientation]
    width, height = upright.size
    across = row in {"left", "right"}
    stored = Image.new("RGB", (height, width) if across else (width, height))
    for y in range(stored.height):
        for x in range(stored.width):
            along_x, along_y = (y, x) if across else (x, y)
            visual_x = width - 1 - along_x if "right" in {row, column} else along_x
            visual_y = height - 1 - along_y if "bottom" in {row, column} else along_y
            pixel = upright.getpixel((visual_x, visual_y))
            assert isinstance(pixel, tuple)
            stored.putpixel((x, y), pixel)
    return stored


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def noisy(width: int = 96, height: int = 64) -> Image.Image:
    """Something of everything: an edge, a ramp, texture."""
    image = Image.merge("RGB", [Image.linear_gradient("L").resize((width, height)).rotate(90 * n) for n in range(3)])
    draw = ImageDraw.Draw(image)
    for n in range(0, width, 7):
        draw.line((n, 0, width - n, height), fill=(n * 37 % 256, n * 91 % 256, n * 53 % 256))
    return image


def with_alpha(width: int = 96, height: int = 64) -> Image.Image:
    """Opaque on the left, half transparent in the middle, nothing on the right."""
    image = corners(width, height).convert("RGBA")
    alpha = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(alpha)
    draw.rectangle((width // 3, 0, 2 * width // 3, height), fill=128)
    draw.rectangle((2 * width // 3, 0, width, height), fill=0)
    image.putalpha(alpha)
    return image


def moving(frames: int = 4, width: int = 48, height: int = 32) -> list[Image.Image]:
    """A red square that walks over blue."""
    pictures = []
    for n in range(frames):
        picture = Image.new("RGB", (width, height), BLUE)
        ImageDraw.Draw(picture).rectangle((n * 8, 8, n * 8 + 7, 15), fill=RED)
        pictures.append(picture)
    return pictures


def animated(kind: str, durations: list[int], **options: object) -> bytes:
    first, *rest = moving(len(durations))
    return encoded(first, kind, save_all=True, append_images=rest, duration=durations, **options)


# --- ICC profiles


def _profile(device_class: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    offset, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        padded = content + b"\0" * (-len(content) % 4)
        table += name + struct.pack(">II", offset + len(body), len(content))
        body += padded
    tail = struct.pack(">I", len(tags)) + table + body
    white = struct.pack(">iii", 63190, 65536, 54061)  # D50
    head = struct.pack(">I4sI", 128 + len(tail), b"none", 0x02400000) + device_class + space + connection
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28 + white
    return head.ljust(128, b"\0") + tail


def _text(words: bytes) -> dict[bytes, bytes]:
    description = b"desc\0\0\0\0" + struct.pack(">I", len(words) + 1) + words + b"\0" * 79
    return {b"desc": description, b"cprt": b"text\0\0\0\0" + words + b"\0"}


def _xyz(x: float, y: float, z: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">iii", *(round(value * 65536) for value in (x, y, z)))


def _gamma(exponent: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(exponent * 256))


def display_p3() -> bytes:
    """Display P3: wider primaries than sRGB (here with a plain gamma, which is within two steps of its curve)."""
    curve = _gamma(2.2)
    return _profile(
        b"mntr", b"RGB ", b"XYZ ",
        {
            **_text(b"Display P3"), b"wtpt": _xyz(0.9642, 1.0, 0.8249),
            b"rXYZ": _xyz(0.51512, 0.24120, -0.00105), b"gXYZ": _xyz(0.29198, 0.69225, 0.04189),
            b"bXYZ": _xyz(0.15710, 0.06657, 0.78407), b"rTRC": curve, b"gTRC": curve, b"bTRC": curve,
        },
    )  # fmt: skip


def linear_grey() -> bytes:
    """Grey whose numbers are amounts of light: 128 is far lighter than in sRGB."""
    return _profile(
        b"mntr", b"GRAY", b"XYZ ", {**_text(b"Linear grey"), b"wtpt": _xyz(0.9642, 1.0, 0.8249), b"kTRC": _gamma(1.0)}
    )


def grey_press() -> bytes:
    """A press whose inks are all grey: with this profile no CMYK number has a colour."""
    inks = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    grid = bytes(part for ink in inks for part in (255 * (4 - sum(ink)) // 4, 128, 128))
    straight = bytes(range(256))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0])
    lut += struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    lut += straight * 4 + grid + straight * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", {**_text(b"Grey press"), b"wtpt": _xyz(0.9642, 1, 0.8249), b"A2B0": lut})


# --- PNG by hand, for what an encoder would not write


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int, colour: int, pixels: bytes, *extra: bytes) -> bytes:
    """`pixels`: the scan lines, each with its filter byte; `extra`: whole chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = (png_chunk(b"IHDR", header), *extra, png_chunk(b"IDAT", zlib.compress(pixels, 9)), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def sample(content_type: str) -> bytes:
    """One valid picture of every accepted kind."""
    return _SAMPLES[content_type]()


_SAMPLES: dict[str, Callable[[], bytes]] = {
    "image/jpeg": lambda: encoded(
        noisy(), "JPEG", progressive=True, exif=exif(6), icc_profile=display_p3(), comment=b"hello"
    ),
    "image/png": lambda: encoded(with_alpha(), "PNG", icc_profile=display_p3(), exif=exif(6)),
    "image/gif": lambda: animated("GIF", [100, 200, 300], loop=0),
    "image/webp": lambda: animated("WEBP", [100, 200, 300], loop=2),
    "image/avif": lambda: encoded(noisy(), "AVIF", speed=10),
    "image/tiff": lambda: encoded(noisy(), "TIFF", compression="tiff_lzw", icc_profile=display_p3()),
    "image/bmp": lambda: encoded(noisy(), "BMP"),
    "image/heic": lambda: heif.photo(display_p3(), exif(6).tobytes()[6:], heif.turned(3)),
}

_needs_heic = only_where(heic_decoder.load_decoder(), "the extra heic")
#: Every kind, for tests that decode it.
KINDS = [pytest.param(kind, marks=[_needs_heic] if kind == "image/heic" else []) for kind in _SAMPLES]
