"""The import path that a process hands on to the processes that it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leasehold.runtime.import_path import import_path


def test_what_python_searches_is_handed_on_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`src` is there for a process that has another current folder. A hook of an editable install has only a name."""
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = "__editable__.shop-1.0.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", ["", "src", "/usr/lib/a:b", tmp_path, hook])
    assert import_path() == [str(tmp_path / "src"), "/usr/lib/a:b", hook]
