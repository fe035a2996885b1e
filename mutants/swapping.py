"""Puts a mutant into a process that has loaded the repository's modules, where the mutant allows that.

A changed function gets its new code, wherever it is referenced. A changed constant is evaluated anew in its module, and
so is each constant that is made from it, in all modules. Nothing else that runs when a module is loaded can be
repeated: neither a class nor a decorator, a default, or an object that others may hold already.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from re import Pattern
from types import CodeType, FunctionType, ModuleType

from mutants.loading import CONSTRUCTORS, Assignment, Loading, Name, loading

_CO_OPTIMIZED = 0x1  # of a function's code, and not of that of a class or a module
_PLAIN = (str, bytes, int, float, bool, type(None), timedelta, Enum, Pattern, FunctionType, type)


class CannotSwapError(Exception):
    """The process cannot get the mutant: a process must load the changed file."""


class Loaded:
    """The modules that this process has loaded from the folders of `root`."""

    def __init__(self, root: Path, folders: Iterable[str]) -> None:
        within = tuple(f"{root / folder}/" for folder in folders)
        self._modules: dict[str, ModuleType] = {}
        self._loadings: dict[str, Loading] = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and file.startswith(within) and file.endswith(".py"):
                self._modules[name] = module
                self._loadings[name] = loading(Path(file))
        self._names = {name: read.names() for name, read in self._loadings.items()}
        gc.unfreeze()  # pytest's conftest has frozen what was loaded: gc would not list it
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(within):
                self._functions.setdefault(_place(one.__code__), []).append(one)

    def swap(self, name: str, before: str, after: str) -> None:
        """Change the module `name` from the content `before` of its file to the content `after`.

        Raises CannotSwapError, perhaps when a part is changed already: then the process is of no more use.
        """
        module = self._modules.get(name)
        if module is None:
            return  # whoever imports it loads the changed file
        old, new = ast.parse(before), ast.parse(after)
        if len(old.body) != len(new.body):
            raise CannotSwapError("a statement more or less")
        different = [
            statement
            for was, statement in zip(old.body, new.body, strict=True)
            if ast.dump(was) != ast.dump(statement) and ast.dump(_head(was)) != ast.dump(_head(statement))
        ]
        functions = self._swap_functions(name, *(_compiled(module, text) for text in (before, after)))
        constants: set[Name] = set()
        for statement in different:
            assignment = Assignment.of(statement)
            if assignment is None:
                raise CannotSwapError(f"line {statement.lineno} runs when the module is loaded")
            if self._evaluate(name, assignment):
                constants.add((name, assignment.name))
        self._evaluate_users(constants, functions)

    def _swap_functions(self, name: str, old: CodeType, new: CodeType) -> set[Name]:
        """Give functions their new code. Returns the changed functions of the module, and its classes with a changed
        constructor.
        """
        changed: set[Name] = set()
        for was, code in _pairs(old, new):
            if _is_function(was) and _differ(was, code):
                owner, _, own_name = was.co_qualname.rpartition(".")
                changed.add((name, owner if own_name in CONSTRUCTORS else was.co_qualname))
                for function in self._functions.get(_place(was), []):
                    if was.co_freevars != code.co_freevars:
                        raise CannotSwapError(f"{was.co_qualname} closes over other names")
                    function.__code__ = code
        return changed

    def _evaluate_users(self, constants: set[Name], functions: set[Name]) -> None:
        """Evaluate anew all constants that are made from what has changed, until nothing more changes."""
        count = -1
        while count != len(constants) + len(functions):
            count = len(constants) + len(functions)
            changed = {own for _, own in constants | functions} | {f".{own}" for _, own in constants}
            for name, module in self._loadings.items():
                for own, origin in module.imported.items():
                    if origin in functions:
                        functions.add((name, own))
                    if origin in constants and (name, own) not in constants:
                        setattr(self._modules[name], own, getattr(self._modules[origin[0]], origin[1]))
                        constants.add((name, own))
                if not self._names[name].isdisjoint(changed):
                    self._evaluate_in(name, module, constants, functions)

    def _evaluate_in(self, name: str, module: Loading, constants: set[Name], functions: set[Name]) -> None:
        """The same for one module."""
        made = {own for where, own in constants if where == name} | {f".{own}" for _, own in constants}
        called = {own for where, own in functions if where == name}
        held = (made & module.used_by_others) | (called & module.called_by_others)
        if held and not name.startswith("tests."):  # a test's parameters stay as they are: it judges the others
            raise CannotSwapError(f"{name} uses {min(held)} when it is loaded")
        for assignment in module.assignments:
            place = (name, assignment.name)
            is_made_anew = bool(made & assignment.used or called & assignment.called)
            if not is_made_anew or place in constants:
                continue
            try:
                is_changed = self._evaluate(name, assignment)
            except CannotSwapError:
                if not name.startswith("tests."):
                    raise
                continue
            if is_changed:
                constants.add(place)
        for function, used in module.functions.items():
            if used & (made | called):
                functions.add((name, function))

    def _evaluate(self, name: str, assignment: Assignment) -> bool:
        """Run an assignment in its module. Returns whether the value is another one."""
        module = self._modules[name]
        before = vars(module).get(assignment.name)
        if not _is_plain(before):
            raise CannotSwapError(f"somebody may hold {name}.{assignment.name}")
        code = compile(ast.Module([assignment.statement], []), module.__file__ or name, "exec", dont_inherit=True)
        try:
            exec(code, vars(module))  # noqa: S102 - code of the repository, or a mutant of it
        except Exception as error:
            raise CannotSwapError(f"{name}.{assignment.name}: {error!r}") from error
        after = vars(module)[assignment.name]
        return type(after) is not type(before) or bool(after != before)


def _compiled(module: ModuleType, text: str) -> CodeType:
    return compile(text, module.__file__ or module.__name__, "exec", dont_inherit=True)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & _CO_OPTIMIZED)


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions and classes in the module, in classes and in functions: before, after."""
    were, are = _inner(old), _inner(new)
    if [code.co_name for code in were] != [code.co_name for code in are]:
        if not _is_function(old):
            raise CannotSwapError("other functions or classes")
        return  # what a function defines, it defines anew in each call
    for was, code in zip(were, are, strict=True):
        yield was, code
        yield from _pairs(was, code)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _differ(old: CodeType, new: CodeType) -> bool:
    """Whether the codes do different things. The numbers of lines may differ."""
    were, are = _inner(old), _inner(new)
    if _own(old) != _own(new) or len(were) != len(are):
        return True
    return any(_differ(was, code) for was, code in zip(were, are, strict=True))


def _own(code: CodeType) -> tuple[object, ...]:
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def _head(statement: ast.stmt) -> ast.stmt:
    """The part of a statement that runs when the module is loaded: it has no bodies of functions."""
    return _WithoutBodies().visit(ast.parse(ast.unparse(statement)).body[0])  # type: ignore[no-any-return]  # a statement


class _WithoutBodies(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Pass()]
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.body = [ast.Pass()]
        return node


def _is_plain(value: object) -> bool:
    """Whether the value may be made anew: nobody sees from a copy of it that it is one. An empty list, set or dict is
    there to be filled.
    """
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, list | set):
        return bool(value) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, [*value, *value.values()]))
    return isinstance(value, _PLAIN)
