"""What every command does alike: JSON where it is wanted, exit statuses, completion, and no log among its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from leasehold.celery import Celery
from leasehold.cli.dev import program_that_submits
from leasehold.cli.main import app
from leasehold.cli.running import FAILED, UNREACHABLE, WRONG_USE
from tests.app import kit_shop

#: Programs that run until they are stopped, and commands that print one text of another kind.
WITHOUT_JSON = {"api", "console", "worker", "dev", "demo", "mcp", "completion", "sql", "signing-key", "audit export",
                "cells nginx"}  # fmt: skip
NOWHERE = {
    "LEASEHOLD_DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
    "LEASEHOLD_AMQP_URL": "amqp://guest:guest@127.0.0.1:1/",
    "LEASEHOLD_OBJECT_STORE": "none",
}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
        return
    for name, child in children.items():
        yield from commands(child, (*path, name))


def test_every_command_prints_json_where_it_is_wanted() -> None:
    every = dict(commands(typer.main.get_command(app)))
    without = {name for name, command in every.items() if not any("--json" in one.opts for one in command.params)}
    assert without == WITHOUT_JSON
    assert len(every) > 30


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "sentence"),
    [
        (["doctor"], {"LEASEHOLD_API_PORT": "x"}, WRONG_USE, "LEASEHOLD_API_PORT: Input should be a valid integer"),
        (["migrate"], {"LEASEHOLD_DATABASE_URL": "nonsense"}, WRONG_USE, "LEASEHOLD_DATABASE_URL"),
        (["migrate"], {"LEASEHOLD_POOLS": "{"}, WRONG_USE, "LEASEHOLD_POOLS: the value is not JSON"),
        (["dev", "--port", "0"], {"LEASEHOLD_API_PORT": "x"}, FAILED, "LEASEHOLD_API_PORT: Input should be"),
        (["demo"], {"LEASEHOLD_POOLS": "{"}, FAILED, "LEASEHOLD_POOLS: the value is not JSON"),
        (["migrate"], NOWHERE, UNREACHABLE, "a server does not answer: "),
        (["keys", "list"], NOWHERE, UNREACHABLE, "127.0.0.1"),
        (["jobs", "list", "statuss:failed"], {"LEASEHOLD_API_KEY": "lh_x"}, WRONG_USE, "statuss"),
        (["jobs"], {"LEASEHOLD_API_KEY": ""}, WRONG_USE, ""),
    ],
)
def test_an_error_is_a_sentence_with_a_line_break_and_a_status_of_its_own(
    arguments: list[str], variables: dict[str, str], status: int, sentence: str
) -> None:
    result = CliRunner().invoke(app, arguments, env=variables)
    assert result.exit_code == status, result.output
    assert sentence in result.stderr
    assert result.stderr.endswith("\n") or not sentence
    assert "Traceback" not in result.stderr


def test_dev_says_how_to_submit_the_apps_own_kind_of_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program_that_submits(kit_shop.__name__) == (
        "from tests.app.kit_shop import send_receipt; print(send_receipt.submit(...).result())"
    )
    celery = ModuleType("tasks")
    program = Celery("tasks")
    celery.add = program.task(name="tasks.add")(lambda_free)  # type: ignore[attr-defined]  # a module of the test's own
    monkeypatch.setitem(sys.modules, "tasks", celery)
    assert program_that_submits("tasks") == "from tasks import add; print(add.delay(...).get())"
    monkeypatch.setitem(sys.modules, "empty", ModuleType("empty"))
    assert program_that_submits("empty") is None


def lambda_free(x: int) -> int:
    return x


def test_the_list_of_variables_is_printed_while_one_of_them_is_wrong() -> None:
    """The sentence about the wrong one names this command."""
    for variables in ({"LEASEHOLD_API_PORT": "x"}, {"LEASEHOLD_POOLS": "{"}):
        result = CliRunner().invoke(app, ["settings"], env=variables)
        assert (result.exit_code, "LEASEHOLD_API_PORT" in result.stdout) == (0, True), result.output


def test_settings_are_printed_as_json_as_the_reference_lists_them() -> None:
    """So that each default can be written into a variable."""
    rows = json.loads(CliRunner().invoke(app, ["settings", "--json"]).stdout)
    assert {"variable", "default", "meaning"} == rows[0].keys()
    page = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text()
    lines = [line.replace("\\|", "").split(" | ") for line in page.splitlines() if line.startswith("| `LEASEHOLD_")]
    # A table in which no setting has a default lacks the column of defaults.
    listed = {cells[0].strip("| `"): cells[2].strip(" `") if len(cells) == 4 else "" for cells in lines}
    defaults = {row["variable"]: row["default"] for row in rows}
    assert defaults.pop("LEASEHOLD_PICTURE_HEIC") in ("true", "false")  # whether this environment has the extra
    assert len(listed) > 100
    assert defaults == {name: default for name, default in listed.items() if name in defaults}
    assert defaults["LEASEHOLD_AMQP_URL"] == "amqp://guest:guest@127.0.0.1:5672/"


def test_the_doctor_prints_its_findings_and_nothing_of_what_it_tried() -> None:
    """In a process of its own: the libraries log to its stderr, and the platform to its stdout."""
    environment = dict(os.environ) | NOWHERE
    program = "from leasehold.cli import doctor, main; doctor._PATIENCE_SECONDS = 0.5; main.app()"
    command = [sys.executable, "-c", program, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    findings = json.loads(done.stdout)
    assert {finding["part"] for finding in findings} >= {"database", "broker"}
    assert [finding["ok"] for finding in findings if finding["part"] == "database"] == [False]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_names_the_command(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0
    assert f"_LEASEHOLD_COMPLETE=complete_{shell}" in result.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["leasehold", "dead-letters", ""], {"list", "replay"}),
        (["leasehold", "jobs", "ca"], {"cancel"}),
    ],
)
def test_bash_completes_commands(words: list[str], completed: set[str]) -> None:
    """A real bash runs the script, which runs the command."""
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    line = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _leasehold_completion leasehold"
    program = f"{script}\n{line}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    environment = dict(os.environ) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-c", program], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert set(done.stdout.split()) >= completed, done
