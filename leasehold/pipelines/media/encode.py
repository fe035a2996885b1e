"""Writes pictures for the media steps, and has all encoder settings. If you change a setting, raise the version of the
steps that use it, because their bytes change.

The settings were chosen on a 2048 x 1536 photo and one core (time, size):
  WebP q80     method 2: 134 ms, 797 KB   method 4: 254 ms, 770 KB, +0.2 dB   method 6: 744 ms, 723 KB
  JPEG q80     baseline: 8 ms, 893 KB   optimised: 22 ms, 876 KB   progressive: 52 ms, 833 KB
  JPEG q90     4:2:0: 8 ms   4:4:4: 13 ms, and the pictures that are made from the 4:4:4 file are 1.5 dB better
  AVIF q60     speed 9: 218 ms, 630 KB   speed 8: 871 ms, 589 KB   speed 6: 2.1 s, 557 KB
  PNG RGBA     level 1: 263 ms, 7.7 MB   level 6: 975 ms, 7.0 MB
  WebP RGBA, lossless   method 0: 97 ms, 6.3 MB   method 1: 478 ms, 5.1 MB
An encoder gets only one thread if more threads could change the bytes that it writes.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from leasehold.domain.verdicts import File
from leasehold.pipelines.media.animation import Animation

#: Arguments of `Image.save`: the format, and the options of its encoder.
Settings = dict[str, Any]

# VP8X is the extended header of a WebP file. Every animation has it.
_VP8X_FLAGS = 20  # the position of the header's flags in the file
_ALPHA_FLAG = 0x10

# The steps `resize` (RESIZED_JPEG) and `compress` (SMALL_JPEG) write JPEG files.
RESIZED_JPEG: Settings = {"format": "JPEG", "quality": 90, "subsampling": "4:4:4"}
SMALL_JPEG: Settings = {
    "format": "JPEG",
    "quality": 80,
    "subsampling": "4:2:0",
    "progressive": True,
    "optimize": True,
}
# The step `resize` writes lossless files of pictures that JPEG cannot hold, and the step `webp` starts from them. For a
# lossless WebP, `quality` is the encoder's effort.
LOSSLESS_PNG: Settings = {"format": "PNG", "compress_level": 1}
LOSSLESS_ANIMATION: Settings = {"format": "WEBP", "lossless": True, "quality": 20, "method": 0}
# The step `webp` writes the final file and the variants (further files that the client asked for), as WebP.
WEBP: Settings = {"format": "WEBP", "quality": 80, "method": 4, "alpha_quality": 100}
WEBP_ANIMATION: Settings = {**WEBP, "method": 2}  # for hundreds of frames, time counts more than size
# The other formats of variants.
AVIF: Settings = {
    "format": "AVIF",
    "quality": 60,
    "speed": 6,
    "subsampling": "4:2:0",
    "codec": "aom",
    "max_threads": 1,
    "autotiling": False,
}
PNG: Settings = {"format": "PNG", "compress_level": 6}


def write(image: Image.Image, path: Path, settings: Settings) -> File:
    """Encode a still without its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bare = image.copy() if image.info else image
    bare.info = {}
    buffer = BytesIO()  # an encoder that writes to the file itself does not notice a full disk
    bare.save(buffer, **settings)
    path.write_bytes(buffer.getbuffer())
    return File(path, Image.MIME[settings["format"]])


def write_animation(animation: Animation, path: Path, settings: Settings) -> File:
    """Encode all frames as WebP."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = BytesIO()
    animation.save(buffer, save_all=True, duration=animation.durations, loop=animation.plays, **settings)
    path.write_bytes(_with_alpha_flag(buffer.getbuffer(), has_alpha=animation.has_alpha))
    return File(path, Image.MIME[settings["format"]])


def _with_alpha_flag(webp: memoryview, *, has_alpha: bool) -> memoryview:
    """Set the alpha flag in the file's header if the animation has transparent pixels.

    The encoder crops each frame to its changed part. If every cropped frame is opaque, the encoder leaves the flag out.
    Some readers would then show the part of the canvas that no frame covers in black.
    """
    if has_alpha and bytes(webp[12:16]) == b"VP8X":
        webp[_VP8X_FLAGS] |= _ALPHA_FLAG
    return webp
