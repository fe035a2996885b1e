"""Imports go down only: leasehold, pipelines, then api and worker side by side, cli, bench; chaos above all."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("leasehold", "pipelines", "api", "worker", "migrations", "embedded", "cli", "bench", "chaos")
#: package -> the packages of ours that it may import.
MAY_IMPORT = {
    "leasehold": {"leasehold"},
    "embedded": {"embedded", "leasehold"},
    "migrations": {"migrations", "leasehold"},
    "pipelines": {"pipelines", "leasehold"},
    "api": {"api", "pipelines", "leasehold"},
    "worker": {"worker", "pipelines", "leasehold"},
    "cli": set(PACKAGES) - {"bench", "chaos"},
    "bench": set(PACKAGES) - {"chaos"},
    "chaos": set(PACKAGES),
}
#: Inside leasehold: the pure floor knows nothing of what does input or output.
PURE = {"states", "errors", "verdicts", "work", "attempt", "lease", "ids", "backoff", "pipeline", "registry", "keys"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.partition(".")[0] in PACKAGES and name.partition(".")[0] not in MAY_IMPORT[package]
    ]
    assert wrong == []


def test_the_pure_floor_of_leasehold_imports_only_itself() -> None:
    wrong = [
        (name, imported)
        for name in PURE
        for imported in imports_of(ROOT / "leasehold" / f"{name}.py")
        if imported.startswith("leasehold") and imported.partition(".")[2] not in PURE
    ]
    assert wrong == []


def test_only_the_transitions_write_a_status() -> None:
    """No other module holds a statement that sets one."""
    writers = {"leasehold/transitions", "leasehold/broker/outbox.py", "migrations"}
    wrong = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not any(str(path.relative_to(ROOT)).startswith(writer) for writer in writers)
        and any(f"update {table}" in path.read_text().lower() for table in ("job", "task"))
    ]
    assert wrong == []


def test_every_statement_of_a_transition_names_itself_and_no_other_has_its_name() -> None:
    """PostgreSQL's log, its views and `leasehold_database_slow_statements` tell of a statement by this name."""
    first = [
        (path, text)
        for path in (ROOT / "leasehold").rglob("*.py")
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
    assert [path for path in (ROOT / package).rglob("*.py") if "wait_for(" in path.read_text()] == []


def test_a_declaration_loads_no_image_or_model_library() -> None:
    """The API imports declarations only, so that its image carries none."""
    light = [
        path for path in (ROOT / "pipelines").rglob("*.py") if path.name in ("pipeline.py", "kinds.py", "__init__.py")
    ]
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
