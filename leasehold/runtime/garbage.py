"""The settings of Python's garbage collector for a server process. Every program calls `freeze_loaded` at start."""

from __future__ import annotations

import gc

#: Python collects the youngest generation after this many new objects. The default (700 in Python 3.11) is too small,
#: because one batch of claims makes thousands of objects. Garbage that waits for a collection takes a few megabytes.
_YOUNG = 20_000
#: After this many collections of a generation, Python also collects the next older generation.
_OLDER = 20


def collect_rarely() -> None:
    """Switch the collector on, and let it run seldom."""
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)
    gc.enable()


def freeze_loaded() -> None:
    """Exclude all objects that exist now from later collections. Call it when the process has imported its modules.

    Without this call, a worker spent a fifth of its time on collections, because each scrape of its metrics made Python
    scan all imported modules.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
