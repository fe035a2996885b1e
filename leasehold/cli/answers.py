"""Shared by the commands that call the API: the client, and how they print answers and failures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leasehold.app.dev_file import dev_variables
from leasehold.cli.api_client import ApiClient, Interrupted, Refused
from leasehold.cli.running import FAILED, UNREACHABLE, WRONG_USE, print_failure

console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print what the API answered.")]
Cursor = Annotated[str | None, typer.Option(help="The next_cursor of the page before.")]


@contextmanager
def api_client() -> Iterator[ApiClient]:
    """A client for LEASEHOLD_URL with the key LEASEHOLD_API_KEY. If neither is set, the client is for the `leasehold
    dev` that runs in the current folder. If the API refuses a request, the command prints the reason and ends.
    """
    given = {name: os.environ[name] for name in ("LEASEHOLD_URL", "LEASEHOLD_API_KEY") if os.environ.get(name)}
    variables = given or dev_variables()
    key = variables.get("LEASEHOLD_API_KEY")
    if not key:
        raise print_failure("set LEASEHOLD_API_KEY to an API key (leasehold keys create)", WRONG_USE)
    try:
        with ApiClient(variables.get("LEASEHOLD_URL", "http://127.0.0.1:8000"), key) as client:
            yield client
    except Refused as error:
        raise print_failure(str(error), UNREACHABLE if isinstance(error, Interrupted) else FAILED) from None


def parsed(payload: str) -> Any:
    """The JSON value of an argument. A text that is not JSON ends the command with a sentence."""
    try:
        return json.loads(payload)
    except ValueError as error:
        raise print_failure(f"the payload is not JSON: {error}", WRONG_USE) from None


def show(answer: Any, as_json: bool, otherwise: Callable[[], None]) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        otherwise()


def print_next_page(page: dict[str, Any]) -> None:
    """Below a page of a list: how to ask for the next page, if there is one."""
    if page["next_cursor"] is not None:
        console.print(f"more: --cursor {page['next_cursor']}", highlight=False)


def table(rows: Sequence[dict[str, Any]], *columns: str) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value.get("code") or json.dumps(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
