"""What the Python drivers of `pictures` share: PICTURE DIRECTORY SECONDS; prints pictures a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter


def measure(make: Callable[[Path, Path], None]) -> None:
    """`make(picture, directory)`, first once to warm up."""
    picture, directory, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    make(picture, directory)
    began, made = perf_counter(), 0
    while perf_counter() - began < seconds:
        make(picture, directory)
        made += 1
    sys.stdout.write(f"{made / (perf_counter() - began)}\n")
