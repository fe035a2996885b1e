"""Finds the tests that are about a mutant by their words and names: a test that names the queue that is paused is more
likely to notice a mutant of `paused_queue` than a test that only runs the same statement.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from heapq import nlargest
from pathlib import Path

#: `cancel`, `cancels` and `cancelling` are one word.
_STEM = 6
_WORD = re.compile(r"[a-z]{4,}")
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


class Words:
    """The words of all `tests` (node ids): of the name and the code of each test. `root`: the checkout."""

    def __init__(self, root: Path, tests: Iterable[str]) -> None:
        self._root = root
        self._tests = {test: self._words_of(test.partition("[")[0]) for test in tests}
        self._number_of_tests = Counter(word for words in self._tests.values() for word in words)

    def related(self, text: str, tests: Mapping[str, float], number: int) -> set[str]:
        """The `number` of `tests` that share most words with the text, of each function one. A word that few tests have
        counts more, and so does a test that costs less. `tests`: node id -> cost in seconds, above 0.
        """
        wanted = _stems(text)
        weight_of = {word: 1 / self._number_of_tests[word] for word in wanted if word in self._number_of_tests}

        def weight(test: str) -> float:
            shared = sum(weight_of[word] for word in self._tests[test] & weight_of.keys())
            return shared / tests[test]

        one_of_each = {test.partition("[")[0]: test for test in sorted(tests, reverse=True)}.values()
        return {test for test in nlargest(number, one_of_each, key=weight) if weight(test)}

    def _words_of(self, function: str) -> frozenset[str]:
        path, _, name = function.partition("::")
        return _stems(name) | self._words_of_functions(path).get(name.rpartition("::")[2], frozenset())

    @cache  # noqa: B019 - as long as the process lives
    def _words_of_functions(self, path: str) -> dict[str, frozenset[str]]:
        text = (self._root / path).read_text()
        lines = text.splitlines()
        return {
            node.name: _stems("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }


def _stems(text: str) -> frozenset[str]:
    """The words in lower case (keywords of SQL are in upper case), and whole names such as `set_tenant`."""
    return frozenset([*(word[:_STEM] for word in _WORD.findall(text)), *_NAME.findall(text)])
