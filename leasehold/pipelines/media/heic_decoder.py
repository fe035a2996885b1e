"""The decoder of HEIC, where the extra `heic` is installed. Heavy: only the child process of a worker imports it.

What it is given was looked at before (headers/heic.py), and it runs behind the fences of worker/sandbox: libheif has
had its faults found by the dozen in 2026. A wheel has a copy of libheif of its own, so an old wheel is an old libheif.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

#: The first without the faults through which pictures took over the processes that decoded them.
OLDEST = (1, 23, 4)


@cache
def is_here() -> bool:
    """Make the decoder known to Pillow; False where there is none, or one that is too old."""
    try:
        pi_heif: Any = import_module("pi_heif")  # an extra, and its types say less than it has
    except ImportError:
        return False
    if tuple(int(part) for part in pi_heif.libheif_version().split(".")) < OLDEST:
        return False
    # Only the picture itself; and in this thread, for a child has one core.
    pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return True
