"""Imports go down only: between the rooms of the package, and between the programs above it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Where our code lies. `api`, `worker` and `migrations` are imported as `leasehold.api` and so on, by links there.
FOLDERS = ("leasehold", "api", "worker", "migrations", "bench", "chaos", "mutants")
LINKED = ("api", "worker", "migrations")
#: From the ground up. A room imports from itself and from those before it; a single module stands for itself.
ROOMS = (
    "leasehold.settings",
    "leasehold.domain",
    "leasehold.urls",
    "leasehold.starting",
    "leasehold.telemetry",
    "leasehold.runtime",
    "leasehold.db",
    "leasehold.security",
    "leasehold.storage",
    "leasehold.broker",
    "leasehold.evaluation",
    "leasehold.transitions",
    "leasehold.workflows",
    "leasehold.limits",
    "leasehold.schedules",
    "leasehold.kinds",
    "leasehold.pictures",
    "leasehold.actions",
    "leasehold.selfcheck",
    "leasehold.client",
    "leasehold.embedded",
    "leasehold.exporter",
    "leasehold.pipelines",
    "leasehold.migrations",
    "leasehold.api.process",
    "leasehold.api.auth",
    "leasehold.api.http",
    "leasehold.api.jobs",
    "leasehold.api.runs",
    "leasehold.api.media",
    "leasehold.api.conversion",
    "leasehold.api.generation",
    "leasehold.api.fleet",
    "leasehold.api.console",
    "leasehold.api",
    "leasehold.worker.metrics",
    "leasehold.worker.sandbox",
    "leasehold.worker.leases",
    "leasehold.worker.maintenance",
    "leasehold.worker.attempts",
    "leasehold.worker.claiming",
    "leasehold.worker",
    "leasehold.app",
    "leasehold.celery",
    "leasehold.testing",
    "leasehold.cli",
    "bench",
    "chaos",
    "mutants",
)
#: Neighbours above that know nothing of each other, although one stands in the list before the other.
APART = {("leasehold.worker", "leasehold.api")}
#: A kind of work stands alone: no other kind imports it.
KINDS = ("media", "conversion", "generation", "webhooks", "demo")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("leasehold", *parts) if parts[0] in LINKED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The longest room that the module lies in."""
    inside = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(inside, key=len, default=None)


@cache
def files(folder: str) -> tuple[Path, ...]:
    found = tuple(path for path in (ROOT / folder).rglob("*.py") if "drivers" not in path.parts)
    assert found, folder
    return found


@cache
def modules() -> frozenset[str]:
    return frozenset(name_of(path) for folder in FOLDERS for path in files(folder))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{name.name}" for name in node.names)
            yield from (name if name in modules() else node.module for name in whole)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_only(folder: str) -> None:
    wrong = [
        (name_of(path), imported)
        for path in files(folder)
        for imported in imports_of(path)
        if goes_up(name_of(path), imported)
    ]
    assert wrong == []


def goes_up(module: str, imported: str) -> bool:
    here, there = room_of(module), room_of(imported)
    if there is None or imported == "leasehold" or module == "leasehold":
        return False
    assert here is not None, f"{module} lies in no room of ROOMS"
    if here == there:
        return False
    apart = any(here.startswith(one) and there.startswith(other) for one, other in APART)
    return apart or ROOMS.index(there) > ROOMS.index(here)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither for types only nor inside of functions."""
    uses = {
        name_of(path): {imported for imported in imports_of(path) if imported in modules()} - {name_of(path)}
        for folder in FOLDERS
        for path in files(folder)
        if path.name != "__init__.py"
    }
    TopologicalSorter(uses).prepare()  # its CycleError names the modules of a circle


def test_every_room_says_what_it_is() -> None:
    """A folder's `__init__` says in a few lines what belongs there."""
    folders = {path.parent for folder in FOLDERS for path in files(folder)} - {ROOT / "migrations/versions"}
    silent = [str(folder.relative_to(ROOT)) for folder in folders if not says_something(folder / "__init__.py")]
    assert sorted(silent) == []


def says_something(init: Path) -> bool:
    return init.exists() and ast.get_docstring(ast.parse(init.read_text())) is not None


def test_a_kind_of_work_imports_no_other_kind() -> None:
    wrong = [
        (name_of(path), imported)
        for kind in KINDS
        for path in files(f"leasehold/pipelines/{kind}")
        for imported in imports_of(path)
        for other in KINDS
        if other != kind and imported.startswith(f"leasehold.pipelines.{other}")
    ]
    assert wrong == []


#: Rooms of the kinds themselves, and the one list of them.
OF_KINDS = ("leasehold.pipelines", *(f"leasehold.api.{kind}" for kind in ("media", "conversion", "generation")))
#: The core's only sentences with a kind in them, and why.
NAMES_A_KIND = {
    ("leasehold.cli.demo", "leasehold.pipelines.media.kinds"),  # the demo sends pictures: it is about this kind
    ("leasehold", "leasehold.pipelines.conversion.nef"),  # the public face offers the reader of packages
}


def test_the_core_imports_no_kind_of_work() -> None:
    """It reaches kinds by the hooks of leasehold.domain.kind alone, so that one from outside can do what ours can."""
    kinds = tuple(f"leasehold.{room}.{kind}" for room in ("pipelines", "api") for kind in KINDS)
    wrong = {
        (name_of(path), imported)
        for folder in ("leasehold", "api", "worker", "migrations")
        for path in files(folder)
        if not name_of(path).startswith(OF_KINDS)
        for imported in imports_of(path)
        if imported.startswith(kinds)
    }
    assert wrong == NAMES_A_KIND


