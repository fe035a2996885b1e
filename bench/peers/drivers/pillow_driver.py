"""Drives Pillow, called directly, for the figure `pictures`."""

from __future__ import annotations

from pathlib import Path

from pictures_a_second import measure
from PIL import Image


def make(picture: Path, directory: Path) -> None:
    with Image.open(picture) as opened:
        opened.draft("RGB", (2048, 2048))
        opened.thumbnail((2048, 2048), Image.Resampling.LANCZOS, reducing_gap=2.0)
        opened.save(directory / "resize.jpg", quality=90, subsampling="4:4:4")
        opened.save(directory / "compress.jpg", quality=80, subsampling="4:2:0", progressive=True, optimize=True)
        opened.save(directory / "final.webp", quality=80, method=4)


measure(make)
