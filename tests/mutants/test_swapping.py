"""A mutant in loaded modules does what it does in a process that loads the changed file, or it is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mutants.swapping import CannotSwapError, Loaded

BASE = """
MOST = 3
LOCK = "FOR UPDATE"
NAMES = ("a", "b")
seen = []

def locked(text, lock=LOCK):
    return f"{text} {LOCK}"

def doubled(number):
    return 2 * number

def within(number, most=3):
    def is_less():
        return number < MOST
    return is_less() and number <= most

class Room:
    places = 4

    def __init__(self, used):
        self.used = used

    @property
    def free(self):
        return [place - self.used for place in [4]][0]

class Empty:
    def __init__(self):
        self.size = 1
"""
USER = """
from swapped.base import NAMES, Empty, doubled, within, locked as with_lock
from swapped import base

CLAIM = with_lock("SELECT 1")
ALL = f"{CLAIM}; {CLAIM}"
LONG = base.MOST + 1
TABLE = {name: doubled for name in NAMES}
EMPTY = Empty()

def claim():
    return CLAIM
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    folder = tmp_path / "swapped"
    folder.mkdir()
    for name, text in (("__init__", ""), ("base", BASE), ("user", USER)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: importlib.import_module(f"swapped.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "swapped"]:
        del sys.modules[name]


@pytest.fixture
def swap(tmp_path: Path, modules: Callable[[str], ModuleType]) -> Callable[[str, str], None]:
    modules("user")
    loaded = Loaded(tmp_path, ["swapped"])

    def swap(before: str, after: str) -> None:
        assert before in BASE
        loaded.swap("swapped.base", BASE, BASE.replace(before, after, 1))

    return swap


def test_a_changed_function_is_changed_wherever_somebody_has_it(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType]
) -> None:
    held, user = modules("base").doubled, modules("user")
    swap("2 * number", "3 * number")
    assert [one(5) for one in (held, user.doubled, user.TABLE["b"])] == [15, 15, 15]


@pytest.mark.parametrize(
    ("before", "after", "free"), [("place - self", "place + self", 6), ("in [4]", "in [9]", 7)], ids=["inner", "own"]
)
def test_a_property_of_an_object_that_exists_is_changed(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType], before: str, after: str, free: int
) -> None:
    room = modules("base").Room(2)
    assert room.free == 2
    swap(before, after)
    assert room.free == free


def test_a_function_in_a_function_is_changed(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType]
) -> None:
    user = modules("user")
    assert not user.within(3)
    swap("number < MOST", "number <= MOST")
    assert user.within(3)


def test_a_constant_is_changed_in_every_module_that_imported_it_and_so_is_what_was_made_from_it(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType]
) -> None:
    base, user = modules("base"), modules("user")
    swap('("a", "b")', '("a",)')
    assert (base.NAMES, user.NAMES, list(user.TABLE)) == (("a",), ("a",), ["a"])
    swap("MOST = 3", "MOST = 4")
    assert (base.within(3), user.LONG) == (True, 5)


def test_what_a_changed_function_made_while_its_users_were_loaded_is_made_anew(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType]
) -> None:
    user = modules("user")
    swap('f"{text} {LOCK}"', 'f"{text}"')
    assert (user.CLAIM, user.ALL, user.claim()) == ("SELECT 1", "SELECT 1; SELECT 1", "SELECT 1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("places = 4", "places = 5"),
        ("most=3", "most=4"),
        ('LOCK = "FOR UPDATE"', 'LOCK = ""'),
        ("seen = []", "seen = [object()]"),
        ("self.size = 1", "self.size = 2"),
        ("MOST = 3\n", ""),
    ],
    ids=["a class", "a default", "what a default uses", "a list", "an object that exists", "a statement less"],
)
def test_what_cannot_be_repeated_is_refused(swap: Callable[[str, str], None], before: str, after: str) -> None:
    with pytest.raises(CannotSwapError):
        swap(before, after)


def test_a_changed_layout_changes_nothing(
    swap: Callable[[str, str], None], modules: Callable[[str], ModuleType]
) -> None:
    before = {name: value for name, value in vars(modules("user")).items() if name.isupper()}
    swap("\nMOST = 3", "\n\n# three\nMOST = (3)")
    assert {name: value for name, value in vars(modules("user")).items() if name.isupper()} == before
    assert not modules("base").within(3)
