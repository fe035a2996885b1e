"""Prints on the terminal what users and handlers wrote: messages of errors, log lines, tags, names.

Such a text is printed as it is. Rich would read `[...]` in it as markup, and the terminal would obey its control
characters: with them a job's log could write to the operator's clipboard or hide lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console()
#: All control characters but tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """The text with its control characters in hexadecimal. Tabs and line feeds stay."""
    return _CONTROL.sub(lambda character: f"\\x{ord(character[0]):02x}", text.replace("\r\n", "\n"))


def print_line(text: str, style: str = "", *, to: Console = console) -> None:
    """Print the text. The terminal wraps it, so that copying it gives no line breaks."""
    to.print(Text(harmless(text), style), highlight=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of these values: lists and objects as text, and None as an empty cell."""
    table = Table(*columns)
    if rows := list(rows):
        table.columns[0].min_width = max(len(_cell(row[0])) for row in rows)  # commands take the first column's values
    for row in rows:
        table.add_row(*(Text(harmless(_cell(value))) for value in row))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value.get("code") or json.dumps(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
