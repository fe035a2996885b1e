"""What a stopped run of mutants keeps, at the same commit and at a later one; and what it records for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import state
from mutants.judge import Judgement
from mutants.mutant import Change, Edit, Mutant

MUTANTS = [Mutant(name, "one.py", "", (1, 1), Change("", "", (Edit(0, 0, ""),))) for name in "abcd"]
CODE = '''
def first() -> str:
    """Says what it is."""
    return "first"  # a comment


READ = """
-- read
SELECT 1 -- the first column
FROM job
-- The rows of the tenant.
WHERE tenant_id = $1
"""
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`one.py` lies beside it."""
    (tmp_path / "one.py").write_text(CODE)
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setattr(state, "_digest_of", state._digest_of.__wrapped__)  # without its cache: the file changes
    kept = state.State("one", MUTANTS, tmp_path / "judged.jsonl", tmp_path / "judged.json")
    for mutant, verdict in zip("abcd", ("killed", "survived", "timed out", "invalid"), strict=True):
        kept.add(Judgement(mutant, verdict, by="a::test" if verdict == "killed" else ""))
    return tmp_path / "judged.jsonl"


def verdicts(at: str, file: Path) -> dict[str, str]:
    return {name: one.verdict for name, one in judgements(at, file).items()}


def judgements(at: str, file: Path, mutants: list[Mutant] = MUTANTS) -> dict[str, Judgement]:
    return state.State(at, mutants, file, file.with_suffix(".json")).judgements


def test_a_run_that_was_stopped_goes_on_where_it_was(file: Path) -> None:
    assert verdicts("one", file) == {"a": "killed", "b": "survived", "c": "timed out", "d": "invalid"}
    assert judgements("one", file)["a"].by == "a::test"


def test_at_a_later_commit_survivors_are_judged_again(file: Path) -> None:
    assert verdicts("two", file) == {"a": "killed", "c": "timed out", "d": "invalid"}


@pytest.mark.parametrize(
    ("before", "after"),
    [('"first"', '"second"'), ("-> str", "-> object"), ("first()", "one()"), ("-- read", "-- reads"), ("= $1", "= $2")],
)
def test_at_a_later_commit_the_mutants_of_a_changed_file_are_judged_again(file: Path, before: str, after: str) -> None:
    file.with_name("one.py").write_text(CODE.replace(before, after))
    assert verdicts("two", file) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# a comment", "# another"),
        ("Says what it is.", "What it is."),
        ("\ndef", "\n\n\ndef"),
        ("the first column", "the number"),
        ("-- The rows of the tenant.\n", "-- These are the rows\n-- of the tenant.\n"),
        ("FROM job\n", "FROM job -- with a lock\n"),
    ],
)
def test_what_was_noticed_counts_when_only_comments_docstrings_or_the_layout_change(
    file: Path, before: str, after: str
) -> None:
    file.with_name("one.py").write_text(CODE.replace(before, after))
    assert verdicts("two", file) == {"a": "killed", "c": "timed out", "d": "invalid"}


def test_the_latest_judgement_counts(file: Path) -> None:
    state.State("two", MUTANTS, file, file.with_suffix(".json")).add(Judgement("b", "killed"))
    assert verdicts("two", file)["b"] == "killed"


def test_a_mutant_that_is_gone_has_no_judgement_at_a_later_commit(file: Path) -> None:
    assert "a" not in judgements("two", file, MUTANTS[1:])


@pytest.fixture
def record(file: Path) -> Path:
    """The record, on a machine that has nothing else."""
    path = file.with_suffix(".json")
    state.record(judgements("one", file), MUTANTS, path)
    file.unlink()
    return path


def test_another_machine_goes_on_from_the_record(file: Path, record: Path) -> None:
    assert verdicts("two", file) == {"a": "killed", "c": "timed out", "d": "invalid"}
    assert judgements("two", file)["a"].by == "a::test"
    assert state.killers(record) == {"a": "a::test"}


def test_of_a_changed_file_the_record_keeps_only_which_test_to_try_first(
    file: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.with_name("one.py").write_text("SECOND = 2")
    assert verdicts("two", file) == {}
    state.record({}, MUTANTS, record)
    assert state.killers(record) == {"a": "a::test"}
    assert verdicts("two", file) == {}
    state.record({"c": Judgement("c", "killed", by="c::test")}, MUTANTS, record)
    assert state.killers(record) == {"a": "a::test", "c": "c::test"}
    assert verdicts("two", file) == {"c": "killed"}


def test_who_survives_now_has_no_killer_any_more_and_who_is_gone_has_none(file: Path, record: Path) -> None:
    state.record(judgements("two", file) | {"a": Judgement("a", "survived")}, MUTANTS, record)
    assert state.killers(record) == {}
    assert verdicts("two", file) == {"c": "timed out", "d": "invalid"}
    state.record(judgements("two", file), MUTANTS[3:], record)
    assert verdicts("two", file) == {"d": "invalid"}
