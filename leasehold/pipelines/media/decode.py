"""Opens a picture and decodes its frames, for the media steps. If the picture is damaged, `Picture` raises Permanent
`corrupt_image`. MemoryError and errors of the operating system pass unchanged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from io import BytesIO
from typing import Any

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from leasehold.pictures.damage import damage_is_permanent
from leasehold.pipelines.media import heic_decoder
from leasehold.pipelines.media.animation import SHORTEST_MS
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.pixels import Box, Size, plain
from leasehold.pipelines.media.refusals import corrupt_image, more_pixels_than_accepted

#: Content type -> the name of its decoder in Pillow.
_DECODERS = {
    "image/jpeg": "JPEG",
    "image/png": "PNG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/avif": "AVIF",
    "image/tiff": "TIFF",
    "image/bmp": "BMP",
    "image/heic": "HEIF",
}
#: Pillow's plugins for the accepted types. They are imported here, before the zygote (the process that only forks)
#: forks a child. Otherwise each child would import dozens of plugins by itself.
PLUGINS = (
    AvifImagePlugin, BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin,
)  # fmt: skip
heic_decoder.load_decoder()
_ORIENTATION_TAG = 0x0112

#: Content type -> the bytes that its decoder needs at most for each pixel of the picture. These decoders report a lack
#: of memory as damage of the picture. So `Picture` first allocates as much memory itself, and raises MemoryError if
#: there is too little.
_PEAK_BYTES_PER_PIXEL = {"image/webp": 16, "image/avif": 12, "image/tiff": 8, "image/heic": 16}
_ORIENTATIONS = range(1, 9)
_UPRIGHT = 1
_FOREVER = 0  # the value of `Picture.plays` for an animation that never ends

_DEFAULT_MS = 100  # a frame whose file gives no time, or less than SHORTEST_MS, is shown for this time


def _decoding() -> AbstractContextManager[None]:
    """A context manager for each call of a decoder. It turns the decoder's errors about the picture into Permanent."""
    return damage_is_permanent(
        damaged=lambda: corrupt_image("it cannot be decoded"),
        too_many_pixels=more_pixels_than_accepted,
    )


class Picture:
    """A file that is open for decoding. `size`: the canvas, before the picture is turned upright. `frames`: the number
    of frames.
    """

    def __init__(self, data: bytes, content_type: str, header: Header | None = None) -> None:
        """Open the file without decoding it.

        `header`: the size and the number of frames that the check of the file's header found; None: nothing is
        compared. The picture is refused if the decoder finds a larger size or more frames. `frame` compares the size
        again. Raises Permanent: corrupt_image or too_many_pixels.
        """
        with _decoding():
            if header is not None:
                _check_memory(header.pixels * _PEAK_BYTES_PER_PIXEL.get(content_type, 0))
            self._image = Image.open(BytesIO(data), formats=(_DECODERS[content_type],))
            self.size: Size = self._image.size
            # An APNG may begin with a picture for viewers without animation. This picture is not a frame of the
            # animation.
            self._skipped_frames = int(bool(getattr(self._image, "default_image", False)))
            self.frames = self._count_frames(content_type, header)
        self._is_gif = content_type == "image/gif"
        self._header = header
        self._check_size()
        if header is not None and not 0 < self.frames <= header.frames:
            raise corrupt_image("its header and its content disagree")

    def _count_frames(self, content_type: str, header: Header | None) -> int:
        if content_type in ("image/jpeg", "image/tiff", "image/heic"):
            return 1  # only the first picture is read; counting TIFF pages might never end, as they may form a circle
        if content_type == "image/gif" and header is not None:
            return header.frames  # Pillow would read through the whole file to count them
        return int(getattr(self._image, "n_frames", 1)) - self._skipped_frames

    def _check_size(self) -> None:
        """Raises Permanent `corrupt_image` if the decoder's picture is larger than the size in the header."""
        width, height = self._image.size
        header = self._header
        if header is not None and not (0 < width <= header.width and 0 < height <= header.height):
            raise corrupt_image("its header and its content disagree")

    @property
    def icc(self) -> bytes | None:
        profile = self._image.info.get("icc_profile")
        return profile if isinstance(profile, bytes) else None

    @cached_property
    def orientation(self) -> int:
        """The EXIF orientation, 1 to 8. Read this property after the first frame, because a PNG file may have its EXIF
        data after its pixels. Broken EXIF data counts as orientation 1.
        """
        exif = Image.Exif()
        try:
            exif.load(self._image.info.get("exif") or b"")
            value = exif.get(_ORIENTATION_TAG, _UPRIGHT)
        except Exception:  # noqa: BLE001 - untrusted metadata: any error only means that it is not used
            return _UPRIGHT
        return value if isinstance(value, int) and value in _ORIENTATIONS else _UPRIGHT

    @property
    def plays(self) -> int:
        """How often the animation is played. 0 means for ever."""
        loop = self._image.info.get("loop")
        if not self._is_gif:
            return loop if isinstance(loop, int) else _FOREVER
        if loop is None:
            return 1
        return loop + 1 if loop else _FOREVER  # GIF counts the repetitions after the first time

    def shrink_on_load(self, size: Size) -> Box | None:
        """Make the decoder scale a JPEG to 1/2, 1/4 or 1/8, but not below `size`. Call it before the first frame.

        Returns the part of the scaled frame that the picture fills, or None if the decoder does not scale.
        """
        with _decoding():
            drafted = self._image.draft(None, size)
        return drafted[1] if drafted else None

    def frame(self, index: int) -> tuple[Image.Image, int]:
        """Frame `index` in a plain mode (8 bits a channel, no palette), and the milliseconds for which the frame is
        shown.

        Read frames in order, because some decoders start again to reach an earlier frame. Raises Permanent
        `corrupt_image`.
        """
        with _decoding():
            if self.frames > 1 or self._skipped_frames:
                self._image.seek(index + self._skipped_frames)
                self._check_size()  # a decoder may read the size of a frame only when it seeks to the frame
            self._image.load()
            image = plain(self._image)
            if self.frames > 1 and image.size != self.size:  # a frame may reach beyond the canvas
                image = image.crop((0, 0, *self.size))
            return image, _milliseconds(self._image.info.get("duration"))


def _check_memory(size: int) -> None:
    """Raises MemoryError if `size` bytes cannot be allocated. The kernel gives real memory only to bytes that somebody
    writes or reads, so the zeroes cost none.
    """
    bytes(size)


def _milliseconds(duration: Any) -> int:
    shown = round(duration) if isinstance(duration, int | float) else 0
    return shown if shown >= SHORTEST_MS else _DEFAULT_MS
