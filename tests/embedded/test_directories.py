from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from leasehold.embedded.directories import LOCK_NAME, PREFIX, RunDirectory, cache_directory, remove_abandoned
from leasehold.embedded.process import EmbeddedError
from tests.support.cleaner import clean


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEASEHOLD_TMP", str(tmp_path))
    return tmp_path


def test_a_runs_directory_goes_with_the_run(own_root: Path) -> None:
    with RunDirectory() as directory:
        assert directory.path.parent == own_root
    assert not directory.path.exists()


def test_a_cleaner_of_temporary_files_takes_nothing_of_a_run_that_goes_on_for_weeks(own_root: Path) -> None:
    with RunDirectory() as directory:
        (directory.path / "rows").mkdir()
        (directory.path / "rows" / "seldom read").touch()
        clean(own_root)
        assert (directory.path / "rows" / "seldom read").exists()


def test_a_given_directory_stays(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "data") as directory:
        (directory.path / "row").write_text("kept")
        assert not directory.path.stat().st_mode & 0o066
    assert (tmp_path / "data" / "row").read_text() == "kept"


@pytest.mark.parametrize(
    ("user", "mode", "kept"), [(1000, 0o775, 0o775), (1000, 0o700, 0o700), (0, 0o775, 0o775), (0, 0o700, 0o711)]
)
def test_a_given_directory_stays_open_to_whom_it_was_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, mode: int, kept: int
) -> None:
    """It may be shared with a group. Only the servers of root, which run as another user, need more."""
    tmp_path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with RunDirectory(tmp_path, root=tmp_path / "runs") as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == kept


def test_a_directory_in_use_is_refused_to_another(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path / "data"),
        pytest.raises(EmbeddedError, match="in use"),
        RunDirectory(tmp_path / "data"),
    ):
        pass


#: Owns the directory of its argument until its input ends.
OWNER = """
import sys
from pathlib import Path
from leasehold.embedded.directories import RunDirectory
with RunDirectory(Path(sys.argv[1])):
    print("owns it", flush=True)
    sys.stdin.read()
"""


def test_of_two_processes_that_begin_with_a_new_directory_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other owns it when this one has found no lock file."""
    data, lock_file = tmp_path / "data", fcntl.flock
    with ExitStack() as stack:

        def lock_after_another(descriptor: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock_file)
            other = subprocess.Popen(
                [sys.executable, "-c", OWNER, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(other)
            assert other.stdout is not None
            assert other.stdout.readline() == "owns it\n"
            lock_file(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", lock_after_another)
        with pytest.raises(EmbeddedError, match="in use"), RunDirectory(data):
            pass
        assert [file.name for file in data.iterdir()] == [LOCK_NAME]
    with RunDirectory(data):
        assert [file.name for file in data.iterdir()] == [LOCK_NAME]


def test_a_file_that_a_dead_process_with_the_same_id_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container the id is often the same."""
    (tmp_path / f"{LOCK_NAME}.{os.getpid()}").touch()
    with RunDirectory(tmp_path):
        pass


def test_what_a_dead_owner_left_is_removed(own_root: Path) -> None:
    left = own_root / f"{PREFIX}dead"
    left.mkdir()
    (left / LOCK_NAME).touch()
    assert remove_abandoned(own_root) == [left]
    assert not left.exists()


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_removal_that_is_killed_midway_can_be_done_again(
    own_root: Path, monkeypatch: pytest.MonkeyPatch, is_abandoned: bool
) -> None:
    """A directory without its lock would stay for ever: it could be one that its owner is making."""
    removed: list[str] = []
    unlink = os.unlink

    def remember(path: str | Path, *, dir_fd: int | None = None) -> None:
        removed.append(Path(path).name)
        unlink(path, dir_fd=dir_fd)

    with RunDirectory() as directory:
        for number in range(20):
            (directory.path / f"{number}").mkdir()
            (directory.path / f"{number}" / "file").touch()
            (directory.path / f"file-{number}").touch()
        if is_abandoned:
            left = shutil.copytree(directory.path, own_root / f"{PREFIX}dead")
        monkeypatch.setattr(os, "unlink", remember)
        if is_abandoned:
            assert remove_abandoned(own_root) == [left]
            assert not left.exists()
    if not is_abandoned:
        assert not directory.path.exists()
    assert removed.index(LOCK_NAME) == 40


def test_what_a_living_owner_uses_is_not_touched(own_root: Path) -> None:
    with RunDirectory() as directory:
        assert remove_abandoned(own_root) == []
        assert directory.path.exists()


def test_what_another_user_left_is_not_touched(own_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = own_root / f"{PREFIX}dead"
    left.mkdir()
    (left / LOCK_NAME).touch()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert remove_abandoned(own_root) == []
    assert left.exists()


def test_a_link_to_elsewhere_is_not_followed(own_root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_NAME).touch()
    (own_root / f"{PREFIX}link").symlink_to(elsewhere)
    assert remove_abandoned(own_root) == []
    assert (elsewhere / LOCK_NAME).exists()


def test_a_directory_without_a_lock_is_somebody_elses(own_root: Path) -> None:
    (own_root / f"{PREFIX}being-made").mkdir()
    assert remove_abandoned(own_root) == []


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("LEASEHOLD_CACHE", str(cache))
    with pytest.raises(EmbeddedError, match=f"uid {os.geteuid()}"):
        cache_directory()


def test_folders_that_are_named_from_the_current_one_are_the_same_for_servers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEASEHOLD_TMP", "runs")
    monkeypatch.setenv("LEASEHOLD_CACHE", "cache")
    (tmp_path / "runs").mkdir()
    with RunDirectory() as directory:
        assert directory.path.parent == tmp_path / "runs"
    assert cache_directory() == tmp_path / "cache"
