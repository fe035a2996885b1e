"""The work directory of a worker process, for the files of its attempts. The worker removes the directory when it ends.
If the worker is killed, the next worker that starts removes the directory.

A living worker holds two locks: on its directory, and on the lock file in it. The lock on the directory protects it
from systemd-tmpfiles. That program deletes files and directories in /tmp that nobody has used for ten days, but nothing
beneath a locked directory. Without this lock it would delete the directory of an idle worker. A new directory of the
same name would not help, because the children's fences (Landlock) grant access only to the deleted directory. The lock
file is for workers of earlier releases: they check only the lock on this file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from uuid import UUID

_LOCK = "owner.lock"


class WorkDir:
    """`with WorkDir(root, worker) as path`: `path` is the folder for attempts in the worker's directory, `root/WORKER`.
    Several workers may have the same `root`.
    """

    def __init__(self, root: Path, worker: UUID) -> None:
        self._root = root
        self._path = root / str(worker)
        self._locks: list[int] = []

    def __enter__(self) -> Path:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._root} belongs to another user; set LEASEHOLD_WORK_DIR")
        # Lock the root while this worker starts. Otherwise another worker could remove the new directory in its sweep,
        # before this worker has locked the directory.
        root_lock = _locked(self._root, os.O_DIRECTORY)
        try:
            self._sweep()
            self._path.mkdir(mode=0o700)
            self._locks = [
                _locked(self._path, os.O_DIRECTORY),
                _locked(self._path / _LOCK, os.O_CREAT | os.O_RDWR),
            ]
        finally:
            os.close(root_lock)
        attempts = self._path / "attempts"
        attempts.mkdir(mode=0o700)
        return attempts

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        _remove(self._path)
        for lock in self._locks:
            os.close(lock)

    def _sweep(self) -> None:
        """Remove the directories of killed workers. The caller holds the lock of the root, so no other worker starts
        meanwhile.
        """
        for directory in self._root.iterdir():
            if _is_of_worker(directory):
                _remove_if_dead(directory)


def _is_of_worker(directory: Path) -> bool:
    try:
        return str(UUID(directory.name)) == directory.name
    except ValueError:
        return False


def _remove_if_dead(directory: Path) -> None:
    """Remove a worker's directory, unless that worker lives. No other worker starts meanwhile, because the caller holds
    the lock of the root. So a directory without a lock file belongs to a worker that was killed while it made or
    removed the directory.
    """
    with suppress(OSError), ExitStack() as locks:
        _lock_now(directory, os.O_DIRECTORY, locks)
        with suppress(FileNotFoundError):
            _lock_now(directory / _LOCK, os.O_RDWR, locks)
        _remove(directory)


def _lock_now(path: Path, flags: int, locks: ExitStack) -> None:
    """Open the file or directory and lock it until `locks` closes. Raises OSError if another process holds the lock."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    locks.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(directory: Path) -> None:
    """Remove the directory as far as possible, the lock file last. If something remains, the next worker that starts
    tries again.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
        if {path.name for path in directory.iterdir()} <= {_LOCK}:
            (directory / _LOCK).unlink(missing_ok=True)
            directory.rmdir()


def _locked(path: Path, flags: int) -> int:
    """Open the file or directory and lock it. Waits until the lock is free. Closing the descriptor frees the lock."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
