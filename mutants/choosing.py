"""Chooses the tests that judge a mutant, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mutants.covering import Covering
from mutants.importers import Importers
from mutants.mutant import Mutant
from mutants.places import ROOT, all_files
from mutants.siblings import Siblings
from mutants.source import Source
from mutants.uses import Uses, targets_of
from mutants.words import Words

#: Tests that judge no mutant, each with the reason.
LEFT_OUT = (
    "tests/transitions/test_statements.py",  # compares texts: it notices every change of a text, and proves nothing
    "tests/api/test_contract.py",  # sends random requests: it may miss a mutant today and notice it tomorrow
    "tests/packaging",  # compares the reference and the changelog with the code
    "tests/test_floors.py",
    "tests/mutants",
    "tests/chaos",  # has mutants of its own
    "tests/bench",
)
#: The tests that run first for a changed scope, and for a changed model of a request. They run none of the lines that
#: use the scope or the model: a request that is refused runs no line of the endpoint.
SCOPES, BOUNDS = "tests/security/test_scopes.py", "tests/api/test_bounds.py"
#: The beginning of a file's path -> the tests of the file itself, which run first.
FOLDERS = {
    "leasehold/transitions": ("tests/transitions", "tests/runs"),
    "leasehold/limits": ("tests/security/test_limits.py", "tests/runs/test_limits.py", "tests/api/test_uploads.py"),
    "leasehold/broker": ("tests/broker", "tests/unit"),
    "leasehold/storage": ("tests/storage",),
    "leasehold/security": ("tests/unit", "tests/security"),
    "leasehold/schedules": ("tests/runs/test_schedules.py",),
    "leasehold/pipelines/webhooks": ("tests/runs/test_webhooks.py",),
    "leasehold": ("tests/unit", "tests/transitions"),
    "worker": ("tests/worker", "tests/unit"),
    "api": ("tests/runs", "tests/api"),
}
#: A line that at most so many tests run is special: most of these tests are about its function.
_FEW_TESTS = 12
#: A name that more tests use may be that of several things.
_MANY_TESTS = 300
#: How many tests come early because they share words with the mutant.
_RELATED_TESTS = 20
#: The folder of tests without servers, and how many of them come first: twenty-five cost less than one other test.
UNIT, UNIT_TESTS = "tests/unit/", 25
#: The overhead of a test, in addition to its own seconds; and of one without servers.
_EACH_SECONDS, _EACH_UNIT_SECONDS = 0.1, 0.01
_PATIENCE_SECONDS, _PATIENCE_TIMES = 15.0, 4.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tests of one mutant. `tests`: node ids. `limits`: the seconds that each may take. `candidates`: how many
    tests could notice the mutant; some of them may exceed the budget.
    """

    tests: list[str]
    limits: list[float]
    candidates: int

    def divided(self, number: int) -> tuple[Chosen, Chosen]:
        """The first `number` tests, and the others."""
        first = Chosen(self.tests[:number], self.limits[:number], self.candidates)
        return first, Chosen(self.tests[number:], self.limits[number:], self.candidates)


