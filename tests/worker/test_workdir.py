"""The directories of workers that start and end beside each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from leasehold.worker.attempts.workdir import WorkDir
from tests.support.cleaner import clean


def test_a_worker_that_starts_leaves_the_directory_of_one_that_is_just_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = uuid4(), uuid4()
    really = fcntl.flock
    threads: list[threading.Thread] = []
    started = threading.Event()

    def start_second() -> None:
        with WorkDir(tmp_path, second):
            started.set()

    def flock(descriptor: int, operation: int) -> None:
        """Between the first worker's lock file and its lock, the second one starts."""
        if (tmp_path / str(first) / "owner.lock").exists() and not threads:
            threads.append(threading.Thread(target=start_second))
            threads[0].start()
            started.wait(0.5)
        really(descriptor, operation)

    monkeypatch.setattr("leasehold.worker.attempts.workdir.fcntl.flock", flock)
    with WorkDir(tmp_path, first) as path:
        threads[0].join()
        assert started.is_set()
        assert path.is_dir()


def test_the_directory_of_a_killed_worker_is_removed_by_the_next_and_nothing_else_is(tmp_path: Path) -> None:
    killed, other = tmp_path / str(UUID(int=1)), tmp_path / "mine"
    for directory in (killed, other):
        directory.mkdir()
    (killed / "owner.lock").touch()
    with WorkDir(tmp_path, uuid4()):
        assert (killed.exists(), other.exists()) == (False, True)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("killed_in", ["making", "removing", "sweeping"])
def test_a_worker_that_is_killed_while_a_directory_is_made_or_removed_leaves_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    def die(*_arguments: object, **_named: object) -> None:
        raise _Killed

    dead = WorkDir(tmp_path, UUID(int=1))
    if killed_in == "making":
        (tmp_path / str(UUID(int=1))).mkdir()
    else:
        attempts = dead.__enter__()
        (attempts / "big").write_bytes(b"x")
        if killed_in == "sweeping":
            _die(dead)
        # The kill comes before the last removal: that of the directory itself.
        monkeypatch.setattr(Path, "rmdir", die)
        sweeper = WorkDir(tmp_path, UUID(int=2))
        with pytest.raises(_Killed):
            sweeper.__enter__() if killed_in == "sweeping" else dead.__exit__(None, None, None)
        monkeypatch.undo()
        if killed_in == "removing":
            _die(dead)
    with WorkDir(tmp_path, uuid4()):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("swept", [True, False])
def test_what_cannot_be_removed_now_is_removed_by_a_later_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, swept: bool
) -> None:
    first = WorkDir(tmp_path, UUID(int=1))
    attempts = first.__enter__()
    (attempts / "kept").write_bytes(b"x")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_arguments, **_named: None)
        first.__exit__(None, None, None)
        if swept:
            WorkDir(tmp_path, UUID(int=2)).__enter__()
    assert (tmp_path / str(UUID(int=1)) / "owner.lock").exists(), "a worker of an earlier release needs it to sweep"
    with WorkDir(tmp_path, uuid4()):
        assert not attempts.exists()


def test_only_directories_with_a_workers_name_are_swept(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("mine", "1" * 32, "a" * 36)]
    for directory in mine:
        directory.mkdir()
        (directory / "owner.lock").touch()
    with WorkDir(tmp_path, uuid4()):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(mine)


def test_a_cleaner_of_temporary_files_takes_nothing_of_a_worker_that_had_nothing_to_do_for_days(tmp_path: Path) -> None:
    root = tmp_path / "leasehold"
    with WorkDir(root, uuid4()) as attempts:
        inode = attempts.stat().st_ino
        clean(tmp_path)
        assert attempts.stat().st_ino == inode, "the fences of the children name this directory"
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", ["the lock file", "the lock of the directory"])
def test_a_living_worker_keeps_its_directory_by_either_lock(tmp_path: Path, lost: str) -> None:
    """A cleaner that knows no locks has deleted the file. A worker of an earlier release locks the file alone."""
    living = WorkDir(tmp_path, uuid4())
    attempts = living.__enter__()
    directory_lock, _ = living._locks
    if lost == "the lock file":
        (attempts.parent / "owner.lock").unlink()
    else:
        fcntl.flock(directory_lock, fcntl.LOCK_UN)
    with WorkDir(tmp_path, uuid4()):
        assert attempts.is_dir()
    _die(living)
    with WorkDir(tmp_path, uuid4()):
        assert not attempts.exists()


def _die(worker: WorkDir) -> None:
    """As a kill does: the locks are free, and nothing is removed."""
    for lock in worker._locks:
        os.close(lock)


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""
