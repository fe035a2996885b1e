"""Converts grey pictures of 16 bits to 8 bits. The media steps use this module, and so do conversions, for their
reference images.
"""

from __future__ import annotations

from PIL import Image

_OPAQUE = 255


def is_grey16(image: Image.Image) -> bool:
    """Whether Pillow holds the pixels as integers of 16 bits or more."""
    return image.mode.startswith("I")


def to_8_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to its high bytes, because a plain conversion would clip every value above 255 to white. If
    the picture declares one grey value as transparent, the result gets an alpha channel.
    """
    grey16 = image.convert("I")
    grey8 = grey16.point([value >> 8 for value in range(65536)], "L")
    transparent_value = image.info.get("transparency")
    if isinstance(transparent_value, int):
        alpha = grey16.point([0 if value == transparent_value else _OPAQUE for value in range(65536)], "L")
        grey8.putalpha(alpha)
    return grey8
