"""The wheels that are out, kept in tests/fixtures: what an upgrade starts from."""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from tests.packaging.built import ROOT

FIXTURES = ROOT / "tests/fixtures"
WHEELS = sorted(FIXTURES.glob("*.whl"))
RELEASED = re.findall(r"^## (\d\S*) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def revisions(texts: list[str]) -> set[str]:
    return {found[1] for text in texts if (found := re.search(r'^revision(?:: str)? = "(\w+)"', text, re.MULTILINE))}


def test_every_release_of_the_changelog_is_kept_as_it_was_built() -> None:
    assert {path.name for path in WHEELS} == {f"leasehold-{version}-py3-none-any.whl" for version in RELEASED}
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in WHEELS}
    lines = (FIXTURES / "SHA256SUMS").read_text().splitlines()
    assert {name: digest for digest, name in (line.split("  ", 1) for line in lines)} == sums


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name)
def test_a_database_of_a_release_can_be_migrated_from_where_it_stands(wheel: Path) -> None:
    """Alembic finds its way only while every revision that is out stays."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"leasehold/migrations/versions/\d\w+\.py", name)]
        shipped = revisions([archive.read(name).decode() for name in names])
    assert len(shipped) == len(names) > 0
    assert shipped <= revisions([path.read_text() for path in (ROOT / "migrations/versions").glob("*.py")])
