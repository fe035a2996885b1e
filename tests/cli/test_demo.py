"""The demo writes each result into a file of its own, and over no picture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from leasehold.cli.demo import DemoFailed, run


@pytest.mark.parametrize(
    ("pictures", "out", "sentence"),
    [(["a/x.jpg", "b/x.png"], "out", "two pictures would be saved"), (["x.webp"], ".", "would replace")],
)
def test_a_result_that_would_replace_another_file_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: list[str], out: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DemoFailed, match=sentence):
        asyncio.run(run([Path(picture) for picture in pictures], out=Path(out)))
    assert not list(tmp_path.iterdir())
