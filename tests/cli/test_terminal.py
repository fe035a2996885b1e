"""Texts that others wrote reach the terminal as they are, and what a user writes reaches the API as it is."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from leasehold.cli import running
from leasehold.cli.main import app
from leasehold.cli.running import WRONG_USE, run_or_exit
from leasehold.cli.terminal import harmless, print_json, print_table
from leasehold.client import AsyncClient, Client, ClientError

#: Markup that rich refuses, markup that it would drop, and a sequence that writes to the clipboard of the terminal.
ID = "01a218d3-30f3-77cf-adb5-69bb0ede4f66"
HOSTILE = "closing [/x] tag, [bold]bold[/bold], \x1b]52;c;AAAA\x07 and \x9b2J"
SHOWN = r"closing [/x] tag, [bold]bold[/bold], \x1b]52;c;AAAA\x07 and \x9b2J"


class Answering(BaseHTTPRequestHandler):
    """An API whose texts are hostile. It keeps the paths that were asked for."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        job = {
            "id": ID,
            "kind": HOSTILE,
            "tags": {},
            "steps": [],
            "outputs": [],
            "error": {"code": HOSTILE, "message": ""},
        }
        body: dict[str, Any] = {"jobs": [job], "next_cursor": None, "steps": [], "outputs": [], "parameters": HOSTILE}
        line: dict[str, Any] = {
            "at": "2026-11-23T00:00:00.000Z",
            "step": "a",
            "attempt": 1,
            "level": "info",
            "logger": "x",
        }
        body |= {"lines": [line | {"n": 1, "message": HOSTILE, "traceback": HOSTILE}], "next_after": None}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        content = json.dumps({"status": "cancelled", "code": "refused", "detail": HOSTILE}).encode()
        self.send_response(409)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Answering.paths = []
    server = HTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def invoke(url: str, *arguments: str, key: str = "lh_x_y") -> tuple[int, str, str]:
    environment = {"LEASEHOLD_URL": url, "LEASEHOLD_API_KEY": key, "COLUMNS": "400"}
    result = CliRunner(env=environment).invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("arguments", [("jobs", "list"), ("jobs", "get", ID), ("logs", ID)])
