"""The state that lasts between runs: the coverage, and each judgement."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path

from leasehold.embedded.directories import cache_directory
from mutants.covering import Covering
from mutants.judge import Judgement
from mutants.mutant import Mutant
from mutants.places import ROOT

#: For each mutant, the test that noticed it when all mutants were last judged.
KILLERS = Path(__file__).with_name("killers.json")


def state_directory() -> Path:
    """The directory of the state, in the cache."""
    directory = cache_directory() / "mutants"
    directory.mkdir(exist_ok=True)
    return directory


def coverage_file() -> Path:
    return state_directory() / "coverage.json.gz"


def covering() -> Covering:
    """The measured coverage. Raises FileNotFoundError before the first measurement."""
    return Covering.load(coverage_file())


def commit() -> str:
    """The commit, with a digest of the uncommitted changes."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    digest = f"-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else ""
    return head.stdout.strip()[:12] + digest


#: These verdicts also count at a later commit if the mutated file is the same. A survivor is judged again, because a
#: new test may notice it.
_LASTING = ("killed", "timed out", "invalid")


class State:
    """The judgements of `mutants` at the commit `at`. Each judgement is appended to `file`, so that a later run does
    not judge the mutant again.
    """

    def __init__(self, at: str, mutants: Iterable[Mutant], file: Path | None = None) -> None:
        self._at = at
        self._file = file or state_directory() / "judged.jsonl"
        self._path = {mutant.id: mutant.path for mutant in mutants}
        self.judgements: dict[str, Judgement] = {}
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        for line in lines:
            fields = json.loads(line)
            judged_at, source = fields.pop("at"), fields.pop("source")
            judgement = Judgement(**fields)
            is_lasting = judgement.verdict in _LASTING and source == self._source_of(judgement.id)
            if judged_at == at or is_lasting:
                self.judgements[judgement.id] = judgement

    def _source_of(self, mutant: str) -> str:
        return _digest_of(self._path[mutant]) if mutant in self._path else ""

    def add(self, judgement: Judgement) -> None:
        self.judgements[judgement.id] = judgement
        line = {"at": self._at, "source": self._source_of(judgement.id), **asdict(judgement)}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


@cache
def _digest_of(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


def killers() -> dict[str, str]:
    """Id of a mutant -> the test that noticed it."""
    if not KILLERS.exists():
        return {}
    by_test: dict[str, list[str]] = json.loads(KILLERS.read_text())
    return {mutant: test for test, mutants in by_test.items() for mutant in mutants}


def record(killed_by: dict[str, str]) -> None:
    """Write the killers into the repository: with them, CI judges its sample within seconds."""
    by_test: dict[str, list[str]] = {}
    for mutant, test in sorted(killed_by.items()):
        by_test.setdefault(test, []).append(mutant)
    KILLERS.write_text(json.dumps(by_test, indent=0, sort_keys=True) + "\n")
