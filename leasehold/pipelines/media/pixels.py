"""Pure work on decoded pictures: modes, transparency, orientation, size."""

from __future__ import annotations

import pyvips
from PIL import Image

from leasehold.pipelines.media.shared import pixels_of

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
_GAP = 2.0

pyvips.voperation.concurrency_set(1)  # a process a core
pyvips.cache_set_max(0)  # no two pictures are the same
pyvips.operation_block_set("VipsForeignLoad", True)  # it is given pixels, never files


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
    """Resample to `size`, by Lanczos' filter. `box`: the part of the image that counts. Raises MemoryError.

    By libvips where that is faster: half as long for 12 megapixels, 54 dB beside what Pillow makes of them. Pillow has
    the rest: it begins large reductions with a cheap exact one, weighs colours by their alpha, and takes parts of a
    pixel.
    """
    if image.size == size:
        return image
    is_large = min(image.width / size[0], image.height / size[1]) >= 2 * _GAP
    if is_large or image.mode in _WITH_ALPHA or (box is not None and box != (0, 0, *image.size)):
        return image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=_GAP)
    return _shrunk_by_vips(image, size)


def _shrunk_by_vips(image: Image.Image, size: Size) -> Image.Image:
    width, height = image.size
    mode, shared = image.mode, pixels_of(image)
    if shared is not None and mode == "RGB":
        mode = "RGBX"  # the fourth byte goes along: libvips is faster with four than with three
    data = image.tobytes() if shared is None else shared
    pixels = pyvips.Image.new_from_memory(data, width, height, Image.getmodebands(mode), "uchar")
    try:
        made = pixels.resize(size[0] / width, vscale=size[1] / height, kernel="lanczos3").write_to_memory()
    except pyvips.Error as error:  # pixels in memory are never wrong: only memory may lack
        raise MemoryError(str(error)) from error
    return Image.frombytes(image.mode, size, made, "raw", mode)


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
