"""`scripts/first-run` types what the README says; tests/packaging/test_wheel.py runs the wheel itself."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from examples import shop

ROOT = Path(__file__).parents[2]


@pytest.fixture
def first_run() -> ModuleType:
    spec = spec_from_file_location("first_run", ROOT / "scripts/first_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_types_what_the_readme_says(first_run: ModuleType) -> None:
    readme = first_run.instructions()
    assert readme.code in Path(shop.__file__).read_text()
    assert readme.extras == "[embedded]"
    compile(readme.submission, "the submission", "exec")
    assert readme.output == shop.send_receipt.local(17, "me@home")


def test_a_readme_of_another_shape_is_an_error(first_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "README", first_run.README.replace("leasehold dev shop:app", "leasehold up"))
    with pytest.raises(SystemExit, match="another shape"):
        first_run.instructions()


def test_a_readme_that_uv_does_not_follow_is_an_error(first_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "README", first_run.README.replace("`uv pip install 'leasehold[embedded]'`", "`uv`"))
    with pytest.raises(SystemExit, match="another shape"):
        first_run.instructions()


def test_settings_and_caches_of_the_caller_stay_outside(first_run: ModuleType) -> None:
    names = ("PATH", "HOME", "PIP_INDEX_URL", "LEASEHOLD_DATABASE_URL", "VIRTUAL_ENV", "PYTHONPATH")
    assert [name for name in names if first_run.VARIABLES_OF_A_SHELL.fullmatch(name)] == [
        "PATH",
        "HOME",
        "PIP_INDEX_URL",
    ]
