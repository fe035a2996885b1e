"""Marks the imports of a user's program in a child process of a worker. While the mark is set, the program must not
start a worker.

A script may start its worker without `if __name__ == "__main__":`. Without the mark, importing this script would start
a worker in the child. That worker would start children of its own, without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way = False  # the mark of this process


@contextmanager
def import_of_child() -> Iterator[None]:
    """Use this around the import of a user's program for the tasks that this child process runs."""
    global _under_way  # noqa: PLW0603 - imports may run in any thread: the process has one mark
    before, _under_way = _under_way, True
    try:
        yield
    finally:
        _under_way = before


def is_import_of_child() -> bool:
    """Whether a child process of a worker imports a user's program now."""
    return _under_way
