"""The state that lasts between runs: the coverage and each judgement in the cache, and the record in the repository."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from leasehold.embedded.directories import cache_directory
from mutants.covering import Covering
from mutants.judge import Judgement
from mutants.mutant import Mutant
from mutants.places import ROOT

#: The recorded judgements, by the path of the mutated file. `source`: the digest of the file's code when they were
#: made. `killed`: the mutants that each test noticed. `timed out`, `invalid`: mutants. `killed before`: as `killed`, of
#: mutants that were not judged since the file changed.
RECORD = Path(__file__).with_name("judged.json")


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


#: A comment of several words in a statement. A comment of one word is the statement's name.
_SQL_COMMENT = re.compile(r"-- \S+ [^\n]*")
#: These verdicts also count at a later commit if the mutated file is the same. A survivor is judged again, because a
#: new test may notice it.
_LASTING = ("killed", "timed out", "invalid")


class State:
    """The judgements of `mutants` at the commit `at`. Each judgement is appended to `file`, so that a later run does
    not judge the mutant again. `record`: the file of the recorded judgements, which other machines made.
    """

    def __init__(
        self, at: str, mutants: Iterable[Mutant], file: Path | None = None, record: Path | None = None
    ) -> None:
        self._at = at
        self._file = file or state_directory() / "judged.jsonl"
        self._path = {mutant.id: mutant.path for mutant in mutants}
        self.judgements: dict[str, Judgement] = {
            judgement.id: judgement
            for source, judgement in recorded(record or RECORD)
            if source == self._source_of(judgement.id)
        }
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
    """A digest of the file's code. Comments, docstrings and the layout change nothing that a test could notice."""
    tree = _WithoutProse().visit(ast.parse((ROOT / path).read_text()))
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


class _WithoutProse(ast.NodeTransformer):
    """Drops docstrings, and the comments in the texts of SQL statements."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and "\n-- " in node.value:  # so begins a statement, with its name
            return ast.Constant(" ".join(_SQL_COMMENT.sub("", node.value).split()))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)  # type: ignore[return-value]  # an Expr stays one


def recorded(file: Path = RECORD) -> Iterator[tuple[str, Judgement]]:
    """The judgements of the record that still count while the mutated file has the digest that comes first."""
    for part in _read(file).values():
        for test, mutants in part["killed"].items():
            yield from ((part["source"], Judgement(mutant, "killed", by=test)) for mutant in mutants)
        for verdict in ("timed out", "invalid"):
            yield from ((part["source"], Judgement(mutant, verdict)) for mutant in part.get(verdict, ()))


def killers(file: Path = RECORD) -> dict[str, str]:
    """Id of a mutant -> the test that noticed it, also before the file changed."""
    return {
        mutant: test
        for part in _read(file).values()
        for killed in (part.get("killed before", {}), part["killed"])
        for test, mutants in killed.items()
        for mutant in mutants
        if "::" in test
    }


def record(judgements: Mapping[str, Judgement], mutants: Iterable[Mutant], file: Path = RECORD) -> None:
    """Write what is known of `mutants` into the repository: with it CI judges its sample within seconds, and another
    machine goes on where this one stopped. What the record knows of other mutants is left out.
    """
    known_killers = killers(file)
    parts: dict[str, dict[str, Any]] = {}
    for mutant in sorted(mutants, key=lambda mutant: mutant.id):
        part = parts.setdefault(mutant.path, {"source": _digest_of(mutant.path), "killed": defaultdict(list)})
        judgement = judgements.get(mutant.id)
        if judgement is not None and judgement.verdict == "killed":
            part["killed"][judgement.by].append(mutant.id)
        elif judgement is not None and judgement.verdict in _LASTING:
            part.setdefault(judgement.verdict, []).append(mutant.id)
        elif judgement is None and mutant.id in known_killers:
            part.setdefault("killed before", defaultdict(list))[known_killers[mutant.id]].append(mutant.id)
    told = {path: part for path, part in parts.items() if part["killed"] or len(part) > len(("source", "killed"))}
    file.write_text(json.dumps(told, indent=0, sort_keys=True) + "\n")


def _read(file: Path) -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return read
