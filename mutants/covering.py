"""The coverage: which tests run a line, and how long each test takes. `scripts/mutants --measure` measures it once, and
writes it into the cache.
"""

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
    """`seconds`: test -> its seconds, for each test that passed when the coverage was measured. `lines`: path -> line
    -> tests. `texts`: path -> the file's text at that time.
    """

    def __init__(
        self, seconds: dict[str, float], lines: dict[str, dict[int, list[str]]], texts: dict[str, str]
    ) -> None:
        self.seconds = seconds
        self._lines = lines
        self._texts = texts
        self._present_lines = cache(self._match_lines)

    def tests_of(self, path: str, lines: Iterable[int]) -> set[str]:
        """The tests that ran one of these lines of the present file."""
        covered = self._present_lines(path)
        return {test for line in lines for test in covered.get(line, ())}

    def tests_of_file(self, path: str) -> set[str]:
        return {test for tests in self._present_lines(path).values() for test in tests}

    def _match_lines(self, path: str) -> dict[int, list[str]]:
        """The lines of the present file with their tests. Lines of a changed file are matched by their text."""
        measured, measured_text = self._lines.get(path, {}), self._texts.get(path)
        present_text = (ROOT / path).read_text()
        if measured_text is None or measured_text == present_text:
            return measured
        matcher = difflib.SequenceMatcher(None, measured_text.splitlines(), present_text.splitlines(), autojunk=False)
        return {
            new + offset: measured[old + offset]
            for old, new, size in matcher.get_matching_blocks()
            for offset in range(1, size + 1)
            if old + offset in measured
        }

    def renewed_by(self, newer: Covering) -> Covering:
        """This coverage, in which the tests that `newer` measured have their newer lines. Lines are of the present
        files.
        """
        lines = {}
        paths = [path for path in self._lines.keys() | newer._lines.keys() if (ROOT / path).exists()]
        for path in paths:
            old_lines, new_lines = self._present_lines(path), newer._present_lines(path)
            lines[path] = {
                line: sorted(
                    {test for test in old_lines.get(line, ()) if test not in newer.seconds} | {*new_lines.get(line, ())}
                )
                for line in old_lines.keys() | new_lines.keys()
            }
        return Covering(self.seconds | newer.seconds, lines, {path: (ROOT / path).read_text() for path in paths})

    def save(self, file: Path) -> None:
        names = {test: n for n, test in enumerate(sorted(self.seconds))}
        lines = {
            path: {line: [names[test] for test in tests if test in names] for line, tests in covered.items()}
            for path, covered in self._lines.items()
        }
        content = {"tests": sorted(self.seconds.items()), "lines": lines, "texts": self._texts}
        file.write_bytes(gzip.compress(json.dumps(content).encode()))

    @classmethod
    def load(cls, file: Path) -> Covering:
        content = json.loads(gzip.decompress(file.read_bytes()))
        names = [test for test, _ in content["tests"]]
        lines = {
            path: {int(line): [names[n] for n in tests] for line, tests in covered.items()}
            for path, covered in content["lines"].items()
        }
        return cls(dict(content["tests"]), lines, content["texts"])


def collected(data: Path, tree: Path) -> Covering:
    """The coverage of a measured run in the checkout `tree`, from the files that its processes wrote: their names begin
    with `data`.
    """
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for file in data.parent.glob(f"{data.name}.tests.*.json"):
        results = json.loads(file.read_text())
        seconds |= results["seconds"]
        failed |= set(results["failed"])
    measured = coverage.Coverage(data_file=str(data), config_file=False, messages=False)
    measured.combine([str(file) for file in data.parent.glob(f"{data.name}.*") if file.suffix != ".json"], keep=True)
    passed = {test: duration for test, duration in seconds.items() if test not in failed}
    lines, texts = {}, {}
    for name in measured.get_data().measured_files():
        path = str(Path(name).relative_to(tree))
        covered = measured.get_data().contexts_by_lineno(name)
        lines[path] = {line: sorted(set(tests) & passed.keys()) for line, tests in covered.items()}
        texts[path] = Path(name).read_text()
    return Covering(passed, lines, texts)
