"""An animation whose frames are made one at a time, so that memory holds one and not all of them."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

Render = Callable[[int], tuple[Image.Image, int]]


class Animation(Image.Image):
    """What Pillow's encoders take for a picture of several frames: they seek, then read.

    `durations` grows by one entry a frame, in milliseconds, just before the encoder asks for it.
    """

    def __init__(self, render: Render, frames: int, plays: int) -> None:
        super().__init__()
        self.n_frames = frames
        self.is_animated = frames > 1
        self.plays = plays
        self.durations: list[int] = []
        self.has_alpha = False
        self._render = render
        self._index = -1
        first = self._show(0)
        self.first = first.copy() if self.is_animated else first  # later frames may be drawn over it

    def seek(self, frame: int) -> None:
        if frame == 0:
            self._become(self.first, 0)
        elif frame != self._index:
            self._show(frame)

    def tell(self) -> int:
        return self._index

    def _show(self, index: int) -> Image.Image:
        image, milliseconds = self._render(index)
        self._become(image, index)
        if index == len(self.durations):
            self.durations.append(milliseconds)
        self.has_alpha = self.has_alpha or image.mode == "RGBA"
        return image

    def _become(self, image: Image.Image, index: int) -> None:
        self.im = image.im
        self._mode = image.mode
        self._size = image.size
        self._index = index
