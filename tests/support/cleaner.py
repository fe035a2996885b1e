"""Deletes temporary files as `systemd-tmpfiles --clean` does."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def clean(directory: Path) -> None:
    """Delete what is in the directory, as if nobody had used it for long. What is locked stays, and what is in it."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
        if path.is_dir():
            clean(path)
            with suppress(OSError):  # it is not empty
                path.rmdir()
        else:
            path.unlink()
