"""The registry of pipelines: every process builds one at start, from code and from installed packages.

A registry refuses two pipelines of one name. A worker also loads the handlers, and every step must then have one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline

#: A package offers its own work under this entry-point group; each entry is a `Pipeline` or a `Kind`.
ENTRY_POINTS = "leasehold.pipelines"
#: The package of the platform's own kinds of work. The handlers in its folder `media` need the extra
#: `leasehold[media]`, and so on.
_SHIPPED = "leasehold.pipelines."


@dataclass(frozen=True, slots=True)
class DeclaredSchedule:
    """A schedule that an app's code declares; the fields are those of `POST /v1/schedules`."""

    template: str
    cron: str
    timezone: str
    payload: Mapping[str, Any]
    overlap: Literal["skip", "buffer_one", "cancel_other", "allow_all"] = "skip"
    catch_up: Literal["skip", "one", "all"] = "skip"
    catch_up_seconds: int = 86_400


class Pipelines:
    """Pipelines by name. A wrong or missing one raises DeclarationError."""

    def __init__(self, *declared: Pipeline | Kind) -> None:
        self._by_name: dict[str, Pipeline] = {}
        self._kinds: dict[str, Kind] = {}
        #: The schedules of each app, by its name. A worker that starts makes the database match. An app without
        #: schedules has an empty entry, so that the worker pauses those that it had.
        self.schedules: dict[str, tuple[DeclaredSchedule, ...]] = {}
        for pipeline_or_kind in declared:
            self.add(pipeline_or_kind)

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
        """The kinds that were added as a Kind."""
        return tuple(self._kinds.values())

    def __getitem__(self, name: str) -> Pipeline:
        try:
            return self._by_name[name]
        except KeyError:
            raise DeclarationError(f"no pipeline is named {name!r}") from None

    def find(self, name: str) -> Pipeline | None:
        """The pipeline, or None."""
        return self._by_name.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._by_name.values())

    def load_handlers(self, pipeline: str) -> Pipeline:
        """Import the module with the pipeline's handlers. Every step must have one, except external steps.

        Raises DeclarationError that names the steps without a handler, or the extra of Leasehold that is not installed;
        and ImportError if a module of yours cannot be imported.
        """
        declared = self[pipeline]
        try:
            importlib.import_module(declared.module)
        except ModuleNotFoundError as error:
            if not declared.module.startswith(_SHIPPED):
                raise
            extra = declared.module.removeprefix(_SHIPPED).partition(".")[0]
            raise DeclarationError(
                f"pipeline {pipeline} needs {error.name}, which is not installed: pip install 'leasehold[{extra}]', "
                "or leave the pipeline out (LEASEHOLD_PIPELINES)"
            ) from error
        with_handler = [step.name for step in declared.steps if not step.external]
        if missing := [name for name in with_handler if name not in declared.handlers]:
            raise DeclarationError(f"pipeline {pipeline}: no handler in {declared.module} for {missing}")
        return declared

    @classmethod
    def from_source(cls, source: str) -> Pipelines:
        """The registry that `source` ("module:name") names: an App, a registry, or a callable that returns the
        registry. Without `:name` it is `app`. The module may lie in the current folder.

        Raises DeclarationError when there is none.
        """
        module, _, name = source.partition(":")
        if not module:
            raise DeclarationError(f"{source!r} names no module: write MODULE:NAME")
        import_from_current_folder()
        try:
            found = getattr(importlib.import_module(module), name or "app")
        except (ImportError, AttributeError) as error:
            hint = f"; {Path.cwd()} is searched, too" if isinstance(error, ModuleNotFoundError) else ""
            raise DeclarationError(f"cannot load pipelines from {source!r}: {error}{hint}") from error
        registry = found
        if hasattr(found, "pipelines"):
            registry = found.pipelines()
        elif callable(found):
            registry = found()
        if not isinstance(registry, cls):
            raise DeclarationError(f"{source!r} returned a {type(registry).__name__}, not Pipelines")
        return registry

    def add_installed(self) -> None:
        """Add the pipelines and kinds that installed packages offer under ENTRY_POINTS."""
        for entry in entry_points(group=ENTRY_POINTS):
            offered = entry.load()
            if not isinstance(offered, (Pipeline, Kind)):
                type_name = type(offered).__name__
                raise DeclarationError(f"entry point {entry.name} is a {type_name}, neither a Pipeline nor a Kind")
            self.add(offered)


def import_from_current_folder() -> None:
    """Make the current folder importable, after all installed packages: a user's file must not shadow a library."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
