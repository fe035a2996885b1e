"""The handlers of the media pipeline. Only the child process of a worker imports this module, because it imports heavy
libraries.

For equal input bytes, parameters and versions, a step writes equal files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.pictures.damage import pillow_limits
from leasehold.pipelines.media import encode
from leasehold.pipelines.media.animation import Animation
from leasehold.pipelines.media.colour import ToSrgb
from leasehold.pipelines.media.decode import Picture
from leasehold.pipelines.media.inspection import Original, inspect
from leasehold.pipelines.media.pipeline import MediaParams, media
from leasehold.pipelines.media.pixels import fit, flatten, shrink, upright, upright_size
from leasehold.pipelines.media.variants import VARIANTS, Variant

#: The names of three outputs: the resized JPEG, the small JPEG, and the final WebP.
RESIZED = "resize.jpg"
COMPRESSED = "compress.jpg"
FINAL = "final.webp"

#: The masters: the files of the step `resize` from which the step `webp` can start, the best first, each with its
#: content type. The JPEG always exists. If JPEG cannot hold the picture, there is also one of the lossless files.
MASTERS = {"resize.webp": "image/webp", "resize.png": "image/png", RESIZED: "image/jpeg"}


@media.handles("resize")
def resize(work: Work) -> Done:
    """Check and decode the picture, convert it to sRGB, turn it upright, and scale it so that no side is longer than
    `max_side`.

    Raises Permanent with one of the codes of refusals.py.
    """
    params: MediaParams = work.params
    original = inspect(work.files["original"], params.limits, params.content_type)
    with pillow_limits(params.limits.max_pixels):
        prepared = _PreparedPicture(original, params.max_side)
        files = _write_masters(prepared, work.directory)
        files[RESIZED] = encode.write(flatten(prepared.first_frame), work.directory / RESIZED, encode.RESIZED_JPEG)
    width, height = prepared.first_frame.size
    return Done(files, {"original": prepared.facts(), "width": width, "height": height})


@media.handles("compress")
def compress(work: Work) -> Done:
    """Make the small JPEG."""
    image, _ = Picture(work.files[RESIZED].read_bytes(), "image/jpeg").frame(0)
    return Done({COMPRESSED: encode.write(image, work.directory / COMPRESSED, encode.SMALL_JPEG)})


@media.handles("webp")
def webp(work: Work) -> Done:
    """Write the requested variants first, and the final WebP last."""
    params: MediaParams = work.params
    master = next(name for name in MASTERS if name in work.files)
    source = _Master(work.files[master], MASTERS[master])
    files = {
        VARIANTS[name].output: source.write(VARIANTS[name], work.directory / VARIANTS[name].output)
        for name in params.variants
    }
    files[FINAL] = source.write_webp(None, work.directory / FINAL)
    return Done(files)


class _PreparedPicture:
    """The frames of an original, as the outputs show them: in sRGB (RGB or RGBA) and upright, with no side longer than
    `max_side`.
    """

    def __init__(self, original: Original, max_side: int) -> None:
        self._original = original
        self._picture = Picture(original.data, original.content_type, original.header)
        self._size = fit(self._picture.size, max_side)
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size. The decoder rounds the sides up, so the picture may fill
        # only a part of the last row or column of pixels. The box is the area that the picture fills.
        self._box = self._picture.shrink_on_load(self._size) if original.content_type == "image/jpeg" else None
        self._to_srgb = ToSrgb(self._picture.icc)
        self.animation = Animation(self._render, self._picture.frames, self._picture.plays)

    @property
    def first_frame(self) -> Image.Image:
        return self.animation.first_frame

    def _render(self, index: int) -> tuple[Image.Image, int]:
        """The frame, and the milliseconds for which it is shown."""
        image, milliseconds = self._picture.frame(index)
        image = self._to_srgb(shrink(image, self._size, self._box))
        return upright(image, self._picture.orientation), milliseconds

    def facts(self) -> dict[str, Any]:
        """The facts about the original that the step's value contains. Width and height are those of the upright
        picture.
        """
        width, height = upright_size(self._picture.size, self._picture.orientation)
        return {
            "width": width,
            "height": height,
            "bytes": len(self._original.data),
            "content_type": self._original.content_type,
            "frames": self._picture.frames,
            "has_alpha": self.animation.has_alpha,
        }


def _write_masters(prepared: _PreparedPicture, directory: Path) -> dict[str, File]:
    """Write a lossless master if JPEG cannot hold the picture, because it is animated or has an alpha channel."""
    if prepared.animation.is_animated:
        name = "resize.webp"
        return {name: encode.write_animation(prepared.animation, directory / name, encode.LOSSLESS_ANIMATION)}
    if prepared.first_frame.mode == "RGBA":
        name = "resize.png"
        return {name: encode.write(prepared.first_frame, directory / name, encode.LOSSLESS_PNG)}
    return {}


class _Master:
    """The master that `resize` wrote, as the source of WebP files and variants."""

    def __init__(self, path: Path, content_type: str) -> None:
        self._data = path.read_bytes()
        self._content_type = content_type
        # A picture with one frame is decoded once for all files. An animation is decoded for each file, because memory
        # cannot hold all its frames.
        picture = self._open()
        self._frame = picture.frame(0) if picture.frames == 1 else None

    def _open(self) -> Picture:
        return Picture(self._data, self._content_type)

    def write(self, variant: Variant, path: Path) -> File:
        if variant.content_type == "image/webp":
            return self.write_webp(variant.max_side, path)
        settings = encode.AVIF if variant.content_type == "image/avif" else encode.PNG
        return encode.write(self._animation(variant.max_side).first_frame, path, settings)

    def write_webp(self, max_side: int | None, path: Path) -> File:
        animation = self._animation(max_side)
        if animation.is_animated:
            return encode.write_animation(animation, path, encode.WEBP_ANIMATION)
        return encode.write(animation.first_frame, path, encode.WEBP)

    def _animation(self, max_side: int | None) -> Animation:
        picture = self._open()
        size = fit(picture.size, max_side) if max_side else picture.size

        def render(index: int) -> tuple[Image.Image, int]:
            image, milliseconds = self._frame or picture.frame(index)
            return shrink(image, size), milliseconds

        return Animation(render, picture.frames, picture.plays)
