"""Every reason for which a picture is refused. Each has a stable code, and a sentence for the owner of the picture.

All are `Permanent`, because another attempt would fail in the same way.
"""

from __future__ import annotations

from leasehold.domain.errors import Permanent


def empty_file() -> Permanent:
    return Permanent("empty_file", "The file is empty.")


def unsupported_format(reason: str) -> Permanent:
    return Permanent("unsupported_format", f"The file is not a picture of an accepted kind: {reason}.")


def unknown_format() -> Permanent:
    return unsupported_format("JPEG, PNG, WebP, GIF, AVIF, TIFF and BMP are accepted, and HEIC where it is switched on")


def mislabelled(declared: str, actual: str) -> Permanent:
    return Permanent("mislabelled", f"The file was declared as {declared[:100]!r}, but it is {actual}.")


def corrupt_image(reason: str) -> Permanent:
    return Permanent("corrupt_image", f"The picture is damaged: {reason}.")


def too_large(size: int, limit: int) -> Permanent:
    return Permanent("too_large", f"The file has {size} bytes; at most {limit} are accepted.")


def more_pixels_than_accepted() -> Permanent:
    """The same refusal as `too_many_pixels`, for a decoder that does not say how many pixels the picture has."""
    return Permanent("too_many_pixels", "The picture has more pixels than are accepted.")


def too_many_pixels(pixels: int, limit: int) -> Permanent:
    return Permanent("too_many_pixels", f"The picture has {pixels} pixels; at most {limit} are accepted.")


def too_many_frames(frames: int, limit: int) -> Permanent:
    return Permanent("too_many_frames", f"The animation has {frames} frames; at most {limit} are accepted.")


def too_many_scans(limit: int) -> Permanent:
    """This limit bounds the decoding time, because a scan of a progressive JPEG may have few bytes, but costs a pass
    over all pixels.
    """
    return Permanent("too_many_scans", f"The JPEG has more than {limit} scans.")
