"""Where a constant is used: a mutant of a module's SQL or table is noticed by the tests that run those lines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from mutants.source import Source

#: A line of a file: (path, line).
Line = tuple[str, int]


class Uses:
    """Of the names that modules define outside of functions. Names are matched as text, whoever imports them."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._lines: dict[str, set[Line]] = defaultdict(set)  # of a name, in functions
        self._makes: dict[str, set[str]] = defaultdict(set)  # names that are made of a name
        for path in paths:
            source = Source(root, path)
            for statement in source.tree.body:
                self._read(path, statement, None)

    def _read(self, path: str, node: ast.stmt, within: str | None) -> None:
        """`within`: the constant, class or function of the module's top that the statement is about."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in [*node.decorator_list, *_defaults(node)]:
                self._note(path, default, range(node.body[0].lineno, (node.end_lineno or 0) + 1))
            for name in _names(node):
                self._makes[name].add(within or node.name)  # called when a constant is made
            for inner in (one for statement in node.body for one in ast.walk(statement)):
                self._read_inner(path, inner)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                self._read(path, child, within or node.name)
        else:
            target = within or _target(node)
            for name in _names(node):
                if target:
                    self._makes[name].add(target)

    def _read_inner(self, path: str, node: ast.AST) -> None:
        """A statement without others in it, or an expression: an `if` counts for its condition alone."""
        if isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not hasattr(node, "body")):
            self._note(path, node, range(node.lineno, (node.end_lineno or 0) + 1))

    def _note(self, path: str, node: ast.AST, lines: range) -> None:
        for name in _names(node):
            self._lines[name].update((path, line) for line in lines)

    def of(self, name: str) -> set[Line]:
        """The lines of functions that use the constant, or a constant that is made of it."""
        found: set[Line] = set()
        seen, waiting = {name}, [name]
        while waiting:
            one = waiting.pop()
            found |= self._lines.get(one, set())
            more = {made for made in self._makes.get(one, ()) if made.isupper() or made.startswith("_")} - seen
            seen |= more
            waiting += more
        return found


def _names(node: ast.AST) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def _target(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
