"""Pillow, called directly: PICTURE DIRECTORY SECONDS; prints pictures a second."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

from PIL import Image


def make(picture: Path, directory: Path) -> None:
    with Image.open(picture) as opened:
        opened.draft("RGB", (2048, 2048))
        opened.thumbnail((2048, 2048), Image.Resampling.LANCZOS, reducing_gap=2.0)
        opened.save(directory / "resize.jpg", quality=90, subsampling="4:4:4")
        opened.save(directory / "compress.jpg", quality=80, subsampling="4:2:0", progressive=True, optimize=True)
        opened.save(directory / "final.webp", quality=80, method=4)


def main() -> None:
    picture, directory, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    make(picture, directory)
    began, made = perf_counter(), 0
    while perf_counter() - began < seconds:
        make(picture, directory)
        made += 1
    sys.stdout.write(f"{made / (perf_counter() - began)}\n")


main()
