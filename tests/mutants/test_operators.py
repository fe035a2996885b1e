"""What the machine changes: each guard of a statement, each decision of a function, and nothing beside them."""

from __future__ import annotations

from pathlib import Path

from mutants import literals, python, sql
from mutants.mutant import Change, Mutant, named
from mutants.places import ROOT, mutants
from mutants.source import Source

STATEMENT = """
WITH found AS (
    SELECT t.id FROM task t
    WHERE t.status IN ('pending', 'retry') AND t.available_at <= now() OR t.attempt < 3
    FOR UPDATE OF t SKIP LOCKED
), told AS (
    INSERT INTO event (id, at) SELECT id, now() + interval '30 seconds' FROM found
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
UPDATE task SET status =
    CASE WHEN attempt BETWEEN 1 AND 2 THEN 'a' ELSE 'b' END
    WHERE id = $1
"""


def of(text: str) -> list[str]:
    """The changed lines of every change, with what they became."""
    found = []
    for change in sql.changes(text):
        changed = Mutant("", "", "", (0, 0), change).applied(text)
        lines = zip(text.splitlines(), changed.splitlines(), strict=True)
        after = " / ".join(after.strip() for before, after in lines if before != after)
        found.append(f"{change.kind}: {after or '-'}")
    return found


EXPECTED = """
conjunct dropped: WHERE (true OR (t.status IN ('pending', 'retry'))) AND t.available_at <= now() OR t.attempt < 3
conjunct dropped: WHERE t.status IN ('pending', 'retry') AND (true OR (t.available_at <= now())) OR t.attempt < 3
disjunct dropped: WHERE (false AND (t.status IN ('pending', 'retry') AND t.available_at <= now())) OR t.attempt < 3
disjunct dropped: WHERE t.status IN ('pending', 'retry') AND t.available_at <= now() OR (false AND (t.attempt < 3))
element dropped: WHERE t.status IN ('retry', 'retry') AND t.available_at <= now() OR t.attempt < 3
element dropped: WHERE t.status IN ('pending', 'pending') AND t.available_at <= now() OR t.attempt < 3
bound moved: WHERE t.status IN ('pending', 'retry') AND t.available_at <= now() OR t.attempt <= 3
constant moved: WHERE t.status IN ('pending', 'retry') AND t.available_at <= now() OR t.attempt < 4
lock taken away: -
lock waits: FOR UPDATE OF t
INSERT left out: INSERT INTO event (id, at) SELECT id, now() + interval '30 seconds' FROM found LIMIT 0
interval doubled: INSERT INTO event (id, at) SELECT id, now() + interval '60 seconds' FROM found
ON CONFLICT taken away: -
constant moved: CASE WHEN attempt BETWEEN 2 AND 2 THEN 'a' ELSE 'b' END
constant moved: CASE WHEN attempt BETWEEN 1 AND 3 THEN 'a' ELSE 'b' END
branch never taken: CASE WHEN (false AND (attempt BETWEEN 1 AND 2)) THEN 'a' ELSE 'b' END
conjunct dropped: WHERE (true OR (id = $1))
UPDATE left out: WHERE (false AND (id = $1))
"""


def test_a_branch_of_a_case_with_an_operand_is_taken_for_no_value() -> None:
    """A condition in place of the value would be no SQL."""
    assert "branch never taken: SELECT CASE kind WHEN NULL THEN 1 ELSE 2 END" in of(
        "SELECT CASE kind WHEN 'a' THEN 1 ELSE 2 END"
    )


def test_each_guard_of_a_statement_is_taken_away_once_and_nothing_else_changes() -> None:
    assert sorted(of(STATEMENT)) == sorted(EXPECTED.split("\n")[1:-1])


def test_the_and_of_between_and_the_from_of_distinct_join_no_conditions() -> None:
    assert of("SELECT a BETWEEN b AND c, d IS DISTINCT FROM e FROM f") == []


FUNCTION = '''
LIMIT = 3
NETWORKS = ("10.0.0.0/8", "127.0.0.0/8")

def guarded(a: int, *, strict: bool = True) -> bool:
    """A docstring with 1 < 2."""
    log.info("said %d", 1)
    DATABASE.record_error(ValueError(), "one")
    wait(a or 0.0)
    if a < LIMIT and not strict:
        raise ValueError(f"{a + 1}")
    store.put(a, IfNoneMatch="*")
    return min(a, 2) == a
'''


