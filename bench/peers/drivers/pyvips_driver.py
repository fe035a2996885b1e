"""Drives libvips, by pyvips, for the figure `pictures`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["VIPS_CONCURRENCY"] = "1"  # the bench starts a process for each core; libvips reads this when it is loaded

import pyvips
from pictures_a_second import measure


def make(picture: Path, directory: Path) -> None:
    small = pyvips.Image.thumbnail(str(picture), 2048, height=2048, size="down").copy_memory()
    small.jpegsave(str(directory / "resize.jpg"), Q=90, subsample_mode="off")
    small.jpegsave(str(directory / "compress.jpg"), Q=80, subsample_mode="on", interlace=True, optimize_coding=True)
    small.webpsave(str(directory / "final.webp"), Q=80, effort=4)


pyvips.cache_set_max(0)  # else libvips would make the picture only once
measure(make)
