"""`Header`: what every reader of a picture's header returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Header:
    """`width` x `height`: the largest area, in pixels, that a decoder may allocate for one frame. The two are measured
    before the step `resize` turns the picture upright. `frames`: the number of frames; 1 if it is no animation.
    """

    width: int
    height: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height
