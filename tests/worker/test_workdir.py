"""The directories of workers that start and end beside each other."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from leasehold.worker.attempts.workdir import WorkDir


def test_a_worker_that_starts_leaves_the_directory_of_one_that_is_just_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = uuid4(), uuid4()
    really, threads = fcntl.flock, []
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
