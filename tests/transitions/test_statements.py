"""Each statement's final text stands in `golden/`, so that a change of a shared fragment shows in every statement that
uses it. Renew the files with `.venv/bin/python -m tests.transitions.test_statements`, and read their diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from leasehold.cli.main import app
from leasehold.transitions.statements import statements

GOLDEN = Path(__file__).parent / "golden"
RENEW = ".venv/bin/python -m tests.transitions.test_statements"
GUARD = "t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running'"


def test_every_statement_is_the_one_that_was_reviewed() -> None:
    kept = {path.stem: path.read_text() for path in GOLDEN.glob("*.sql")}
    texts = statements()
    changed = sorted(name for name in kept.keys() | texts.keys() if kept.get(name) != texts.get(name))
    assert changed == [], f"read these statements, then renew them: {RENEW}"


@pytest.mark.parametrize(
    "name",
    [
        "complete",
        "complete_last",
        "fail",
        "snooze",
        "suspend",
        "release",
        "acknowledge_cancel",
        "fan_out",
        "record_calls",
        "record_calls_of_cancelled",
    ],
)
def test_the_command_prints_a_settlement_with_its_guard(name: str) -> None:
    printed = CliRunner().invoke(app, ["sql", name])
    assert printed.exit_code == 0
    assert printed.stdout == statements()[name]
    assert printed.stdout.count(GUARD) == 1


def test_the_command_lists_the_names_and_knows_no_other() -> None:
    listed = CliRunner().invoke(app, ["sql"])
    assert listed.stdout.split() == [*statements()]
    unknown = CliRunner().invoke(app, ["sql", "no_such"])
    assert (unknown.exit_code, unknown.stdout) == (1, "")


def renew() -> None:
    for path in GOLDEN.glob("*.sql"):
        path.unlink()
    for name, text in statements().items():
        (GOLDEN / f"{name}.sql").write_text(text)


if __name__ == "__main__":
    renew()
