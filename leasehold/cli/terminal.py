"""Prints lines, tables and JSON for commands. Texts that users and handlers wrote (messages of errors, log lines, tags
and names) are made harmless first.

Lines and tables print such a text as `Text`, in which Rich reads no markup. `harmless` escapes its control characters.
Otherwise a job's log could write to the operator's clipboard, or hide lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console()
#: What `harmless` escapes: all control characters except tab and line feed; marks that change the direction of text,
#: with which a terminal shows characters in another order; other ends of lines; and halves of surrogate pairs, which
#: cannot be encoded.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: The width that the first column of a table leaves to each other column, with its border. Exception: the first column
#: may always have half of the terminal's width. It never gets more than its longest cell needs.
_OTHER_COLUMN_WIDTH = 10


def harmless(text: str) -> str:
    """The text with its control characters in hexadecimal. Tabs and line feeds stay."""
    return _CONTROL.sub(lambda character: _in_hexadecimal(ord(character[0])), text.replace("\r\n", "\n"))


def _in_hexadecimal(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004 - two digits of hexadecimal


def print_line(text: str, style: str = "", *, to: Console = console) -> None:
    """Print the text without new line breaks. The terminal wraps a long line, and a copy of the line has no breaks."""
    to.print(Text(harmless(text), style), highlight=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of these values: an error as its code, lists and objects as text, and None as an empty cell."""
    cells = [[Text(harmless(_cell_text(value))) for value in row] for row in rows]
    table = Table(*columns)
    first_column = table.columns[0]
    first_column.overflow = "fold"  # never cut its values, because people copy them into commands
    widest_cell = max((row[0].cell_len for row in cells), default=0)
    first_column.min_width = min(
        widest_cell, max(console.width // 2, console.width - _OTHER_COLUMN_WIDTH * (len(columns) - 1))
    )
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value["code"]) if value.keys() >= {"code", "message"} else json.dumps(value, ensure_ascii=False)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_json(value: Any) -> None:
    """Print the value as JSON, with times in UTC. Control characters that JSON allows in texts are escaped, too,
    because the terminal must not obey them.
    """
    text = orjson.dumps(value, option=orjson.OPT_UTC_Z, default=str).decode()
    typer.echo(_CONTROL.sub(lambda character: f"\\u{ord(character[0]):04x}", text))


def print_answer(answer: Mapping[str, Any], sentence: str, as_json: bool) -> None:
    """Print what a command has done: as JSON, or as a sentence."""
    if as_json:
        print_json(answer)
    else:
        print_line(sentence)


def to_the_minute(instant: datetime | None) -> str:
    """The instant for a table, to the minute."""
    return "-" if instant is None else f"{instant:%Y-%m-%d %H:%M}"