def test_a_text_of_a_job_is_printed_as_it_is_and_does_nothing_to_the_terminal(
    url: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    wide = Console(file=out, width=400, force_terminal=True, color_system=None)
    for module in ("leasehold.cli.terminal.console", "leasehold.cli.logs.console"):
        monkeypatch.setattr(module, wide)
    monkeypatch.setattr("leasehold.cli.terminal.print_line.__kwdefaults__", {"to": wide})
    code, _, err = invoke(url, *arguments)
    assert (code, err) == (0, "")
    assert SHOWN in out.getvalue()
    assert not [sign for sign in ("\x1b]52", "\x07", "\x9b") if sign in out.getvalue()]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is printed on a terminal of 80 columns."""
    out = io.StringIO()
    monkeypatch.setattr("leasehold.cli.terminal.console", Console(file=out, width=80, color_system=None))
    return out


@pytest.mark.parametrize("first", ["x" * 200, "\x1b" * 50, "é" * 36, "漢" * 100, "0" * 8])
@pytest.mark.parametrize("others", [1, 5])
def test_a_table_shows_all_of_its_first_column_and_something_of_each_other(
    narrow: io.StringIO, first: str, others: int
) -> None:
    print_table(["name", *("abcde"[:others])], [[first, *(f"v{number}" for number in range(others))]])
    lines = narrow.getvalue().splitlines()
    parts = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(parts) == harmless(first)
    assert all(f"v{number}" in narrow.getvalue() for number in range(others))


def test_an_id_is_on_one_line_however_many_columns_there_are(narrow: io.StringIO) -> None:
    identity = str(uuid4())
    print_table(["id", *"abcdefgh"], [[identity, *["value value"] * 8]])
    assert identity in narrow.getvalue()


@pytest.mark.parametrize("character", ["\u061c", "\u200f", "\u2028", "\u202e", "\u2066", "\u2069", "\ud800"])
def test_marks_that_reorder_text_are_shown(character: str) -> None:
    assert harmless(f"a{character}b") == f"a\\u{ord(character):04x}b"


def test_json_does_nothing_to_the_terminal_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON may have DEL, the control characters from U+0080 on, and marks that reorder text, as they are."""
    name = "a\x1b[2J\x7f\x9b2J\u202eb\n\tä"
    print_json([{"name": name}])
    printed = capsys.readouterr().out
    assert json.loads(printed) == [{"name": name}]
    assert harmless(printed) == printed
    assert "ä" in printed


def test_an_object_with_a_code_of_its_own_is_shown_whole(narrow: io.StringIO) -> None:
    """Tags are objects, too: only an error is shown as its code."""
    print_table(["tags", "error"], [[{"code": "x", "ü": "y"}, {"code": "gone", "message": "It is gone."}]])
    assert '{"code": "x", "ü": "y"}' in narrow.getvalue()
    assert " gone " in narrow.getvalue()
    assert "message" not in narrow.getvalue()


def test_a_refusal_does_nothing_to_the_terminal(url: str) -> None:
    code, _, err = invoke(url, "jobs", "cancel", ID)
    assert code == running.FAILED
    assert SHOWN in err


@pytest.mark.parametrize(
    ("given", "path"),
    [("a/b?c=d#e", "a%2Fb%3Fc%3Dd%23e"), ("..", "%2E%2E"), ("ü [x]", "%C3%BC%20%5Bx%5D")],
)
def test_an_argument_is_one_part_of_the_path(url: str, given: str, path: str) -> None:
    for act in ("pause", "resume"):
        invoke(url, "queues", act, given)
        assert Answering.paths.pop() == f"/v1/queues/{path}/{act}"


@pytest.mark.parametrize("given", ["a/b?c=d#e", "..", "ü [x]"])
def test_what_is_no_id_is_never_a_part_of_the_path(url: str, given: str) -> None:
    Answering.paths.clear()
    for arguments in (("workers", "drain", given), ("schedules", "run-now", given), ("jobs", "get", given)):
        code, _, err = invoke(url, *arguments)
        assert (code, "an id looks like" in err) == (WRONG_USE, True)
    assert Answering.paths == []


@pytest.mark.parametrize(
    ("url", "key", "sentence"),
    [
        ("localhost:8000", "lh_x_y", "must begin with http"),
        ("http://x:port", "lh_x_y", "is not a URL"),
        ("http://127.0.0.1:1", "lh_x…", "copy the whole key"),
        ("http://127.0.0.1:1", "lh_x\ny", "copy the whole key"),
        ("http://127.0.0.1:1", "lh_x_y ", "copy the whole key"),
    ],
)
def test_a_wrong_address_or_key_is_refused_at_once_with_a_sentence(url: str, key: str, sentence: str) -> None:
    code, _, err = invoke(url, "runs", key=key)
    assert (code, sentence in err) == (WRONG_USE, True), err
    for kind in (Client, AsyncClient):
        with pytest.raises(ClientError, match=sentence):
            kind(url, key)


@pytest.mark.parametrize("arguments", [("demo", "no-such.jpg"), ("audit", "verify", "no-such.jsonl")])
def test_a_file_that_does_not_exist_is_refused_before_anything_is_done(arguments: tuple[str, ...]) -> None:
    code, _, err = invoke("http://127.0.0.1:1", *arguments)
    assert (code, "does not exist" in err) == (WRONG_USE, True), err


def test_an_export_that_fails_leaves_the_file_of_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_text("earlier")
    code, _, _ = invoke("http://127.0.0.1:1", "audit", "export", str(file))
    assert (code, file.read_text(), list(tmp_path.iterdir())) == (running.UNREACHABLE, "earlier", [file])
    code, _, err = invoke("http://127.0.0.1:1", "audit", "export", str(tmp_path / "none" / "audit.jsonl"))
    assert (code, "cannot be written: No such file" in err) == (running.FAILED, True)


def test_an_export_leaves_the_other_files_of_its_directory(tmp_path: Path) -> None:
    beside = tmp_path / "audit.jsonl.part"
    beside.write_text("of somebody else")
    invoke("http://127.0.0.1:1", "audit", "export", str(tmp_path / "audit.jsonl"))
    assert beside.read_text() == "of somebody else"


@pytest.mark.parametrize("source", ["cli_shop.py:app", "./cli_shop.py:app", "cli_shop:app", "cli_shop.py"])
def test_an_app_may_be_named_by_its_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_shop.py").write_text("from leasehold import App\napp = App('cli_shop')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LEASEHOLD_PIPELINES", "")
    running.use_source(source)
    assert os.environ["LEASEHOLD_PIPELINES"] == "cli_shop:app"


def test_an_error_in_a_group_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            raise OSError("the disk is full")

    with pytest.raises(typer.Exit):
        run_or_exit(fail())
    assert "the disk is full" in capsys.readouterr().err
