"""Makes the directories of private servers: one for the data of each run, and a cache that keeps programs between runs.
(A run is one start of the servers, by `leasehold dev` or by the tests.)

The directory of a run is by default under /var/tmp, where the servers' user can reach it. The process of the run locks
a file in the directory. If that file is no longer locked, the process has died, and a later run removes the directory.
The process also locks the directory itself. Otherwise systemd-tmpfiles would delete the files in the directory that
nobody has used for thirty days.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from leasehold.embedded.process import EmbeddedError, unprivileged

#: The beginning of the name of each run's directory, and the name of the lock file in it.
PREFIX = "leasehold-run-"
LOCK_NAME = "owner.lock"


class RunDirectory:
    """The directory of one run, made in `root` and removed at the end. `keep`: a directory to use instead, which is not
    removed.
    """

    def __init__(self, keep: Path | None = None, *, root: Path | None = None) -> None:
        self._keep = keep
        self._root = root or temporary_root()
        self._lock = -1  # the descriptor of the lock file
        self._directory_lock = -1  # the descriptor of the locked directory
        self.path = Path()

    def __enter__(self) -> Self:
        remove_abandoned(self._root)
        if self._keep is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._root))
        else:
            self.path = self._keep.absolute()
            self.path.mkdir(mode=0o711, parents=True, exist_ok=True)  # other users may enter it, but not list its files
        if unprivileged().is_other_user:  # the servers' user may enter, but can read only its own files
            self.path.chmod(stat.S_IMODE(self.path.stat().st_mode) | 0o111)
        try:
            self._lock = _take_lock(self.path)
        except BlockingIOError:
            raise EmbeddedError(f"{self.path} is in use by another process") from None
        self._directory_lock = os.open(self.path, os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._directory_lock, fcntl.LOCK_SH)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._keep is None:
            _remove(self.path)
        os.close(self._lock)
        os.close(self._directory_lock)


def _take_lock(directory: Path) -> int:
    """Lock the directory's lock file. Returns its descriptor. Raises BlockingIOError if another process has the lock.

    If there is no lock file yet, make and lock a new file, and then give it the lock file's name. If another process
    has done this meanwhile, try to lock the file of that process. A new file is locked before it gets its final name,
    so an unlocked lock file always means that its owner is dead.
    """
    lock_file = directory / LOCK_NAME
    if not lock_file.exists():
        lock, new_file = tempfile.mkstemp(prefix=f"{LOCK_NAME}.", dir=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(new_file, lock_file)  # unlike a rename, it does not replace the lock file of another process
        except FileExistsError:  # another process has been faster
            os.close(lock)
        else:
            return lock
        finally:
            Path(new_file).unlink()
    lock = os.open(lock_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock


def remove_abandoned(root: Path) -> list[Path]:
    """Remove the directories that this user's dead runs have left in `root`. Returns the removed directories."""
    removed_directories = []
    for directory in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may remove the directory at this moment
            if _is_abandoned(directory):
                _remove(directory)
                removed_directories.append(directory)
    return removed_directories


def _remove(directory: Path) -> None:
    """Remove the directory of a run, and its lock file last. If this process dies meanwhile, a later run removes the
    rest, but only if the lock file is still there.
    """
    with contextlib.suppress(OSError):  # another process may remove the directory at this moment
        for path in [path for path in directory.iterdir() if path.name != LOCK_NAME]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # the owner is making the directory at this moment
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def temporary_root() -> Path:
    """The folder for directories of runs: $LEASEHOLD_TMP, else /var/tmp (a disk, not memory), else Python's default."""
    if configured_root := os.environ.get("LEASEHOLD_TMP"):
        return Path(configured_root).absolute()  # because the servers do not run in this process's current folder
    return Path("/var/tmp") if os.access("/var/tmp", os.W_OK) else Path(tempfile.gettempdir())  # noqa: S108 - mkdtemp makes it


def cache_directory() -> Path:
    """The folder for downloaded programs: $LEASEHOLD_CACHE, else /var/cache for root, else the user's own cache.

    Raises:
        EmbeddedError: another user can write there, and so could replace programs.
    """
    if configured_cache := os.environ.get("LEASEHOLD_CACHE"):
        cache = Path(configured_cache).absolute()
    elif os.geteuid() == 0:
        cache = Path("/var/cache/leasehold")  # root's home is closed to the user that the servers run as
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leasehold"
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = cache.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise EmbeddedError(f"{cache} must be a directory that only its owner, uid {os.geteuid()}, can write to")
    if unprivileged().is_other_user:  # the servers' user runs programs in it, whatever the umask was
        cache.chmod(stat.S_IMODE(status.st_mode) | 0o111)
    return cache
