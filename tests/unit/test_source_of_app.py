"""An app and its tasks have names by which other processes can import them, also those of a script."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leasehold import App
from leasehold.app.program import check_program, importable_name, source_of
from leasehold.domain.errors import DeclarationError

#: What `multiprocessing` names the program in its processes. Python's own name for it would do, but is pytest's here.
MAIN = "__mp_main__"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module of a program. Python finds modules in `tmp_path`."""
    module = ModuleType(MAIN)
    monkeypatch.setitem(sys.modules, MAIN, module)
    monkeypatch.syspath_prepend(tmp_path)
    return module


def test_an_app_is_found_also_while_the_import_of_some_module_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test blocks an import by None in `sys.modules`. The app has no tasks, so all modules are searched."""
    module = ModuleType("late_module")
    app = App("late")
    vars(module).update(found=app, __hidden=app)
    monkeypatch.setitem(sys.modules, "blocked_module", None)
    monkeypatch.setitem(sys.modules, "late_module", module)
    assert source_of(app) == "late_module:found"


def test_an_app_that_no_module_has_is_refused() -> None:
    with pytest.raises(DeclarationError, match="nowhere is not a global variable of a module, so no other"):
        source_of(App("nowhere"))


def test_an_app_of_the_program_alone_is_found_by_the_programs_name(main: Any, tmp_path: Path) -> None:
    main.app = App("shop")
    with pytest.raises(DeclarationError, match="no other process can import the program of the app shop: put the"):
        source_of(main.app)
    (tmp_path / "shop_of_mine.py").touch()
    main.__file__ = str(tmp_path / "shop_of_mine.py")
    assert source_of(main.app) == "shop_of_mine:app"


def test_the_module_that_makes_the_app_comes_before_others_that_have_it(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_mine.py").touch()
    main.__file__ = str(tmp_path / "shop_of_mine.py")
    (tmp_path / "maker_of_app.py").write_text("from leasehold import App\napp = App('made')")
    other: Any = ModuleType("other_with_app")
    monkeypatch.setitem(sys.modules, "other_with_app", other)
    monkeypatch.delitem(sys.modules, "maker_of_app", raising=False)
    maker: Any = importlib.import_module("maker_of_app")
    main.app = other.app = maker.app
    assert source_of(maker.app) == "maker_of_app:app"
    del maker.app
    assert source_of(main.app) == "other_with_app:app"
    del sys.modules["maker_of_app"]


def test_a_script_has_the_name_by_which_python_finds_its_file(main: Any, tmp_path: Path) -> None:
    assert importable_name("shop.tasks") == "shop.tasks"
    assert importable_name(MAIN) is None  # as in `python -c`
    for file in ("shop_of_mine.py", "elsewhere/shop_of_mine.py", "no_module", "broken.shop.py", "json.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "broken.py").write_text("raise RuntimeError('it is no package of the script')")
    (tmp_path / "link").symlink_to(tmp_path / "shop_of_mine.py")
    names = {"shop_of_mine.py": "shop_of_mine", "link": "shop_of_mine"}
    for file in ("shop_of_mine.py", "link", "elsewhere/shop_of_mine.py", "no_module", "broken.shop.py", "json.py"):
        main.__file__ = str(tmp_path / file)
        assert importable_name(MAIN) == names.get(file), file


def test_a_module_that_is_run_keeps_its_name(main: Any) -> None:
    for name, importable in (("shop.tasks", "shop.tasks"), ("shop.__main__", "shop.__main__"), ("__main__", None)):
        main.__spec__ = ModuleSpec(name, None)  # "__main__": a folder or an archive
        assert importable_name(MAIN) == importable


@pytest.mark.parametrize(
    ("source", "is_guarded"),
    [
        ("if __name__ == '__main__':\n    run()", True),
        ("if '__main__' == __name__: run()", True),
        ("__name__ == '__main__' and run()", True),
        ("def f(:", True),  # nobody knows
        ("log(__name__)\nif name == 'x':\n    run()", False),
        ("run()", False),
    ],
)
def test_a_program_that_runs_when_it_is_imported_is_refused(
    main: Any, tmp_path: Path, source: str, is_guarded: bool
) -> None:
    file = tmp_path / "shop_of_mine.py"
    file.write_text(source)
    main.__file__ = str(file)
    check_program(["shop.tasks"])
    if is_guarded:
        check_program(["shop_of_mine"])
    else:
        with pytest.raises(DeclarationError, match=r"shop_of_mine.py serves its app when it is imported"):
            check_program(["shop.tasks", "shop_of_mine"])
