"""Formats values as Markdown: tables and code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that are empty in every row."""
    lines = [[_cell(value) for value in row] for row in rows]
    filled = [number for number in range(len(columns)) if any(row[number] for row in lines)]
    head = [columns[number] for number in filled]
    body = [[row[number] for number in filled] for row in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def code(text: str) -> str:
    """The text as code; "" for an empty text."""
    return f"`{text}`" if text else ""


def codes(texts: Iterable[str]) -> str:
    return ", ".join(code(text) for text in texts)


def _cell(text: str) -> str:
    """The text in one line, with escaped bars: a bar would end the cell, even inside code."""
    return " ".join(text.split()).replace("|", "\\|")
