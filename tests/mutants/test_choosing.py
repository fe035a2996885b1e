"""Which tests judge a mutant."""

from __future__ import annotations

from pathlib import Path

from mutants.choosing import UNIT, UNIT_TESTS, Choosing, first_unit_tests
from mutants.covering import Covering
from mutants.importers import Importers
from mutants.mutant import Change, Mutant
from mutants.places import ROOT, mutants
from mutants.siblings import Siblings
from mutants.source import Source
from mutants.uses import Uses, targets_of
from mutants.words import Words

ROUTES = """
SCOPE = "read"
Reader = Annotated[Caller, Require(SCOPE)]
LIMIT = 5


@router.get("/")
async def answer(caller: Reader, limit: int = LIMIT) -> None:
    first = 1
    return first


def other() -> None:
    return None
"""


def test_a_constant_is_used_by_the_functions_whose_parameters_name_it(tmp_path: Path) -> None:
    """FastAPI calls what an annotation names, and the line of the parameters runs when the module is loaded."""
    (tmp_path / "routes.py").write_text(ROUTES)
    uses = Uses(tmp_path, ["routes.py"])
    body = {("routes.py", 9), ("routes.py", 10)}
    assert uses.lines_using("Reader") == uses.lines_using("LIMIT") == body
    assert uses.lines_using("other") == set()


def test_constants_that_are_assigned_together_are_used_where_each_of_them_is(tmp_path: Path) -> None:
    (tmp_path / "bounds.py").write_text(
        "LEAST, _MOST = 1, 2\n_BOTH = (LEAST, 5)\n\n\n"
        "def least() -> int:\n    return LEAST\n\n\ndef most() -> int:\n    return _MOST\n\n\n"
        "def both() -> tuple[int, int]:\n    return _BOTH\n"
    )
    uses = Uses(tmp_path, ["bounds.py"])
    (together, *_) = Source(tmp_path, "bounds.py").tree.body
    assert targets_of(together) == ["LEAST", "_MOST"]
    assert uses.lines_using("LEAST") == {("bounds.py", 6), ("bounds.py", 14)}
    assert uses.lines_using("_MOST") == {("bounds.py", 10)}


def test_a_line_of_a_function_s_body_is_told_from_those_that_run_when_the_module_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "routes.py").write_text(ROUTES)
    source = Source(tmp_path, "routes.py")
    assert source.lines_in_functions == {9, 10, 14}


def test_a_test_that_names_what_a_mutant_changes_is_related_to_it(tmp_path: Path) -> None:
    """A word that all tests have tells nothing, and of a test with parameters one set is enough."""
    (tmp_path / "test_it.py").write_text(
        "def test_a_paused_queue(): assert claim()\n"
        "def test_a_claim(): assert claim()\n"
        "def test_a_queue(): assert claim(paused=1)\n"
        "def test_it(): set_to(1)\n"
    )
    tests = [
        f"test_it.py::test_{name}" for name in ("a_paused_queue[1]", "a_paused_queue[2]", "a_claim", "a_queue", "it")
    ]
    words = Words(tmp_path, tests)
    seconds = dict.fromkeys(tests, 1.0)
    related = words.related("SELECT 1 FROM paused_queues", seconds, 2)
    assert related == {"test_it.py::test_a_paused_queue[1]", "test_it.py::test_a_queue"}
    assert words.related("nothing", seconds, 2) == set()
    assert words.related("act left out: set_to(it)", seconds, 2) == {"test_it.py::test_it"}
    slow = seconds | {"test_it.py::test_a_paused_queue[1]": 60.0}
    assert words.related("SELECT 1 FROM paused_queues", slow, 1) == {"test_it.py::test_a_queue"}


def test_a_constant_that_a_function_puts_into_another_one_is_used_where_that_is(tmp_path: Path) -> None:
    """The function runs only when the module is loaded, and not in a test."""
    (tmp_path / "statements.py").write_text(
        "COLUMNS = ('a', 'b')\n\ndef listed():\n    return ', '.join(COLUMNS)\n\nREAD = f'SELECT {listed()}'\n"
        "\ndef read(connection):\n    return connection.fetch(READ)\n\ndef unrelated():\n    return listed\n"
    )
    uses = Uses(tmp_path, ["statements.py"])
    assert ("statements.py", 9) in uses.lines_using("COLUMNS")
    assert [uses.makes_constants(name) for name in ("listed", "read", "unrelated")] == [True, False, False]


