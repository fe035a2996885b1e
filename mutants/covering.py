"""Which tests run a line, and how long each takes: measured once (`scripts/mutants --measure`), kept in the cache."""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import coverage

from mutants.places import ROOT


class Covering:
    """`seconds`: of each test that passed when the coverage was measured."""

    def __init__(
        self, seconds: dict[str, float], lines: dict[str, dict[int, list[str]]], texts: dict[str, str]
    ) -> None:
        self.seconds = seconds
        self._lines = lines
        self._texts = texts
        self._now = cache(self._lines_now)

    def tests_of(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that ran one of the lines, as the file lies there now."""
        covered = self._now(path)
        return {test for line in lines for test in covered.get(line, ())}

    def tests_of_file(self, path: str) -> set[str]:
        return {test for tests in self._now(path).values() for test in tests}

    def _lines_now(self, path: str) -> dict[int, list[str]]:
        """Lines of a file that has changed since are found again by their text."""
        measured, then = self._lines.get(path, {}), self._texts.get(path)
        now = (ROOT / path).read_text()
        if then is None or then == now:
            return measured
        moved = difflib.SequenceMatcher(None, then.splitlines(), now.splitlines(), autojunk=False)
        return {
            new + n + 1: measured[old + n + 1]
            for old, new, size in moved.get_matching_blocks()
            for n in range(size)
            if old + n + 1 in measured
        }

    def renewed_by(self, newer: Covering) -> Covering:
        """This one, with the tests that `newer` measured as it has them, and all lines as they lie now."""
        lines = {}
        paths = [path for path in self._lines.keys() | newer._lines.keys() if (ROOT / path).exists()]
        for path in paths:
            mine, others = self._now(path), newer._now(path)
            lines[path] = {
                line: sorted(
                    {test for test in mine.get(line, ()) if test not in newer.seconds} | {*others.get(line, ())}
                )
                for line in mine.keys() | others.keys()
            }
        return Covering(self.seconds | newer.seconds, lines, {path: (ROOT / path).read_text() for path in paths})

    def save(self, file: Path) -> None:
        names = {test: n for n, test in enumerate(sorted(self.seconds))}
        lines = {
            path: {line: [names[test] for test in tests if test in names] for line, tests in covered.items()}
            for path, covered in self._lines.items()
        }
        told = {"tests": sorted(self.seconds.items()), "lines": lines, "texts": self._texts}
        file.write_bytes(gzip.compress(json.dumps(told).encode()))

    @classmethod
    def load(cls, file: Path) -> Covering:
        told = json.loads(gzip.decompress(file.read_bytes()))
        names = [test for test, _ in told["tests"]]
        lines = {
            path: {int(line): [names[n] for n in tests] for line, tests in covered.items()}
            for path, covered in told["lines"].items()
        }
        return cls(dict(told["tests"]), lines, told["texts"])


def collected(data: Path, tree: Path) -> Covering:
    """What the processes of a measured run of `tree` wrote below the name `data`."""
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for file in data.parent.glob(f"{data.name}.tests.*.json"):
        told = json.loads(file.read_text())
        seconds |= told["seconds"]
        failed |= set(told["failed"])
    measured = coverage.Coverage(data_file=str(data), config_file=False, messages=False)
    measured.combine([str(file) for file in data.parent.glob(f"{data.name}.*") if file.suffix != ".json"], keep=True)
    passed = {test: took for test, took in seconds.items() if test not in failed}
    lines, texts = {}, {}
    for name in measured.get_data().measured_files():
        path = str(Path(name).relative_to(tree))
        covered = measured.get_data().contexts_by_lineno(name)
        lines[path] = {line: sorted(set(tests) & passed.keys()) for line, tests in covered.items()}
        texts[path] = Path(name).read_text()
    return Covering(passed, lines, texts)
