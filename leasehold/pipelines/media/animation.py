"""`Animation`: the picture that a media step gives to Pillow's encoder. It renders one frame at a time, so that memory
never holds all frames.
"""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

#: The number of a frame -> the frame, and the milliseconds for which it is shown.
Render = Callable[[int], tuple[Image.Image, int]]

# The largest numbers that a WebP animation and its encoder allow. The original picture may have larger numbers.
_MAX_PLAYS = 2**16 - 1
_LONGEST_FRAME_MS = 2**24 - 1
_LONGEST_ANIMATION_MS = 2**31 - 1
#: The shortest time for which a frame is shown, in milliseconds. Browsers show a frame of 10 ms or less for 100 ms,
#: because old encoders wrote 0 if nobody had set a time. decode.py does the same (`_milliseconds`).
SHORTEST_MS = 11


class Animation(Image.Image):
    """A picture of one or more frames for Pillow's encoders, which seek to a frame and then read it. `plays`: how often
    the animation is shown; 0: for ever. Plays and times are cut to what a WebP file can have.

    When a frame is rendered for the first time, its milliseconds are added to `durations`. Pillow gets this list before
    the list is complete. This is safe: Pillow reads the entry of a frame only after it has called `seek` for the frame,
    and by then the entry exists.
    """

    def __init__(self, render: Render, frames: int, plays: int) -> None:
        super().__init__()
        self.n_frames = frames
        self.is_animated = frames > 1
        self.plays = min(plays, _MAX_PLAYS)
        self.durations: list[int] = []
        self.has_alpha = False  # whether one of the frames that were rendered until now is transparent
        self._render = render
        self._index = -1  # the number of the current frame, which Pillow reads
        first_frame = self._render_current(0)
        # Copied, because the decoder may overwrite these pixels when it decodes the next frame.
        self.first_frame = first_frame.copy() if self.is_animated else first_frame

    def seek(self, frame: int) -> None:
        if frame == 0:
            self._set_current(self.first_frame, 0)
        elif frame != self._index:
            self._render_current(frame)

    def tell(self) -> int:
        return self._index

    def _render_current(self, index: int) -> Image.Image:
        image, milliseconds = self._render(index)
        self._set_current(image, index)
        if index == len(self.durations):
            self.durations.append(min(milliseconds, self._longest_ms(index)))
        self.has_alpha = self.has_alpha or image.mode == "RGBA"
        return image

    def _longest_ms(self, index: int) -> int:
        """The longest time for which this frame may be shown. It leaves enough of _LONGEST_ANIMATION_MS to show each
        later frame for SHORTEST_MS, because the encoder drops a frame that is shown for no time.
        """
        later_frames = self.n_frames - index - 1
        return min(_LONGEST_FRAME_MS, _LONGEST_ANIMATION_MS - sum(self.durations) - later_frames * SHORTEST_MS)

    def _set_current(self, image: Image.Image, index: int) -> None:
        self.im = image.im
        self._mode = image.mode
        self._size = image.size
        self._index = index
