"""`leasehold` is what the reader's code imports, all of it, and importing it is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import leasehold
from leasehold import client

ROOT = Path(__file__).parents[2]
FACE = ast.parse((ROOT / "leasehold/__init__.py").read_text())
#: What a process that only declares its work has no use for.
HEAVY = {
    "aio_pika", "aiobotocore", "aiohttp", "aiormq", "alembic", "asyncpg", "botocore", "fastapi", "httpx2", "onnx",
    "PIL", "rich", "sqlalchemy", "starlette", "structlog", "typer", "uvicorn", "uvloop",
}  # fmt: skip
#: Public besides: what programs that only speak HTTP import, and Celery's names. `__all__` is what is promised.
BESIDES = ("leasehold.client", "leasehold.celery")
#: The reader's code, as it is printed and as it is run.
PRINTED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def typed() -> dict[str, str]:
    """The names that a type checker sees, with their modules."""
    (block,) = (node for node in FACE.body if isinstance(node, ast.If))
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def loaded_by(code: str) -> set[str]:
    """The top-level names of all modules that a fresh process has after `code`."""
    command = [sys.executable, "-P", "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_what_is_promised_is_what_a_type_checker_sees_and_what_is_there() -> None:
    assert set(leasehold.__all__) == typed().keys() == leasehold._MODULE_OF.keys()
    assert typed() == leasehold._MODULE_OF
    assert set(leasehold.__all__) <= set(dir(leasehold))


@pytest.mark.parametrize("name", leasehold.__all__)
def test_a_public_name_is_the_thing_itself(name: str) -> None:
    home = import_module(leasehold._MODULE_OF[name])
    assert getattr(leasehold, name) is getattr(home, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'leasehold' has no attribute 'Crew'"):
        leasehold.Crew  # noqa: B018 - asking is what is tried
    assert not hasattr(leasehold, "Crew")


def test_no_public_name_hides_a_folder_of_the_package() -> None:
    """`leasehold.worker` is a folder: after its import, Python would put it in the name's place."""
    folders = {path.name.removesuffix(".py") for path in (ROOT / "leasehold").iterdir()}
    assert folders & set(leasehold.__all__) == set()


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    ours = loaded_by("import leasehold") - loaded_by("")
    assert ours - set(sys.stdlib_module_names) == {"leasehold"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_declaring_a_pipeline_loads_no_driver_and_no_server(path: Path) -> None:
    """But what the example itself imports."""
    own = re.findall(r"^(?:from (?!leasehold)\S+ )?import (?!leasehold).+$", path.read_text(), re.MULTILINE)
    code = f"import os, sys; os.environ['SHOP_DATABASE_URL'] = 'postgresql:///x'; sys.path.append({str(ROOT)!r})"
    loaded = loaded_by(f"{code}; import examples.{path.stem}")
    assert (loaded & HEAVY) - loaded_by("\n".join(own)) == set()


def test_examples_and_pages_import_from_the_public_face_alone() -> None:
    texts = {path: path.read_text() for path in [*EXAMPLES, *PRINTED]}
    assert texts
    wrong = [
        (str(path.relative_to(ROOT)), found)
        for path, text in texts.items()
        for found in re.findall(r"^\s*(?:from|import) (leasehold\.\S+)", text, re.MULTILINE)
        if found not in BESIDES
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: page.name)
def test_what_a_page_calls_by_its_dotted_name_is_public(page: Path) -> None:
    """`leasehold.submit` in a sentence is a promise as good as an import."""
    named = set(re.findall(r"`leasehold\.([A-Za-z_.]+)", page.read_text()))
    other = {"pipelines"}  # the entry-point group of an installed package's own kinds
    if page.name == "kinds.md":  # a kind with rows of its own writes a job beside them, and works inside
        other |= {"transitions.limits.submit"}
    other |= {"celery", "client", *(f"client.{name}" for name in client.__all__)}
    assert {name for name in named if name not in leasehold.__all__} <= other


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "leasehold/py.typed").read_bytes() == b""


def test_our_own_code_does_not_go_through_the_public_face() -> None:
    """It would be a circle, and would load at start-up what the face leaves until it is asked for."""
    wrong = [
        str(path.relative_to(ROOT))
        for folder in ("leasehold", "api", "worker", "migrations")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*from leasehold import (?!nef\b)", path.read_text(), re.MULTILINE)
        and path != ROOT / "leasehold/__init__.py"
    ]
    assert wrong == []
