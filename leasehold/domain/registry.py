"""The registry of pipelines: every process builds one at start, from code and from installed packages.

A registry refuses two pipelines of one name. A worker also loads the handlers, and every step must then have one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from leasehold.domain.broken_code import broken_code
from leasehold.domain.errors import DeclarationError, LeaseholdError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.sentences import with_article

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
    """Pipelines by name. `pipelines[name]` raises DeclarationError for an unknown name; `find` returns None."""

    def __init__(self, *declared: Pipeline | Kind) -> None:
        self._by_name: dict[str, Pipeline] = {}
        self._kinds: dict[str, Kind] = {}
        #: The schedules of each app, by the app's name. When a worker starts, it writes these schedules to the
        #: database, and pauses the app's other schedules there. An app that declares no schedules any more has an empty
        #: tuple, so that its earlier schedules are paused.
        self.schedules: dict[str, tuple[DeclaredSchedule, ...]] = {}
        for pipeline_or_kind in declared:
            self.add(pipeline_or_kind)

    def add(self, declared: Pipeline | Kind) -> None:
        """Add a pipeline, or a kind with all of its pipelines. Raises DeclarationError and adds nothing when one of the
        names is taken.
        """
        if isinstance(declared, Kind) and declared.name in self._kinds:
            raise DeclarationError(f"two kinds of work are named {declared.name!r}")
        added: dict[str, Pipeline] = {}
        for pipeline in declared.pipelines if isinstance(declared, Kind) else (declared,):
            if pipeline.name in self._by_name or pipeline.name in added:
                raise DeclarationError(f"two pipelines are named {pipeline.name!r}")
            added[pipeline.name] = pipeline
        if isinstance(declared, Kind):
            self._kinds[declared.name] = declared
        self._by_name |= added

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that were added. A pipeline that was added by itself belongs to none of them."""
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

    def loaded_handlers(self) -> list[str]:
        """The `pipeline.step` of each step that this process can run, by the handlers that are loaded now."""
        return [f"{pipeline.name}.{step.name}" for pipeline in self for step in pipeline.steps
                if pipeline.has_code_of(step)]  # fmt: skip

    def load_handlers(self, pipeline: str) -> Pipeline:
        """Import the module with the pipeline's handlers. Every step must have one, except external steps.

        Raises DeclarationError: it names the steps without a handler, or the extra of Leasehold that is not installed.
        Raises ImportError if Python cannot import a module that does not ship with the platform.
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
        steps_with_code = [step.name for step in declared.steps if not step.external]
        if missing := [name for name in steps_with_code if name not in declared.handlers]:
            raise DeclarationError(f"pipeline {pipeline}: no handler in {declared.module} for {missing}")
        return declared

    @classmethod
    def from_source(cls, source: str) -> Pipelines:
        """The registry that `source` ("module:name") names. The name is that of an App, of a registry, or of a callable
        that returns a registry. Without `:name`, the name is `app`. The module may be in the current folder.

        Raises DeclarationError when there is no registry, CodeBroken when the module raises an error, and any error
        that the callable raises.
        """
        registry = object_at(source)
        # A class with a method `pipelines` is no App: an App is an instance of such a class.
        is_app = not isinstance(registry, type) and callable(getattr(registry, "pipelines", None))
        if is_app:
            registry = registry.pipelines
        if callable(registry) and not isinstance(registry, cls):
            if _needs_arguments(registry):
                raise DeclarationError(
                    f"{source!r} needs arguments: name an App, Pipelines, or a function without arguments"
                )
            registry = registry()
        if not isinstance(registry, cls):
            raise DeclarationError(f"{source!r} gives {with_article(type(registry).__name__)}, not Pipelines")
        return registry

    def add_installed(self) -> None:
        """Add the pipelines and kinds that installed packages offer under ENTRY_POINTS."""
        for entry in entry_points(group=ENTRY_POINTS):
            offered = entry.load()
            if not isinstance(offered, (Pipeline, Kind)):
                type_name = with_article(type(offered).__name__)
                raise DeclarationError(f"entry point {entry.name} is {type_name}, neither a Pipeline nor a Kind")
            self.add(offered)


def object_at(source: str) -> Any:
    """The object that `source` ("module:name") names. Raises DeclarationError if there is none, and CodeBroken when the
    module raises an error.
    """
    module, _, name = source.partition(":")
    if "/" in module or not all(module.split(".")):
        raise DeclarationError(f"{source!r} names no module: write MODULE:NAME, as in shop.tasks:app")
    import_from_current_folder()
    imported = _import(module, source)
    try:
        return getattr(imported, name or "app")
    except AttributeError as error:
        place = getattr(imported, "__file__", None) or module
        raise DeclarationError(f"cannot load pipelines from {source!r}: {place} has no {name or 'app'!r}") from error


def _import(module: str, source: str) -> ModuleType:
    """The module. Raises as `object_at`: `source` is for the sentence of the error."""
    try:
        return importlib.import_module(module)
    except LeaseholdError:  # its sentence already says what is wrong
        raise
    except (Exception, SystemExit) as error:
        # Python did not find the module itself, or a package that contains it.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if not is_missing and (broken := broken_code(source, error)) is not None:
            raise broken from error  # the module's own code raised the error
        if not isinstance(error, ImportError):  # the error comes from elsewhere, and needs its own traceback
            raise
        hint = f"; {Path.cwd()} is searched, too" if is_missing else ""
        raise DeclarationError(f"cannot load pipelines from {source!r}: {error}{hint}") from error


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a builtin without a known signature
        return False
    return False


def import_from_current_folder() -> None:
    """Let Python import from the current folder, after installed packages: a user's file must not hide a library."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
