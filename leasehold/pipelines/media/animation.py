"""An animation that renders one frame at a time, so that memory never holds all frames. `steps` encodes it."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

#: The number of a frame -> the frame, and the milliseconds for which it is shown.
Render = Callable[[int], tuple[Image.Image, int]]


class Animation(Image.Image):
    """A picture of several frames for Pillow's encoders: they seek to a frame, then read it.

    `durations` gets one entry for each frame, in milliseconds, just before the encoder reads the entry.
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
        frame = self._show(0)
        self.first_frame = frame.copy() if self.is_animated else frame  # a later frame may overwrite its pixels

    def seek(self, frame: int) -> None:
        if frame == 0:
            self._become(self.first_frame, 0)
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