def test_each_decision_of_a_function_is_changed_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(FUNCTION)
    source = Source(tmp_path, "one.py")
    changed = [
        mutant.diff(FUNCTION).splitlines()[-1][1:].strip() for mutant in named("one.py", FUNCTION, found(source))
    ]
    assert sorted(changed) == sorted(
        [
            "LIMIT = 4",
            'NETWORKS = ( "127.0.0.0/8")',
            'NETWORKS = ("10.0.0.0/8", )',
            "def guarded(a: int, *, strict: bool = False) -> bool:",
            "if a <= LIMIT and not strict:",
            "if True and not strict:",
            "if a < LIMIT and True:",
            "if a < LIMIT and strict:",
            "pass",
            "wait(False or 0.0)",
            "wait(a or 1.0)",
            "None",
            "None",
            "store.put(a, )",
            "return max(a, 2) == a",
            "return min(a, 3) == a",
            "return min(a, 2) != a",
        ]
    )


def test_a_mutant_keeps_its_id_if_only_comments_docstrings_or_the_layout_change(tmp_path: Path) -> None:
    text = FUNCTION.replace("LIMIT = 3", "LIMIT = 3\n#: The bound, of 4 pieces.\nBOUNDS = {'a': 1, 'b': (2, 1)}")
    other = text.replace("#: The bound, of 4 pieces.", "#: Another\n#: sentence.").replace("A docstring", "Words")
    other = other.replace("{'a': 1, 'b': (2, 1)}", "{\n    'a': 1,  # one\n    'b': (2, 1),\n}")

    def ids(code: str) -> list[str]:
        (tmp_path / "one.py").write_text(code)
        return [mutant.id for mutant in named("one.py", code, found(Source(tmp_path, "one.py")))]

    assert ids(text) == ids(other)
    assert len(set(ids(text))) == len(ids(text)) > len(FUNCTION.split("\n"))


def test_the_id_of_a_bound_does_not_depend_on_the_comments_of_its_statement() -> None:
    text = "SELECT 1 FROM a -- a comment\nWHERE b < 3"
    abouts = [
        [change.about for change in sql.changes(one)] for one in (text, text.replace("a comment", "of other words"))
    ]
    assert abouts[0] == abouts[1]
    assert any("B < 3" in about for about in abouts[0])


def found(source: Source) -> list[tuple[str, Change]]:
    return [("module", change) for change in python.changes(source)]


def test_the_names_in_a_statement_and_its_quotes_stay(tmp_path: Path) -> None:
    text = 'A = f"SELECT 1 FROM a WHERE {b[0]} AND c"\nB = (\n    "SELECT 1 FROM a WHERE x FOR"\n    " UPDATE"\n)\n'
    (tmp_path / "one.py").write_text(text)
    changed = {
        mutant.applied(text)
        for piece in literals.pieces(Source(tmp_path, "one.py"))
        for mutant in named("one.py", text, (("A", piece.placed(change)) for change in sql.changes(piece.text)))
    }
    assert text.replace("{b[0]}", "(true OR ({b[0]}))") in changed
    assert text.replace('FOR"\n    " UPDATE"', '"\n    ""') in changed
    for one in changed:
        compile(one, "one.py", "exec")


def test_an_edit_elsewhere_leaves_a_mutant_its_id() -> None:
    before = {mutant.id for mutant in named("a", STATEMENT, (("x", change) for change in sql.changes(STATEMENT)))}
    moved = "-- a line more\n" + STATEMENT
    after = {mutant.id for mutant in named("a", moved, (("x", change) for change in sql.changes(moved)))}
    assert len(before) == len(sql.changes(STATEMENT))
    assert before == after


def test_every_statement_of_ours_is_read_and_every_mutant_has_an_id_of_its_own() -> None:
    found = mutants()
    assert len({mutant.id for mutant in found}) == len(found)
    guard = [mutant for mutant in found if mutant.scope == "GUARD"]
    assert {mutant.change.about for mutant in guard} >= {"t.lease_owner = a.owner", "t.epoch = a.epoch"}
    for mutant in guard:
        text = (ROOT / mutant.path).read_text()
        assert mutant.applied(text) != text
