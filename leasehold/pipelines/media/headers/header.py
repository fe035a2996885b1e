"""The result of every header walk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Header:
    """`width` x `height`: the largest area that a decoder could be made to allocate, before orientation."""

    width: int
    height: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height
