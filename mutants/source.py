"""A Python file: its text, its syntax tree, and the places of nodes as positions of characters in the text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path


class Source:
    """A Python file. `path`: from the repository's root, not through a link."""

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.text = (root / path).read_text()
        self.tree = ast.parse(self.text)

    @cached_property
    def _lines(self) -> list[tuple[int, bytes]]:
        """The position of each line's first character, and the line's bytes: `ast` counts columns in bytes."""
        lines, start = [], 0
        for line in self.text.splitlines(keepends=True):
            lines.append((start, line.encode()))
            start += len(line)
        return lines

    def place(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The position of the node's first character, and the position after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        start, text = self._lines[line - 1]
        return start + len(text[:column].decode())

    def text_of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The node's text."""
        return self.text[slice(*self.place(node))]

    def code_around(self, node: ast.Constant) -> str:
        """The code around a constant, in one line. Neither comments nor the layout of the file change it."""
        value, marker = node.value, _Marker(node.value)
        node.value = marker  # type: ignore[assignment]  # ast.unparse prints the `repr` of any object
        try:
            lines = ast.unparse(self._statements[node]).splitlines()
        finally:
            node.value = value
        line = next(line for line in lines if marker.text in line)
        start = line.index(marker.text)
        around = line[max(start - 40, 0) : start + len(marker.text) + 20]
        return around.replace(marker.text, repr(value)).strip()

    @cached_property
    def _statements(self) -> dict[ast.AST, ast.stmt]:
        """The innermost statement of each node."""
        statements: dict[ast.AST, ast.stmt] = {}
        for outer in ast.walk(self.tree):  # inner statements come after outer ones
            if isinstance(outer, ast.stmt):
                statements |= dict.fromkeys(ast.walk(outer), outer)
        return statements

    @cached_property
    def scopes(self) -> list[tuple[int, int, str]]:
        """The first line, the last line and the name of every function, class and constant. Inner ones come after
        outer.
        """
        return list(_scopes(self.tree, ""))

    @cached_property
    def lines_in_functions(self) -> frozenset[int]:
        """The lines in the bodies of functions. All others run when the module is loaded."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return frozenset(n for node in functions for n in range(node.body[0].lineno, (node.end_lineno or 0) + 1))

    def scope(self, line: int) -> str:
        """The name of the innermost function, class or constant at the line; `module`: there is none."""
        around = [name for first, last, name in self.scopes if first <= line <= last]
        return around[-1] if around else "module"


class _Marker:
    """Stands for a constant in code that is printed."""

    def __init__(self, value: object) -> None:
        self.text = f"<<{value!r}>>"

    def __repr__(self) -> str:
        return self.text


def _scopes(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield first, child.end_lineno or first, prefix + child.name
            yield from _scopes(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not isinstance(node, ast.FunctionDef):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            if isinstance(target, ast.Name) and isinstance(node, ast.Module | ast.ClassDef):
                yield child.lineno, child.end_lineno or child.lineno, prefix + target.id
        elif isinstance(child, ast.stmt):
            yield from _scopes(child, prefix)
