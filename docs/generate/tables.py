"""Markdown of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a column that is empty in every row is left out."""
    lines = [[_cell(value) for value in row] for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in lines)]
    head = [columns[at] for at in kept]
    body = [[row[at] for at in kept] for row in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def code(text: str) -> str:
    """Nothing for nothing."""
    return f"`{text}`" if text else ""


def codes(texts: Iterable[str]) -> str:
    return ", ".join(code(text) for text in texts)


def _cell(text: str) -> str:
    """Of one line; a bar inside code would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")
