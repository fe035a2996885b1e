"""Finds the names by which other processes import an app and its tasks, and checks that an import does not run the
program again. The other processes run the app's `process=True` tasks and its isolated tasks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leasehold.app.terms import TaskTerms
from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.registry import Pipelines
from leasehold.runtime.child_imports import is_import_of_child

if TYPE_CHECKING:
    from leasehold.settings import Settings


class TaskOfProgram(Protocol):
    """The parts of a Task that this module and app/serving.py use. app.py imports this module, so this module cannot
    import app.py.
    """

    name: str
    location: str
    function: Callable[..., Any]
    terms: TaskTerms
    pipeline: Pipeline


class AppOfProgram(Protocol):
    """The parts of an App that this module and app/serving.py use. `module`: the module that makes the app."""

    name: str
    module: str

    @property
    def tasks(self) -> Mapping[str, TaskOfProgram]: ...
    def pipelines(self) -> Pipelines: ...


#: The names of the module that Python runs as the program. The second is its name in a process of `multiprocessing`.
_MAIN = ("__main__", "__mp_main__")
_GUARD = 'if __name__ == "__main__":'
_HINT = "put the tasks into a module, or run the program as `python FILE.py` or `python -m MODULE`"


def importable_name(module: str) -> str | None:
    """The name by which another process imports the module. The module that Python runs as the program is `__main__`
    here, but other processes import it by its real name, for example `shop` after `python shop.py` or `python -m shop`.
    Returns None if no other process can import the module, for example after `python -c`.
    """
    if module not in _MAIN:
        return module
    main = sys.modules.get(module)
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # the program was started by `python -m`
        return None if spec.name in _MAIN else str(spec.name)
    file = getattr(main, "__file__", None)
    if not file:
        return None
    path = Path(file).resolve()
    return path.stem if _is_found(path.stem, path) else None


def _is_found(name: str, path: Path) -> bool:
    """Whether Python finds the module `name` in this file."""
    if "." in name:  # find_spec("a.b") would import the package `a`
        return False
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module of this name is loaded, and has no `__spec__`
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path


def modules_of(tasks: Iterable[TaskOfProgram]) -> list[str]:
    """The names by which another process imports the modules that declare the tasks. Raises DeclarationError if another
    process cannot import one of these modules.
    """
    names: list[str] = []
    for task in tasks:
        name = importable_name(task.function.__module__)
        if name is None:
            raise DeclarationError(f"{task.location}: no other process can import the program of {task.name}: {_HINT}")
        names.append(name)
    return list(dict.fromkeys(names))


def source_of(app: AppOfProgram) -> str:
    """The `module:name` by which another process imports the app. This function searches the module that makes the app
    first, then the modules that declare its tasks, then all other modules. Raises DeclarationError if the app is not a
    global variable of a module that another process can import.
    """
    # Whether the app is a global variable of a module that no other process can import. Only the main module may be
    # such a module.
    is_of_main = False
    for module in _modules_that_may_have(app):
        # `sys.modules` has None for a module whose import is blocked.
        for name, value in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
            if value is app and not name.startswith("__"):
                if (importable := importable_name(module)) is not None:
                    return f"{importable}:{name}"
                is_of_main = True
    if is_of_main:
        raise DeclarationError(f"no other process can import the program of the app {app.name}: {_HINT}")
    raise DeclarationError(
        f"the app {app.name} is not a global variable of a module, so no other process can import it"
    )


def _modules_that_may_have(app: AppOfProgram) -> Iterator[str]:
    yield app.module
    yield from (task.function.__module__ for task in app.tasks.values())
    yield from (module for module in list(sys.modules) if module not in _MAIN)
    yield from _MAIN  # last, because an import of the program may do more than an import of a module


def source_of_children(app: AppOfProgram, isolated: Iterable[str], settings: Settings) -> tuple[str, list[str]]:
    """How the child processes of isolated tasks load the app. `isolated`: the names of these tasks' pipelines. Returns
    the `module:name` of the app, and the names of the modules that declare these tasks. A child imports these modules
    before the app. Raises DeclarationError.

    If no other process can import the app by a name, this function returns the value of the setting `pipelines`
    instead. The setting must be set, and the registry that it names must have all the pipelines `isolated`.
    """
    isolated = list(isolated)
    modules = modules_of(app.tasks[name] for name in isolated if name in app.tasks)
    try:
        source = source_of(app)
    except DeclarationError:
        source = settings.pipelines
        if "pipelines" not in settings.model_fields_set:
            raise
        registry = Pipelines.from_source(source)
        if missing := [name for name in isolated if name not in registry]:
            raise DeclarationError(
                f"the isolated task {missing[0]} is not in {source} (LEASEHOLD_PIPELINES), from which its process"
                f" loads it, and the app {app.name} is not a global variable of a module"
            ) from None
    return source, modules


def check_program(modules: Collection[str]) -> None:
    """Raises DeclarationError if a process that imports the modules would run this program again. An import does so if
    the module is the program's own file, and this file has no `if __name__ == "__main__":` or similar comparison.
    """
    main = next((module for module in _MAIN if (importable_name(module) or "") in modules), None)
    file = None if main is None else getattr(sys.modules[main], "__file__", None)
    if file and not _asks_for_name(Path(file)):
        raise DeclarationError(_unguarded(file))


def check_no_import_of_child() -> None:
    """Raises DeclarationError if this process is a child of a worker, and imports the program now."""
    if is_import_of_child():
        raise DeclarationError(_unguarded("a program"))


def _unguarded(program: str) -> str:
    return (
        f"{program} serves its app when it is imported, and the processes of its tasks import it: put what it runs"
        f" under `{_GUARD}`"
    )


def _asks_for_name(path: Path) -> bool:
    """Whether the file compares `__name__` with something. If the file cannot be read or parsed, the answer is also
    True.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # no file, or no source
        return True
    compared = (name for node in ast.walk(tree) if isinstance(node, ast.Compare) for name in ast.walk(node))
    return any(isinstance(name, ast.Name) and name.id == "__name__" for name in compared)
