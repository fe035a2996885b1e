"""A picture's pixels where they lie in Pillow's memory, so that another library reads them without a copy. Pillow's own
way out, `tobytes`, makes two: of twelve megapixels 72 MB, which a fresh process has to fault in.
"""

from __future__ import annotations

import ctypes

from PIL import Image, _imaging

#: In Pillow's memory; of RGB the last one is padding.
BYTES_PER_PIXEL = 4
_MODES = {"RGB", "CMYK"}

_imaging.set_use_block_allocator(1)  # each picture in one piece; else in pieces of 16 MiB

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _ArrowArray(ctypes.Structure):
    """Of the Arrow C data interface, whose layout is fixed for good; all but its last two fields."""

    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
    )


def pixels_of(image: Image.Image) -> ctypes.Array[ctypes.c_ubyte] | None:
    """Rows of `BYTES_PER_PIXEL` a pixel, to be read for as long as `image` is kept; None where they do not lie so."""
    if image.mode not in _MODES:
        return None
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:  # it was made elsewhere, in pieces
        return None
    pixels = _ArrowArray.from_address(_pointer_of(capsule, b"arrow_array"))
    channels = _ArrowArray.from_address(pixels.children[0])
    size = image.width * image.height * BYTES_PER_PIXEL
    if (pixels.offset, channels.offset, channels.length) != (0, 0, size):
        return None
    return (ctypes.c_ubyte * size).from_address(channels.buffers[1])
