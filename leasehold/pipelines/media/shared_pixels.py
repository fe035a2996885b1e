"""Lets another library read a picture's pixels in Pillow's own memory, without a copy.

The module `pixels` gives this memory to libvips. Pillow's `tobytes` would make two copies (72 MB for twelve
megapixels). The copies would be slow in a new process, because the kernel would first have to provide their pages.
"""

from __future__ import annotations

import ctypes

from PIL import Image, _imaging

#: Pillow keeps a pixel in four bytes. The fourth byte of an RGB pixel is padding.
BYTES_PER_PIXEL = 4
_MODES = {"RGB", "CMYK"}  # only pictures of these modes are shared

_imaging.set_use_block_allocator(1)  # allocate each picture in one block; by default Pillow uses blocks of 16 MiB

#: The function of Python's C API that returns the pointer in a capsule.
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _ArrowArray(ctypes.Structure):
    """The structure ArrowArray of the Arrow C data interface, without its last two fields. Its layout never changes."""

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
    """The pixels row by row, BYTES_PER_PIXEL for each. They are valid as long as `image` exists. Returns None if Pillow
    holds the pixels in several blocks, or in another layout.
    """
    if image.mode not in _MODES:
        return None
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:  # the picture has several blocks
        return None
    # The capsule has an Arrow array of pixels. The only child of this array is the array of the bytes of all pixels.
    pixel_array = _ArrowArray.from_address(_pointer_of(capsule, b"arrow_array"))
    byte_array = _ArrowArray.from_address(pixel_array.children[0])
    size = image.width * image.height * BYTES_PER_PIXEL
    if (pixel_array.offset, byte_array.offset, byte_array.length) != (0, 0, size):
        return None
    return (ctypes.c_ubyte * size).from_address(byte_array.buffers[1])  # buffer 0 would mark the bytes that are null