def test_the_core_writes_no_statement_of_a_kind() -> None:
    """Their tables are read and written in their own rooms; what the core needs to know they say themselves."""
    tables = [
        found
        for kind in ("media", "conversion", "generation")
        for found in re.findall(r'= Table\(\s*"(\w+)"', (ROOT / f"leasehold/pipelines/{kind}/tables.py").read_text())
    ]
    assert len(tables) > 4
    statement = re.compile(rf"\b(FROM|INTO|UPDATE|JOIN)\s+({'|'.join(tables)})\b")
    wrong = [
        (name_of(path), found[0])
        for folder in ("leasehold", "api", "worker")
        for path in files(folder)
        if not name_of(path).startswith(OF_KINDS)
        for found in statement.finditer(path.read_text())
    ]
    assert wrong == []


def test_our_code_is_imported_by_one_name_only() -> None:
    """`import api` works in a checkout, too, and would make a second copy of every module."""
    wrong = [
        (str(path.relative_to(ROOT)), imported)
        for folder in (*FOLDERS, "tests", "grafana", "examples")
        for path in files(folder)
        for imported in imports_of(path)
        if imported.partition(".")[0] in {*LINKED, "pipelines", "embedded", "cli"}
    ]
    assert wrong == []


@pytest.mark.parametrize("link", LINKED)
def test_the_package_holds_the_folders_at_the_top(link: str) -> None:
    assert (ROOT / "leasehold" / link).resolve() == ROOT / link


def test_the_ground_floor_does_no_input_or_output() -> None:
    banned = {"asyncio", "asyncpg", "sqlalchemy", "aio_pika", "aiohttp", "fastapi", "socket", "subprocess"}
    wrong = [
        (name_of(path), imported)
        for path in files("leasehold/domain")
        for imported in imports_of(path)
        if imported.partition(".")[0] in banned
    ]
    assert wrong == []


def test_only_the_transitions_write_a_status() -> None:
    """No other module holds a statement that sets one."""
    writers = {"leasehold/transitions", "leasehold/broker/outbox.py", "migrations"}
    wrong = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in files(folder)
        if not any(str(path.relative_to(ROOT)).startswith(writer) for writer in writers)
        and any(f"update {table}" in path.read_text().lower() for table in ("job", "task"))
    ]
    assert wrong == []


def test_every_statement_of_a_transition_names_itself_and_no_other_has_its_name() -> None:
    """PostgreSQL's log, its views and `leasehold_database_slow_statements` tell of a statement by this name."""
    first = [
        (path, text)
        for path in files("leasehold")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and (text := _first_words(node.value))
    ]
    whole = re.compile(r"\s*\n(WITH|SELECT|INSERT|UPDATE|DELETE)\b")
    unnamed = [text for path, text in first if path.parent.name == "transitions" and whole.match(text)]
    assert unnamed == [], "write `-- name` above its first word"
    names = Counter(found[1] for _, text in first if (found := re.match(r"\s*-- ([a-z_]+)\n", text)))
    assert len(names) > 50
    assert [name for name, n in names.items() if n > 1] == []


def _first_words(value: ast.expr) -> str | None:
    """The string that the expression begins with, if it begins with one."""
    while isinstance(value, (ast.BinOp, ast.JoinedStr)):
        value = value.left if isinstance(value, ast.BinOp) else value.values[0]
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


@pytest.mark.parametrize("package", ["leasehold", "api", "worker"])
def test_what_runs_for_long_waits_by_timeout_and_not_by_wait_for(package: str) -> None:
    """Before Python 3.12 `asyncio.wait_for` loses a cancellation that comes with what it waits for."""
    short = ("embedded", "cli")  # servers of a machine, and commands
    found = [
        path for path in files(package) if "asyncio.wait_for(" in path.read_text() and path.parent.name not in short
    ]
    assert found == []


def test_a_declaration_loads_no_image_or_model_library() -> None:
    """The API imports declarations only, so that its image carries none."""
    light = [path for path in files("leasehold/pipelines") if path.name in ("pipeline.py", "kinds.py", "__init__.py")]
    heavy = {"PIL", "onnx", "onnxruntime", "numpy"}
    wrong = [(str(path), name) for path in light for name in imports_of(path) if name.partition(".")[0] in heavy]
    assert wrong == []


def test_nothing_is_skipped_without_saying_what_the_machine_lacks() -> None:
    """tests/support/not_here.py is the one way."""
    unannounced = re.compile(r"pytest\.(skip|importorskip|xfail)\b|mark\.(skip|skipif|xfail)\b|unittest\.skip")
    here, rule = Path(__file__), ROOT / "tests" / "support" / "not_here.py"
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if path not in (here, rule) and unannounced.search(path.read_text())
    ]
    assert found == []


def test_every_connection_of_the_platform_has_the_points_after_its_commits() -> None:
    """database.py makes them, through servers.py; they send statements by what WatchedConnection overrides."""
    opens = re.compile(r"asyncpg\.(connect|create_pool)\(|(?<!asyncio\.)open_connection\(")
    passes_by = re.compile(r"\.(prepare|cursor|fetchmany|copy_(records_)?(to|from)_[a-z]+)\(")
    only_reads = {"leasehold/embedded/postgres.py", "leasehold/broker/postgres.py"}  # is it up; LISTEN
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("leasehold", "api", "worker")
        for path in files(folder)
    }
    made_in = {"leasehold/db/database.py", "leasehold/db/servers.py"}
    assert {name for name, text in sources.items() if opens.search(text)} - only_reads == made_in
    copies = "leasehold/cli/moving_rows.py"  # into tables that nobody reads before a later commit, which has its point
    assert [name for name, text in sources.items() if passes_by.search(text)] == [copies]
