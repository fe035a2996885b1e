"""Reads numbers from a sequence of bits. The readers of HEVC and AV1 use it."""

from __future__ import annotations

from leasehold.pipelines.media.refusals import corrupt_image

#: An Exp-Golomb code with more leading zeros is refused, because no parameter of a picture needs such a large number.
_MAX_NUMBER_BITS = 32


class Bits:
    """Reads numbers one after the other. A read beyond the last bit raises Permanent `corrupt_image`."""

    def __init__(self, data: bytes) -> None:
        self._bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
        self._position = 0

    def unsigned(self, count: int) -> int:
        chunk = self._bits[self._position : self._position + count]
        if len(chunk) < count:
            raise corrupt_image("the file ends in the middle of its parameters")
        self._position += count
        return int(chunk, 2) if chunk else 0

    def flag(self) -> bool:
        return self.unsigned(1) == 1

    def exp_golomb(self) -> int:
        """Read a number in Exp-Golomb code (n zero bits, then n + 1 bits with the number plus 1). AV1 calls this code
        `uvlc`.
        """
        zeroes = self._bits.find("1", self._position) - self._position
        if not 0 <= zeroes <= _MAX_NUMBER_BITS:
            raise corrupt_image("a parameter of the picture is invalid")
        self._position += zeroes
        return self.unsigned(zeroes + 1) - 1
