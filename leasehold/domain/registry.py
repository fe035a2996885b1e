"""The pipelines a process knows, by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline

#: A package offers its own work under this entry-point group; each entry is a `Pipeline` or a `Kind`.
ENTRY_POINTS = "leasehold.pipelines"


class Pipelines:
    """By name; refuses two of one name, and steps without a handler once handlers are loaded."""

    def __init__(self, *declared: Pipeline | Kind) -> None:
        self._by_name: dict[str, Pipeline] = {}
        self._kinds: dict[str, Kind] = {}
        for one in declared:
            self.add(one)

    def add(self, declared: Pipeline | Kind) -> None:
        """Add a pipeline, or a kind with all of its pipelines."""
        if isinstance(declared, Kind):
            if declared.name in self._kinds:
                raise DeclarationError(f"two kinds of work are named {declared.name!r}")
            self._kinds[declared.name] = declared
        for pipeline in declared.pipelines if isinstance(declared, Kind) else (declared,):
            if pipeline.name in self._by_name:
                raise DeclarationError(f"two pipelines are named {pipeline.name!r}")
            self._by_name[pipeline.name] = pipeline

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that were added whole, and not as pipelines only."""
        return tuple(self._kinds.values())

    def __getitem__(self, name: str) -> Pipeline:
        try:
            return self._by_name[name]
        except KeyError:
            raise DeclarationError(f"no pipeline is named {name!r}") from None

    def find(self, name: str) -> Pipeline | None:
        return self._by_name.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._by_name.values())

    def load_handlers(self, pipeline: str) -> Pipeline:
        """Import the module with the handlers and check that every step has one, but those that are done outside.

        Raises DeclarationError naming the steps without a handler.
        """
        declared = self[pipeline]
        importlib.import_module(declared.module)
        if missing := [one.name for one in declared.steps if not one.external and one.name not in declared.handlers]:
            raise DeclarationError(f"pipeline {pipeline}: no handler in {declared.module} for {missing}")
        return declared

    @classmethod
    def from_source(cls, source: str) -> Pipelines:
        """Call what `source` ("module:callable") names; the module may lie in the current folder.

        Raises DeclarationError when it is no registry.
        """
        module, _, name = source.partition(":")
        _find_modules_here()
        try:
            found = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError) as error:
            here = f"; modules are looked for in {Path.cwd()}, too" if isinstance(error, ModuleNotFoundError) else ""
            raise DeclarationError(f"cannot load pipelines from {source!r}: {error}{here}") from error
        if not isinstance(found, cls):
            raise DeclarationError(f"{source!r} returned a {type(found).__name__}, not Pipelines")
        return found

    def add_installed(self) -> None:
        """Add what installed packages offer under the entry-point group."""
        for entry in entry_points(group=ENTRY_POINTS):
            found = entry.load()
            if not isinstance(found, (Pipeline, Kind)):
                raise DeclarationError(f"entry point {entry.name} is a {type(found).__name__}, no Pipeline and no Kind")
            self.add(found)


def _find_modules_here() -> None:
    """Let the current folder be imported from, after everything that is installed: a file of the user's that has the
    name of a library is not taken for it.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
