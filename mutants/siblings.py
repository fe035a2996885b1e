"""Which tests noticed other mutants of the same code: they mostly notice its further mutants, too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from mutants.mutant import Mutant

#: How many tests come early because they noticed a mutant of the same function or constant, or of the same file.
_OF_SCOPE, _OF_FILE = 8, 4


class Siblings:
    """`noticed`: mutants, each with the test that noticed it."""

    def __init__(self, noticed: Iterable[tuple[Mutant, str]] = ()) -> None:
        self._of_scope: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._of_file: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for mutant, test in noticed:
            self.add(mutant, test)

    def add(self, mutant: Mutant, test: str) -> None:
        self._of_scope[mutant.path, mutant.scope][test] += 1
        self._of_file[mutant.path][test] += 1

    def likely(self, mutant: Mutant, costs: Mapping[str, float]) -> list[str]:
        """Those tests of `costs` (the seconds of each) that noticed most mutants of the same function or constant a
        second, and then those that noticed most of the same file.
        """
        of_scope = _most(self._of_scope[mutant.path, mutant.scope], costs, _OF_SCOPE)
        others = {test: seconds for test, seconds in costs.items() if test not in of_scope}
        return of_scope + _most(self._of_file[mutant.path], others, _OF_FILE)


def _most(counts: Counter[str], costs: Mapping[str, float], number: int) -> list[str]:
    rates = {test: counts[test] / seconds for test, seconds in costs.items() if counts[test]}
    return sorted(rates, key=lambda test: (-rates[test], test))[:number]