def test_tests_that_noticed_most_mutants_of_the_code_a_second_are_likely_to_notice_its_next_one() -> None:
    def mutant(path: str, scope: str) -> Mutant:
        return Mutant("", path, scope, (1, 1), Change("", "", ()))

    claim, poll, elsewhere = mutant("claims.py", "CLAIM"), mutant("claims.py", "POLL"), mutant("sweeps.py", "CLAIM")
    siblings = Siblings([(claim, "often"), (claim, "often"), (claim, "slow"), (poll, "of the file"), (poll, "often")])
    costs = {"often": 1.0, "slow": 1.0, "of the file": 0.1, "never": 0.1}
    assert siblings.likely(claim, costs) == ["often", "slow", "of the file"]
    assert siblings.likely(poll, costs) == ["of the file", "often", "slow"]
    assert siblings.likely(elsewhere, costs) == []
    for _ in range(3):
        siblings.add(claim, "slow")
    assert siblings.likely(claim, costs)[0] == "slow"
    assert siblings.likely(claim, costs | {"slow": 10.0})[0] == "often"
    assert siblings.likely(claim, {"never": 0.1}) == []


def test_unit_tests_come_first_those_of_the_files_own_name_before_the_fastest() -> None:
    """Twenty-five of them cost less than one test with a database."""
    own = [f"{UNIT}test_backoff.py::test_{number}" for number in range(3)]
    fast = [f"{UNIT}test_other.py::test_{number:02}" for number in range(40)]
    seconds = dict.fromkeys(own, 1.0) | {test: number / 1000 for number, test in enumerate(fast)}
    tests = {*own, *fast, "tests/worker/test_backoff.py::test_1"}
    first = first_unit_tests("leasehold/domain/backoff.py", tests, seconds)
    assert first == {*own, *fast[: UNIT_TESTS - 3]}


def test_the_test_that_noticed_a_mutant_last_time_comes_first_and_leaves_the_others_their_time() -> None:
    """It may have noticed the mutant by chance. One that takes longer than the budget was then the only one."""
    path = "leasehold/domain/backoff.py"
    mutant = mutants(only=path)[0]
    slow, quick, long = [f"tests/unit/test_backoff.py::test_{name}" for name in ("slow", "quick", "long")]
    lines = {path: {line: [slow, quick, long] for line in range(1, 200)}}
    covering = Covering({slow: 60.0, quick: 1.0, long: 9.5}, lines, {path: (ROOT / path).read_text()})
    for killers, expected in (({mutant.id: slow}, [slow, quick]), ({}, [quick])):
        assert Choosing(covering, killers, Siblings(), 10.0).tests_for(mutant).tests == expected


def test_the_test_that_noticed_a_mutant_last_time_judges_it_although_its_line_was_not_measured() -> None:
    """The line has changed since, and the coverage knows the lines that it had."""
    path = "leasehold/domain/backoff.py"
    mutant = mutants(only=path)[0]
    killer, other, gone = [f"tests/unit/test_backoff.py::test_{name}" for name in ("killer", "other", "gone")]
    lines = {path: {line: [other] for line in range(1, 200)}}
    covering = Covering({killer: 1.0, other: 1.0}, lines, {path: (ROOT / path).read_text()})
    for known, expected in ((killer, [killer, other]), (gone, [other])):
        assert Choosing(covering, {mutant.id: known}, Siblings(), 10.0).tests_for(mutant).tests == expected


def test_tests_whose_file_imports_a_module_are_about_it(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("from leasehold.worker.maintenance.relay import Relay\n")
    (tmp_path / "test_b.py").write_text("def test():\n    from leasehold.transitions import sweeps\n")
    (tmp_path / "test_c.py").write_text("import leasehold.transitions.sweeps as s, os\nfrom . import conftest\n")
    importers = Importers(tmp_path, ["test_a.py", "test_b.py", "test_c.py"])
    assert importers.of("worker/maintenance/relay.py") == {"test_a.py"}
    assert importers.of("leasehold/transitions/sweeps.py") == {"test_b.py", "test_c.py"}
    assert importers.of("leasehold/transitions/__init__.py") == {"test_b.py"}
    assert importers.of("leasehold/domain/backoff.py") == set()


def test_tests_of_a_package_are_tests_of_the_modules_whose_names_it_passes_on(tmp_path: Path) -> None:
    (tmp_path / "leasehold/claims").mkdir(parents=True)
    (tmp_path / "leasehold/claims/__init__.py").write_text("from leasehold.claims.by_poll import poll\n")
    (tmp_path / "test_a.py").write_text("from leasehold.claims import poll\n")
    importers = Importers(tmp_path, ["test_a.py"])
    assert importers.of("leasehold/claims/by_poll.py") == {"test_a.py"}
    assert importers.of("leasehold/claims/marking.py") == set()
