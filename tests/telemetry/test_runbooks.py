"""The commands of the runbooks are real: a person reads them at night, beside an alert."""

from __future__ import annotations

import re
from pathlib import Path

import asyncpg
import pytest
import typer

from leasehold.cli.main import app
from tests.factories import Rows

ROOT = Path(__file__).parents[2]
RUNBOOKS = {path.stem: path.read_text() for path in sorted((ROOT / "docs/operations/runbooks").glob("*.md"))}
METRICS = set(re.findall(r"\bleasehold_[a-z0-9_]+", (ROOT / "docs/reference/metrics.md").read_text()))
SOURCES = [path for folder in ("leasehold", "api", "worker") for path in (ROOT / folder).rglob("*.py")]
ENDINGS = ("", "_bucket", "_count", "_sum")


def quoted(text: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


async def test_postgresql_takes_every_statement(rows: Rows) -> None:
    statements = {
        (name, one)
        for name, text in RUNBOOKS.items()
        for one in quoted(text)
        if re.match(r"(SELECT|UPDATE [a-z_]+ SET|DELETE FROM [a-z_]+ WHERE|VACUUM|ANALYZE)\b ?.", one)
    }
    assert len(statements) > 5
    wrong = []
    for name, statement in sorted(statements):
        if statement.startswith(("SELECT", "UPDATE", "DELETE")) and "..." not in statement:
            try:
                await rows.connection.prepare(statement.replace("(pid)", "(1)"))  # the reader fills the pid in
            except asyncpg.PostgresError as error:
                wrong.append((name, statement, str(error)))
    assert wrong == []


@pytest.mark.parametrize("name", RUNBOOKS)
def test_every_metric_exists(name: str) -> None:
    named = set(re.findall(r"\bleasehold_[a-z0-9_]+[a-z0-9]\b(?!_)", RUNBOOKS[name]))
    assert {one for one in named if not any(one.removesuffix(end) in METRICS for end in ENDINGS)} == set()


def test_every_log_line_exists() -> None:
    """A runbook quotes log lines after the word "log": each is in the code, or is the line of an outage."""
    code = "\n".join(path.read_text() for path in SOURCES)
    lines = {
        (name, line)
        for name, text in RUNBOOKS.items()
        for sentence in re.findall(r"\blogs?\b[^.]*?`.*", text)
        for line in quoted(sentence)
        if re.fullmatch(r"[a-z][a-z']*( [a-z;']+){2,}", line)
    }
    assert len(lines) > 5
    outage = re.compile(r"the (database|broker|store) is away; trying again until it is back")
    assert {(name, line) for name, line in lines if f'"{line}"' not in code and not outage.fullmatch(line)} == set()


def test_every_command_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = {(name, found) for name, text in RUNBOOKS.items() for found in re.findall(r"`leasehold ([a-z-]+)", text)}
    assert named
    assert {(name, command) for name, command in named if command not in commands} == set()
