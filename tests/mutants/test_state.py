"""What a stopped run of mutants keeps, at the same commit and at a later one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mutants import state
from mutants.judge import Judgement
from mutants.mutant import Change, Edit, Mutant

MUTANTS = [Mutant(name, "one.py", "", (1, 1), Change("", "", (Edit(0, 0, ""),))) for name in "abcd"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`one.py` lies beside it."""
    (tmp_path / "one.py").write_text("first")

    def digest_of(path: str) -> str:
        return hashlib.sha256((tmp_path / path).read_bytes()).hexdigest()

    monkeypatch.setattr(state, "_digest_of", digest_of)
    kept = state.State("one", MUTANTS, tmp_path / "judged.jsonl")
    for mutant, verdict in zip("abcd", ("killed", "survived", "timed out", "invalid"), strict=True):
        kept.add(Judgement(mutant, verdict, by="a test"))
    return tmp_path / "judged.jsonl"


def verdicts(at: str, file: Path) -> dict[str, str]:
    return {name: one.verdict for name, one in state.State(at, MUTANTS, file).judgements.items()}


def test_a_run_that_was_stopped_goes_on_where_it_was(file: Path) -> None:
    assert verdicts("one", file) == {"a": "killed", "b": "survived", "c": "timed out", "d": "invalid"}
    assert state.State("one", MUTANTS, file).judgements["a"].by == "a test"


def test_at_a_later_commit_survivors_are_judged_again(file: Path) -> None:
    assert verdicts("two", file) == {"a": "killed", "c": "timed out", "d": "invalid"}


def test_at_a_later_commit_the_mutants_of_a_changed_file_are_judged_again(file: Path) -> None:
    file.with_name("one.py").write_text("second")
    assert verdicts("two", file) == {}


def test_the_latest_judgement_counts(file: Path) -> None:
    state.State("two", MUTANTS, file).add(Judgement("b", "killed"))
    assert verdicts("two", file)["b"] == "killed"


def test_a_mutant_that_is_gone_has_no_judgement_at_a_later_commit(file: Path) -> None:
    assert "a" not in state.State("two", MUTANTS[1:], file).judgements
