"""Shared by the Python drivers of `pictures`. Arguments: PICTURE DIRECTORY SECONDS. They print pictures a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter


def measure(make: Callable[[Path, Path], None]) -> None:
    """Call `make(picture, directory)` once to warm up, then for the given seconds, and print the rate."""
    picture, directory, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    make(picture, directory)
    began, count = perf_counter(), 0
    while perf_counter() - began < seconds:
        make(picture, directory)
        count += 1
    sys.stdout.write(f"{count / (perf_counter() - began)}\n")
