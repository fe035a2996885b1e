"""The registry of pipelines, and of the schedules that apps declare. Every process builds a registry at its start, from
code and from installed packages.

A registry refuses two pipelines with the same name. A worker also loads the handlers of its pipelines
(`load_handlers`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from leasehold.domain.broken_code import broken_code
from leasehold.domain.errors import DeclarationError, LeaseholdError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import MAX_DELAY, Pipeline
from leasehold.domain.sentences import with_article

#: A package offers its own work under this entry-point group; each entry is a `Pipeline` or a `Kind` (which groups
#: pipelines).
ENTRY_POINTS = "leasehold.pipelines"
#: The package of the platform's own kinds of work. The handlers in its folder NAME need the extra `leasehold[NAME]`.
_SHIPPED_PREFIX = "leasehold.pipelines."


#: `Overlap`: what a tick of a schedule does while the run of an earlier tick is unfinished. `CatchUp`: which missed
#: ticks start runs later.
Overlap: TypeAlias = Literal["skip", "buffer_one", "cancel_other", "allow_all"]
CatchUp: TypeAlias = Literal["skip", "one", "all"]


@dataclass(frozen=True, slots=True)
class DeclaredSchedule:
    """A schedule that an app's code declares; the fields are those of `POST /v1/schedules`. Raises DeclarationError for
    a wrong `overlap`, `catch_up` or `catch_up_seconds`. Without this check PostgreSQL would refuse the row. The worker
    would then write none of the app's schedules, and only its log would report this.
    """

    template: str
    cron: str
    timezone: str
    payload: Mapping[str, Any]
    overlap: Overlap = "skip"
    catch_up: CatchUp = "skip"
    catch_up_seconds: int = 86_400

    def __post_init__(self) -> None:
        for name, value, known in (
            ("overlap", self.overlap, get_args(Overlap)),
            ("catch_up", self.catch_up, get_args(CatchUp)),
        ):
            if value not in known:
                raise DeclarationError(f"{name} is one of {', '.join(known)}, not {value!r}")
        if not 0 <= self.catch_up_seconds <= MAX_DELAY.total_seconds():
            raise DeclarationError(f"catch_up_within is 0 to {MAX_DELAY.days} days, not {self.catch_up_seconds} s")


class Pipelines:
    """Pipelines by name. `pipelines[name]` raises DeclarationError for an unknown name; `find` returns None."""

    def __init__(self, *declared: Pipeline | Kind) -> None:
        self._by_name: dict[str, Pipeline] = {}
        self._kinds: dict[str, Kind] = {}
        #: The schedules of each app, by the app's name. When a worker starts, it writes these schedules to the
        #: database, and pauses the app's other schedules there. An app that declares no schedules any more has an empty
        #: tuple, because its earlier schedules must be paused.
        self.schedules: dict[str, tuple[DeclaredSchedule, ...]] = {}
        for pipeline_or_kind in declared:
            self.add(pipeline_or_kind)

    def add(self, pipeline_or_kind: Pipeline | Kind) -> None:
        """Add a pipeline, or a kind with all of its pipelines. Raises DeclarationError, and adds nothing, when an
        earlier pipeline or kind has one of the names.
        """
        kind = pipeline_or_kind if isinstance(pipeline_or_kind, Kind) else None
        if kind is not None and kind.name in self._kinds:
            raise DeclarationError(f"two kinds of work are named {kind.name!r}")
        new_pipelines: dict[str, Pipeline] = {}
        for pipeline in pipeline_or_kind.pipelines if isinstance(pipeline_or_kind, Kind) else (pipeline_or_kind,):
            if pipeline.name in self._by_name or pipeline.name in new_pipelines:
                raise DeclarationError(f"two pipelines are named {pipeline.name!r}")
            new_pipelines[pipeline.name] = pipeline
        if kind is not None:
            self._kinds[kind.name] = kind
        self._by_name |= new_pipelines

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that were added. A pipeline that was added without a kind belongs to none of them."""
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

    def loaded_handlers(self, with_children: Collection[str]) -> list[str]:
        """The names (`pipeline.step`) of the steps that this process can run with the handlers that are loaded now.
        `with_children`: the pipelines whose isolated steps this process runs in child processes.
        """
        return [f"{pipeline.name}.{step.name}" for pipeline in self for step in pipeline.steps
                if pipeline.has_code_of(step, with_children)]  # fmt: skip

    def load_handlers(self, name: str) -> Pipeline:
        """Import the module with the handlers of the pipeline `name`. Every step must have a handler, except external
        steps (those that external workers do over HTTP).

        Raises DeclarationError, which names the steps without a handler, or the extra of Leasehold that is not
        installed. Raises ImportError if Python cannot import a module that does not ship with the platform.
        """
        pipeline = self[name]
        try:
            importlib.import_module(pipeline.module)
        except ModuleNotFoundError as error:
            if not pipeline.module.startswith(_SHIPPED_PREFIX):
                raise
            extra = pipeline.module.removeprefix(_SHIPPED_PREFIX).partition(".")[0]
            raise DeclarationError(
                f"pipeline {name} needs {error.name}, which is not installed: pip install 'leasehold[{extra}]', "
                "or leave the pipeline out (LEASEHOLD_PIPELINES)"
            ) from error
        steps_with_code = [step.name for step in pipeline.steps if not step.external]
        if steps_without_handler := [step for step in steps_with_code if step not in pipeline.handlers]:
            raise DeclarationError(f"pipeline {name}: no handler in {pipeline.module} for {steps_without_handler}")
        return pipeline

    @classmethod
    def from_source(cls, source: str) -> Pipelines:
        """The registry that `source` ("module:name") names. `name`: an App (which has a registry of its tasks), a
        registry, or a callable that returns a registry. Without `:name`, the name is `app`. The module may be in the
        current folder.

        Raises DeclarationError when there is no registry, CodeBroken when the module raises an error, and any error
        that the callable raises.
        """
        registry = object_at(source)
        # A class with a method `pipelines` is no App, because an App is an instance of such a class.
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
        """Add the pipelines and kinds that installed packages offer under ENTRY_POINTS.

        Raises DeclarationError as `add` does, and if a package offers something that is neither a Pipeline nor a Kind.
        """
        for entry in entry_points(group=ENTRY_POINTS):
            pipeline_or_kind = entry.load()
            if not isinstance(pipeline_or_kind, (Pipeline, Kind)):
                type_name = with_article(type(pipeline_or_kind).__name__)
                raise DeclarationError(f"entry point {entry.name} is {type_name}, neither a Pipeline nor a Kind")
            self.add(pipeline_or_kind)


