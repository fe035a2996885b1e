from __future__ import annotations

import os
from pathlib import Path

import pytest

from leasehold.embedded.directories import LOCK_NAME, PREFIX, RunDirectory, cache_directory, remove_abandoned
from leasehold.embedded.process import EmbeddedError


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEASEHOLD_TMP", str(tmp_path))
    return tmp_path


def test_a_runs_directory_goes_with_the_run(own_root: Path) -> None:
    with RunDirectory() as directory:
        assert directory.path.parent == own_root
    assert not directory.path.exists()


def test_a_given_directory_stays(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "data") as directory:
        (directory.path / "row").write_text("kept")
    assert (tmp_path / "data" / "row").read_text() == "kept"


def test_a_directory_in_use_is_refused_to_another(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path / "data"),
        pytest.raises(EmbeddedError, match="in use"),
        RunDirectory(tmp_path / "data"),
    ):
        pass


def test_what_a_dead_owner_left_is_removed(own_root: Path) -> None:
    left = own_root / f"{PREFIX}dead"
    left.mkdir()
    (left / LOCK_NAME).touch()
    assert remove_abandoned(own_root) == [left]
    assert not left.exists()


def test_what_a_living_owner_uses_is_not_touched(own_root: Path) -> None:
    with RunDirectory() as directory:
        assert remove_abandoned(own_root) == []
        assert directory.path.exists()


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
