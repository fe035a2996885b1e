"""Which files of tests import a module: their tests are about it, and mostly call it without a process of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Folders that are imported as `leasehold.NAME`, by links there.
_LINKED = ("api/", "worker/", "migrations/")


class Importers:
    """`files`: the paths of the tests' files, from `root`."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self._root = root
        self._files: defaultdict[str, set[str]] = defaultdict(set)
        for file in sorted(set(files)):
            for module in _imported(ast.parse((root / file).read_text())):
                self._files[module].add(file)

    def of(self, path: str) -> set[str]:
        """The files of tests that import the module at `path`, or its package if the package passes its names on."""
        file = f"leasehold/{path}" if path.startswith(_LINKED) else path
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package = module.rpartition(".")[0]
        return self._files[module] | (self._files[package] if self._passes_on(package, module) else set())

    def _passes_on(self, package: str, module: str) -> bool:
        start = self._root / package.replace(".", "/") / "__init__.py"
        return start.exists() and module in _imported(ast.parse(start.read_text()))


def _imported(tree: ast.Module) -> Iterator[str]:
    """The names of modules in the imports; of `from a.b import c` both `a.b` and `a.b.c`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
