"""An attribute that changes while a test waits, for mypy."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def now(value: T) -> T:
    """`assert now(worker.is_ready)`: without it mypy takes the attribute for unchanged from there on, calls the lines
    after the opposite assertion unreachable, and checks none of them.
    """
    return value
