"""Finds the lines that use a constant. Tests that run these lines can notice a mutant of the constant."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from mutants.source import Source

#: A line of a file: (path, line).
Line = tuple[str, int]


class Uses:
    """The uses of the names that modules define outside of functions. Names are compared as text: so a use in any
    module counts for every module that defines the name.
    """

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._lines: dict[str, set[Line]] = defaultdict(set)  # name -> lines of functions that use it
        # Name -> the constants, classes and functions that use it.
        self._used_by: dict[str, set[str]] = defaultdict(set)
        self._used_by_constants: set[str] = set()  # of a function: it may run only when a module is loaded
        for path in paths:
            source = Source(root, path)
            for statement in source.tree.body:
                self._read(path, statement, None)

    def _read(self, path: str, node: ast.stmt, within: str | None) -> None:
        """Record the names that the statement uses. `within`: the outermost class or function that contains it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for expression in [*node.decorator_list, *_defaults(node), *_annotations(node)]:
                self._note(path, expression, range(node.body[0].lineno, (node.end_lineno or 0) + 1))
            for name in _names(node):
                self._used_by[name].add(within or node.name)  # a constant's value may call the function
            for inner in (child for statement in node.body for child in ast.walk(statement)):
                self._read_inner(path, inner)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                self._read(path, child, within or node.name)
        else:
            targets = [within] if within else targets_of(node)
            for name in _names(node) if targets else ():
                self._used_by[name].update(targets)
                self._used_by_constants.add(name)

    def _read_inner(self, path: str, node: ast.AST) -> None:
        """Note the names of an expression, or of a statement without a body. Of an `if`, only the condition counts."""
        if isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not hasattr(node, "body")):
            self._note(path, node, range(node.lineno, (node.end_lineno or 0) + 1))

    def _note(self, path: str, node: ast.AST, lines: range) -> None:
        for name in _names(node):
            self._lines[name].update((path, line) for line in lines)

    def makes_constants(self, name: str) -> bool:
        """Whether a constant's value may call the function `name`: then the function runs when a module is loaded."""
        return name in self._used_by_constants

    def lines_using(self, name: str) -> set[Line]:
        """The lines of functions that use the constant, or another constant or a class that uses it: itself, or by a
        function that makes a constant.
        """
        lines: set[Line] = set()
        visited, unread = {name}, [name]
        while unread:
            current = unread.pop()
            lines |= self._lines.get(current, set())
            users = self._used_by.get(current, set())
            others = {user for user in users if user.startswith("_") or user[0].isupper()}
            others |= users & self._used_by_constants
            unread += others - visited
            visited |= others
        return lines


def _names(node: ast.AST) -> set[str]:
    nodes = list(ast.walk(node))
    names = {child.id for child in nodes if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)}
    return names | {child.attr for child in nodes if isinstance(child, ast.Attribute)}


def targets_of(node: ast.stmt) -> list[str]:
    """The names of the constants that the statement assigns: `A = 1`, or `A, B = 1, 2`."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    """FastAPI calls what the annotations of an endpoint's parameters name."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.annotation for argument in arguments if argument.annotation is not None]


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
