"""Lists where Python finds modules, so that the processes that this process starts find the same code."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def import_path() -> list[str]:
    """The entries of this process's `sys.path`, for the `sys.path` of a process that this process starts. The
    environment alone is not enough, because a program or pytest may have added folders that no variable names.

    Folders and archives become absolute paths. Any other entry may be the name of an import hook, and stays as it is.
    The entry for the current folder (an empty text) is left out, because the started process adds its own entry for
    this folder, after the installed packages.

    Do not pass these entries as PYTHONPATH. The programs that the new process starts would also inherit PYTHONPATH,
    even programs of another Python.
    """
    entries: list[object] = [*sys.path]  # Python skips an entry that is no text, such as a Path
    texts = [entry for entry in entries if isinstance(entry, str) and entry]
    return [str(Path(entry).absolute()) if _exists(entry) else entry for entry in texts]


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises an error where this user may not look
