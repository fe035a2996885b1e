"""What is kept between runs: the coverage, and each judgement, by commit and mutant."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from leasehold.embedded.directories import cache_directory
from mutants.covering import Covering
from mutants.judge import Judgement
from mutants.places import ROOT

#: The test that noticed each mutant when all were judged last.
KILLERS = Path(__file__).with_name("killers.json")


def kept() -> Path:
    directory = cache_directory() / "mutants"
    directory.mkdir(exist_ok=True)
    return directory


def coverage_file() -> Path:
    return kept() / "coverage.json.gz"


def covering() -> Covering:
    """Raises FileNotFoundError where nothing was measured yet."""
    return Covering.load(coverage_file())


def commit() -> str:
    """The commit, and a digest of what differs from it."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    digest = f"-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else ""
    return said.stdout.strip()[:12] + digest


class State:
    """The judgements at a commit, in a file that grows by a line each. What was judged is not judged again."""

    def __init__(self, at: str) -> None:
        self._file = kept() / f"judged-{at}.jsonl"
        self.judgements: dict[str, Judgement] = {}
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                self._take(Judgement(**json.loads(line)))

    def _take(self, judgement: Judgement) -> None:
        self.judgements[judgement.id] = judgement

    def add(self, judgement: Judgement) -> None:
        self._take(judgement)
        with self._file.open("a") as file:
            file.write(judgement.line() + "\n")


def killers() -> dict[str, str]:
    """By mutant: the test that noticed it."""
    if not KILLERS.exists():
        return {}
    by_test: dict[str, list[str]] = json.loads(KILLERS.read_text())
    return {mutant: test for test, mutants in by_test.items() for mutant in mutants}


def record(found: dict[str, str]) -> None:
    """Keep the tests that noticed, in the repository: by them CI judges its sample within seconds."""
    by_test: dict[str, list[str]] = {}
    for mutant, test in sorted(found.items()):
        by_test.setdefault(test, []).append(mutant)
    KILLERS.write_text(json.dumps(by_test, indent=0, sort_keys=True) + "\n")
