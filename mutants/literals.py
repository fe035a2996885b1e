"""Finds the SQL in a Python file: the literals that contain it, and the place of each character in the file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mutants.mutant import Change, Edit
from mutants.source import Source

_IS_SQL = re.compile(r"\b(?:WHERE|FOR UPDATE|ON CONFLICT|INSERT INTO|DELETE FROM|CASE WHEN)\b|\bAND [a-z]+\.[a-z]")
_LITERAL = re.compile(
    r"""(?P<prefix>[rbfRBF]{0,2})(?P<quote>\"\"\"|'''|"|')(?P<body>(?:\\.|(?!(?P=quote)).)*)(?P=quote)""", re.DOTALL
)
_ESCAPE = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """The SQL of a literal at the character `start` of a file. `text` is as long as the literal's source, so that each
    character keeps its place: blanks replace the quotes and escapes of Python, and `x`s replace `{name}`. `parts`: the
    ranges of `text` that are SQL.
    """

    node: ast.expr
    start: int
    text: str
    parts: tuple[tuple[int, int], ...]

    def placed(self, change: Change) -> Change:
        """The change of `text` as a change of the file. The Python between two parts of the literal stays."""
        edits = tuple(placed for edit in change.edits for placed in self._pieces(edit))
        return Change(change.kind, change.about, edits)

    def _pieces(self, edit: Edit) -> Iterator[Edit]:
        if edit.start == edit.end:
            yield Edit(edit.start + self.start, edit.end + self.start, edit.text)
            return
        text = edit.text
        for first, end in self.parts:
            start, stop = max(edit.start, first), min(edit.end, end)
            if start < stop:
                yield Edit(start + self.start, stop + self.start, text)
                text = ""


def pieces(source: Source) -> Iterator[Piece]:
    for node in _literals(source.tree):
        start, end = source.place(node)
        piece = _piece(node, start, source.text[start:end])
        if _IS_SQL.search(piece.text):
            yield piece


def _literals(tree: ast.Module) -> Iterator[ast.expr]:
    """The literals of the file, without docstrings, and without literals inside another literal."""
    unread: list[ast.AST] = [tree]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        unread += ast.iter_child_nodes(node)


def _piece(node: ast.expr, start: int, text: str) -> Piece:
    blank = [" "] * len(text)
    parts = []
    for literal in _LITERAL.finditer(text):
        first, end = literal.span("body")
        body = literal["body"]
        if "r" not in literal["prefix"].lower():
            body = _ESCAPE.sub("  ", body)
        if "f" in literal["prefix"].lower():
            body = _without_names(body)
        blank[first:end] = body
        parts.append((first, end))
    return Piece(node, start, "".join(blank), tuple(parts))


def _without_names(body: str) -> str:
    """Replace `{name}` by as many `x`."""
    characters = list(body)
    at = 0
    while at < len(body):
        if body.startswith(("{{", "}}"), at):
            at += 2
        elif body[at] == "{":
            depth, end = 1, at + 1
            while depth:
                depth += {"{": 1, "}": -1}.get(body[end], 0)
                end += 1
            characters[at:end] = "x" * (end - at)
            at = end
        else:
            at += 1
    return "".join(characters)
