"""Reads what a module does when it is loaded: what it imports, and from which names it makes its constants."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: A name that a module defines: (module, name).
Name = tuple[str, str]
#: The methods that run when an object is made, perhaps while a module is loaded.
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A constant of a module. `used`: the names that its value is made from; `called`: those of them that it calls."""

    name: str
    statement: ast.stmt
    used: frozenset[str]
    called: frozenset[str]

    @classmethod
    def of(cls, statement: ast.stmt) -> Assignment | None:
        """None: the statement is no assignment to one name."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target: ast.expr = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target = statement.target
        else:
            return None
        if not isinstance(target, ast.Name):
            return None
        assert statement.value is not None
        return cls(target.id, statement, frozenset(_used(statement.value)), frozenset(_called(statement.value)))


@dataclass(slots=True)
class Loading:
    """`imported`: the module's own name for it -> what is imported. `functions`: the name of a function, or of a class
    with a constructor -> the names that it uses. `used_by_others`, `called_by_others`: the names that the other
    statements use and call: classes, decorators, defaults, annotations, calls. A name after a point is `.NAME`.
    """

    imported: dict[str, Name] = field(default_factory=dict)
    assignments: list[Assignment] = field(default_factory=list)
    functions: dict[str, frozenset[str]] = field(default_factory=dict)
    used_by_others: set[str] = field(default_factory=set)
    called_by_others: set[str] = field(default_factory=set)

    def names(self) -> frozenset[str]:
        """All names that the module uses when it is loaded, or in its functions."""
        made = (assignment.used | assignment.called for assignment in self.assignments)
        return frozenset().union(self.used_by_others, self.called_by_others, *self.functions.values(), *made)


def loading(file: Path) -> Loading:
    read = Loading()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            read.imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    seen: set[str] = set()
    for statement in tree.body:
        assignment = Assignment.of(statement)
        if assignment is not None and assignment.name not in seen:
            read.assignments.append(assignment)
            seen.add(assignment.name)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            _read_function(read, statement, statement.name)
        elif isinstance(statement, ast.ClassDef):
            _read_class(read, statement)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            _note(read, [statement])
    return read


def _read_function(read: Loading, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None) -> None:
    if name is not None:
        read.functions[name] = read.functions.get(name, frozenset()) | {
            used for statement in function.body for used in _used(statement)
        }
    _note(read, [*function.decorator_list, function.args, *([function.returns] if function.returns else [])])
    read.called_by_others |= {name for decorator in function.decorator_list for name in _used(decorator)}


def _read_class(read: Loading, node: ast.ClassDef) -> None:
    _note(read, [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)])
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _read_function(read, child, node.name if child.name in CONSTRUCTORS else None)
        elif isinstance(child, ast.ClassDef):
            _read_class(read, child)
        else:
            _note(read, [child])


def _note(read: Loading, nodes: Iterable[ast.AST]) -> None:
    for node in nodes:
        read.used_by_others |= set(_used(node))
        read.called_by_others |= set(_called(node))


def _used(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield f".{child.attr}"


def _called(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            yield from _used(child.func)
