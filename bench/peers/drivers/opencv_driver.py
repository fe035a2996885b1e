"""Drives OpenCV for the figure `pictures`."""

from __future__ import annotations

from pathlib import Path

import cv2
from pictures_a_second import measure

_LARGE = [cv2.IMWRITE_JPEG_QUALITY, 90, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
_SMALL = [
    cv2.IMWRITE_JPEG_QUALITY, 80, cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_OPTIMIZE, 1,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
]  # fmt: skip


def make(picture: Path, directory: Path) -> None:
    pixels = cv2.imread(str(picture))
    height, width = pixels.shape[:2]
    scale = 2048 / max(width, height)
    small = cv2.resize(pixels, (round(width * scale), round(height * scale)), interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(directory / "resize.jpg"), small, _LARGE)
    cv2.imwrite(str(directory / "compress.jpg"), small, _SMALL)
    cv2.imwrite(str(directory / "final.webp"), small, [cv2.IMWRITE_WEBP_QUALITY, 80])


cv2.setNumThreads(1)  # the bench starts a process for each core
measure(make)
