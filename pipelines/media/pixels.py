"""Pure work on decoded pictures: modes, transparency, orientation, size."""

from __future__ import annotations

from PIL import Image

Size = tuple[int, int]
Box = tuple[float, float, float, float]

_WHITE = (255, 255, 255)
_WITH_ALPHA = {"LA": "L", "RGBA": "RGB"}
_PLAIN = {"L", "LA", "RGB", "RGBA", "CMYK"}
_BYTE = 255

#: EXIF orientation -> what makes the picture upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPED = {5, 6, 7, 8}


def plain(image: Image.Image) -> Image.Image:
    """Give the same picture as L, LA, RGB, RGBA or CMYK, 8 bits a channel; fully opaque alpha is dropped."""
    if image.mode.startswith("I"):
        image = _from_16_bit(image)
    elif image.has_transparency_data and image.mode not in _WITH_ALPHA:
        image = _with_alpha(image)
    elif image.mode not in _PLAIN:
        image = image.convert("L" if image.mode == "1" else "RGB")
    if image.mode in _WITH_ALPHA and image.getchannel("A").getextrema()[0] == _BYTE:
        return image.convert(_WITH_ALPHA[image.mode])
    return image


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Keep the high bytes: a plain conversion would clip everything above 255 to white."""
    wide = image.convert("I")
    grey = wide.point([value >> 8 for value in range(65536)], "L")
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(wide.point([0 if value == key else _BYTE for value in range(65536)], "L"))
    return grey


def _with_alpha(image: Image.Image) -> Image.Image:
    """Palettes with transparency and pictures with a colour that stands for it."""
    key = image.info.get("transparency")
    if isinstance(key, tuple) and max(key) > _BYTE:  # a 16-bit colour, whose picture was decoded to 8 bits
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image.convert("RGBA")


def fit(size: Size, max_side: int) -> Size:
    """Give the size within a square of `max_side`, never enlarged, never without area."""
    scale = min(1.0, max_side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def shrink(image: Image.Image, size: Size, box: Box | None = None) -> Image.Image:
    """Resample to `size`; `reducing_gap` lets large factors start with a cheap exact reduction."""
    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=2.0)


def upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def upright_size(size: Size, orientation: int) -> Size:
    return (size[1], size[0]) if orientation in _SWAPPED else size


def flatten(image: Image.Image) -> Image.Image:
    """Lay the picture on white, for formats without transparency."""
    if image.mode != "RGBA":
        return image
    paper = Image.new("RGB", image.size, _WHITE)
    paper.paste(image, mask=image.getchannel("A"))
    return paper