class Choosing:
    """`killers`: id of a mutant -> the test that noticed it last time, which runs first. `siblings`: which tests
    noticed other mutants of the same code. `budget`: the seconds that all tests of one mutant may take; 0: no bound.
    """

    def __init__(self, covering: Covering, killers: Mapping[str, str], siblings: Siblings, budget: float) -> None:
        self._covering = covering
        self._killers = killers
        self._siblings = siblings
        self._budget = budget

    def learn(self, mutant: Mutant, test: str) -> None:
        """The test has noticed the mutant: it comes early for the mutants that follow."""
        self._siblings.add(mutant, test)

    def files(self) -> list[str]:
        """The files of all tests that may judge a mutant."""
        return sorted({test.partition("::")[0] for test in self._covering.seconds if judges(test)})

    @cached_property
    def _uses(self) -> Uses:
        folders = ("leasehold", "api", "worker")
        paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if not _is_linked(path)}
        return Uses(ROOT, sorted(str(path.relative_to(ROOT)) for path in paths))

    @cached_property
    def _importers(self) -> Importers:
        return Importers(ROOT, (test.partition("::")[0] for test in self._covering.seconds if judges(test)))

    @cached_property
    def _words(self) -> Words:
        return Words(ROOT, (test for test in self._covering.seconds if judges(test)))

    @cached_property
    def _sources(self) -> dict[str, Source]:
        return {path: Source(ROOT, path) for path in all_files()}

    def tests_for(self, mutant: Mutant) -> Chosen:
        seconds = self._covering.seconds
        first = self._first_file(mutant)
        first_tests = {test for test in seconds if first and test.startswith(first)}
        killer = self._killers.get(mutant.id, "")
        # The test that noticed the mutant the last time may run a line that is new since the coverage was measured.
        candidates = self._covering_tests(mutant) | first_tests | {killer}
        tests = self._in_order(mutant, {test for test in candidates if test in seconds and judges(test)}, first)
        chosen: list[str] = []
        total = 0.0
        for test in tests:
            if test == killer:
                chosen.append(test)  # it leaves the whole budget to others: it may have noticed the mutant by chance
                continue
            after = total + self._cost(test)
            if total and self._budget and after > self._budget:
                continue  # a shorter one may have room
            total = after
            chosen.append(test)
        return Chosen(chosen, [_PATIENCE_SECONDS + _PATIENCE_TIMES * seconds[test] for test in chosen], len(tests))

    def _cost(self, test: str) -> float:
        return self._covering.seconds[test] + (_EACH_UNIT_SECONDS if test.startswith(UNIT) else _EACH_SECONDS)

    def _in_order(self, mutant: Mutant, tests: set[str], first: str | None) -> list[str]:
        """Order by ten keys: the test that noticed the mutant last time first; then those of the file `first`; then
        unit tests, which cost nearly nothing; then those that noticed most other mutants of the function or constant,
        or else of the file; then tests that run special lines of the function; then those that share most words
        with the mutant; then those whose file imports the mutant's module; then those of the mutant's folders; then, of
        a test with parameters, the first set before further sets, which mostly notice the same mutants; then the
        fastest.
        """
        seconds, killer, special = self._covering.seconds, self._killers.get(mutant.id), self._special_tests(mutant)
        unit_tests = first_unit_tests(mutant.path, tests, seconds)
        seen_sets: Counter[str] = Counter()
        costs = {test: self._cost(test) for test in tests}
        of_siblings = {test: place for place, test in enumerate(self._siblings.likely(mutant, costs))}
        related = self._words.related(f"{mutant.scope} {mutant.change.about}", costs, _RELATED_TESTS)
        importers, near = self._importers.of(mutant.path), _folders(mutant.path)
        places: dict[str, tuple[bool, bool, bool, int, bool, bool, bool, bool, int, float]] = {}
        for test in sorted(tests, key=lambda test: seconds[test]):
            function = test.partition("[")[0]
            is_first = first is not None and test.startswith(first)
            early = (test != killer, not is_first, test not in unit_tests, of_siblings.get(test, len(of_siblings)))
            is_direct = test.partition("::")[0] in importers
            likely = (test not in special, test not in related, not is_direct, not test.startswith(near))
            places[test] = (*early, *likely, seen_sets[function], seconds[test])
            seen_sets[function] += 1
        return sorted(tests, key=lambda test: places[test])

    def _covering_tests(self, mutant: Mutant) -> set[str]:
        """The tests that use the changed constant, because its own lines run only when the module is loaded. If there
        are none, the tests that ran the changed lines; if there are none, those that ran the function; if there are
        none, those that ran any line of the file. A function that makes constants is run by the few tests that happened
        to load its module: those that use its constants come to them.
        """
        runners = self._runners(mutant)
        users = set() if self._is_in_function(mutant) else self._users(mutant)
        if self._makes_constants(mutant):
            users = runners | self._users(mutant)
        return (
            users
            or runners
            or self._covering.tests_of(mutant.path, self._function(mutant))
            or self._covering.tests_of_file(mutant.path)
        )

    def _first_file(self, mutant: Mutant) -> str | None:
        if mutant.change.kind == "another scope":
            return SCOPES
        return BOUNDS if mutant.path.startswith("api/") and not self._is_in_function(mutant) else None

    def _is_in_function(self, mutant: Mutant) -> bool:
        """False: the changed line runs when the module is loaded, whichever test does this."""
        return mutant.lines[0] in self._sources[mutant.path].lines_in_functions

    def _runners(self, mutant: Mutant) -> set[str]:
        first, last = mutant.lines
        return self._covering.tests_of(mutant.path, range(first, last + 1))

    def _makes_constants(self, mutant: Mutant) -> bool:
        """Whether the mutant's function runs when a module is loaded, to make a constant."""
        is_called = self._is_in_function(mutant) and self._uses.makes_constants(mutant.scope)
        return is_called and len(self._runners(mutant)) <= _FEW_TESTS

    def _special_tests(self, mutant: Mutant) -> set[str]:
        if not self._is_in_function(mutant) or self._makes_constants(mutant):
            return set()
        tests_of_lines = [self._covering.tests_of(mutant.path, [line]) for line in self._function(mutant)]
        return {test for tests in tests_of_lines if len(tests) <= _FEW_TESTS for test in tests}

    def _users(self, mutant: Mutant) -> set[str]:
        """The tests that run a line which uses the mutant's constant, or a constant that its function makes."""
        owner, _, name = mutant.scope.rpartition(".")  # of a field, the class
        names = self._together(mutant) if mutant.scope == "module" else [name]
        lines = owner and self._uses.lines_using(owner.rpartition(".")[2])
        lines = lines or {line for one in names for line in self._uses.lines_using(one)}
        users = {test for path, line in lines for test in self._covering.tests_of(path, [line])}
        # Only the tests of its file, if there are any: a file of constants runs in no test.
        near = users & self._covering.tests_of_file(mutant.path) if len(users) > _MANY_TESTS else set()
        return near if len(near) > _FEW_TESTS else users

    def _together(self, mutant: Mutant) -> list[str]:
        """The constants that one statement assigns together: `A, B = 1, 2` is in the scope of none of them."""
        statements = self._sources[mutant.path].tree.body
        around = [one for one in statements if one.lineno <= mutant.lines[0] <= (one.end_lineno or one.lineno)]
        return [name for statement in around for name in targets_of(statement)]

    def _function(self, mutant: Mutant) -> range:
        """The lines of the mutant's function, without its `def`."""
        scopes = [(first, last) for first, last, name in self._sources[mutant.path].scopes if name == mutant.scope]
        return range(scopes[-1][0] + 1, scopes[-1][1] + 1) if scopes else range(0)


def _folders(path: str) -> tuple[str, ...]:
    beginnings = [beginning for beginning in FOLDERS if path.startswith(beginning)]
    return FOLDERS[max(beginnings, key=len)] if beginnings else ()


def first_unit_tests(path: str, tests: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """The unit tests among `tests` that come first: those of the file `test_NAME.py` of NAME.py, then the fastest."""
    own_file = f"{UNIT}test_{Path(path).stem}.py"
    unit_tests = [test for test in tests if test.startswith(UNIT)]
    unit_tests.sort(key=lambda test: (not test.startswith(own_file), seconds[test]))
    return set(unit_tests[:UNIT_TESTS])


def judges(test: str) -> bool:
    """Whether the test may judge mutants."""
    return not test.startswith(LEFT_OUT) and (ROOT / test.partition("::")[0]).exists()


def _is_linked(path: Path) -> bool:
    """Whether the path leads through a link: then the file also has a path without a link."""
    return any(parent.is_symlink() for parent in path.parents)
