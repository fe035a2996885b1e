"""The result of every header reader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Header:
    """`width` x `height`: the largest area that a decoder may allocate for one frame, before the step `resize` turns
    the picture upright.
    """

    width: int
    height: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height
