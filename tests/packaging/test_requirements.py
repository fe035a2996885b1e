"""docs/explanation/requirements.md names tests that exist, one for every row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/requirements.md").read_text()
HEADS = re.compile(r"\|[-| ]+\||\| (§|sentence) \|.*")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not HEADS.fullmatch(line)]


@cache
def names_in(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)


def test_every_row_names_a_test_that_exists() -> None:
    assert len(ROWS) > 100
    for row in ROWS:
        named = re.findall(r"`([\w/]+)::(\w+)`", row)
        assert named, row
        for path, beginning in named:
            file = ROOT / f"tests/{path}.py"
            assert file.exists(), row
            assert [name for name in names_in(file) if name.startswith(beginning)], row


def test_every_file_of_ours_that_it_names_exists() -> None:
    for path in re.findall(r"`((?:api|leasehold|worker|docs|tests)/[\w./]*)`", PAGE):
        assert (ROOT / path).exists(), path
