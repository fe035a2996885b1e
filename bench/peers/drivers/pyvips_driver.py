"""libvips by pyvips: PICTURE DIRECTORY SECONDS; prints pictures a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter

os.environ["VIPS_CONCURRENCY"] = "1"  # a process a core

import pyvips


def make(picture: Path, directory: Path) -> None:
    small = pyvips.Image.thumbnail(str(picture), 2048, height=2048, size="down").copy_memory()
    small.jpegsave(str(directory / "resize.jpg"), Q=90, subsample_mode="off")
    small.jpegsave(str(directory / "compress.jpg"), Q=80, subsample_mode="on", interlace=True, optimize_coding=True)
    small.webpsave(str(directory / "final.webp"), Q=80, effort=4)


def main() -> None:
    picture, directory, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    pyvips.cache_set_max(0)  # or it would make each picture once
    make(picture, directory)
    began, made = perf_counter(), 0
    while perf_counter() - began < seconds:
        make(picture, directory)
        made += 1
    sys.stdout.write(f"{made / (perf_counter() - began)}\n")


main()
