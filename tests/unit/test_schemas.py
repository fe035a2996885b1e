"""What the platform reads of its migrations without alembic is what alembic reads."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import pytest
from alembic.script import ScriptDirectory

import leasehold
from leasehold.db.schemas import Schema, known_revisions
from leasehold.domain.errors import DeclarationError
from leasehold.kinds.schemas import schemas_of
from leasehold.pipelines import kinds_of, shipped

MIGRATIONS = Path(leasehold.__file__).parent / "migrations"


@pytest.mark.parametrize("schema", schemas_of(kinds_of(shipped())), ids=lambda schema: schema.name)
def test_the_revisions_and_their_head_are_alembics(schema: Schema) -> None:
    """A revision that is not found counts as a newer release's: `behind` would be false, and nobody would migrate."""
    scripts = ScriptDirectory(str(MIGRATIONS), version_locations=[str(schema.versions)])
    known = known_revisions(schema.versions)
    assert known.all == {script.revision for script in scripts.walk_revisions()}
    assert known.head == scripts.get_current_head()


@pytest.mark.parametrize("line", ['revision = "2"', 'revision: str = "2"'])
def test_a_revision_may_say_its_type(tmp_path: Path, line: str) -> None:
    (tmp_path / "one.py").write_text('revision = "1"\ndown_revision = None\n')
    (tmp_path / "two.py").write_text(f'{line}\ndown_revision: str | None = "1"\n')
    assert known_revisions(tmp_path).head == "2"
    assert known_revisions(tmp_path).all == {"1", "2"}


def test_two_heads_are_refused(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / f"{name}.py").write_text(f'revision: str = "{name}"\ndown_revision: str | None = None\n')
    with pytest.raises(DeclarationError, match="2 heads"):
        known_revisions(tmp_path)


def test_two_readiness_checks_do_not_parse_migrations_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 raises a SystemError now and then if they do."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        for number in range(5):
            parent = None if number == 0 else f'"{number - 1}"'
            (folder / f"{number}.py").write_text(f'revision = "{number}"\ndown_revision = {parent}\n')
    parse, being_parsed, overlaps = ast.parse, Lock(), []

    def observed(*args: Any, **options: Any) -> Any:
        if not being_parsed.acquire(blocking=False):
            overlaps.append(args)
            return parse(*args, **options)
        try:
            sleep(0.001)  # lets the other thread come
            return parse(*args, **options)
        finally:
            being_parsed.release()

    monkeypatch.setattr(ast, "parse", observed)
    with ThreadPoolExecutor(2) as threads:
        assert [known.head for known in threads.map(known_revisions, folders)] == ["4", "4"]
    assert not overlaps
