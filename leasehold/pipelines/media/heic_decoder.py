"""Loads the HEIC decoder (libheif), if the extra `heic` is installed. Only the child process of a worker imports this
module.

libheif had dozens of known faults in 2026. So headers/heic.py checks each file before the decoder gets it, and the
decoder runs in the sandbox of worker/sandbox. The wheel `pi_heif` contains libheif, so an old wheel has an old libheif.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

#: The first release of libheif in which no known fault lets a picture take over the process that decodes it.
OLDEST_SAFE_RELEASE = (1, 23, 4)


@cache
def load_decoder() -> bool:
    """Register the decoder with Pillow. Returns False if no decoder is installed, or if it is too old."""
    try:
        pi_heif: Any = import_module("pi_heif")  # an extra, whose type hints are incomplete
    except ImportError:
        return False
    if tuple(int(part) for part in pi_heif.libheif_version().split(".")) < OLDEST_SAFE_RELEASE:
        return False
    # Decode only the main picture, without thumbnails and the like. Decode it in this thread, because a child process
    # has one core.
    pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return True