def object_at(source: str) -> Any:
    """The object that `source` ("module:name") names. Raises DeclarationError if there is none, and CodeBroken when the
    module raises an error.
    """
    module, _, name = source.partition(":")
    if "/" in module or not all(module.split(".")):
        raise DeclarationError(f"{source!r} names no module: write MODULE:NAME, as in shop.tasks:app")
    import_from_current_folder()
    imported_module = _import(module, source)
    try:
        return getattr(imported_module, name or "app")
    except AttributeError as error:
        place = getattr(imported_module, "__file__", None) or module
        raise DeclarationError(f"cannot load pipelines from {source!r}: {place} has no {name or 'app'!r}") from error


def _import(module: str, source: str) -> ModuleType:
    """The module. Raises the errors of `object_at`. Their messages contain `source`."""
    try:
        return importlib.import_module(module)
    except LeaseholdError:  # the user can understand its message
        raise
    except (Exception, SystemExit) as error:
        # True if Python did not find the module itself, or a package that should contain the module.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if not is_missing and (code_broken := broken_code(source, error)) is not None:
            raise code_broken from error  # the module's own code raised the error
        if not isinstance(error, ImportError):  # the user's code did not raise this error: keep the traceback
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
    """Let Python import from the current folder, but from installed packages first, because a user's file must not hide
    a library.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
