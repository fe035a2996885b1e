"""The testing kit finds the module of an app, so that other processes can import it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from leasehold import App
from leasehold.domain.errors import DeclarationError
from leasehold.testing.harness import source_of


def test_an_app_is_found_also_while_the_import_of_some_module_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test blocks an import by None in `sys.modules`. The app has no tasks, so all modules are searched."""
    module = ModuleType("late_module")
    app = App("late")
    vars(module).update(found=app, __hidden=app)
    monkeypatch.setitem(sys.modules, "blocked_module", None)
    monkeypatch.setitem(sys.modules, "late_module", module)
    assert source_of(app) == "late_module:found"


def test_an_app_that_no_module_has_is_refused() -> None:
    with pytest.raises(DeclarationError, match="no other process can import it"):
        source_of(App("nowhere"))
