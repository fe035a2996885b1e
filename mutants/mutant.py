"""A mutant: one small change of one source file, with an id that survives edits elsewhere in the file."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """The characters `start` to `end` of a source become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """What an operator proposes: `kind` names the operator, `about` the text that it is about."""

    kind: str
    about: str
    edits: tuple[Edit, ...]

    @property
    def start(self) -> int:
        return self.edits[0].start


@dataclass(frozen=True, slots=True)
class Mutant:
    """`path`: from the repository's root. `scope`: the function, class or constant that is changed. `lines`: those of
    the change, first and last.
    """

    id: str
    path: str
    scope: str
    lines: tuple[int, int]
    change: Change

    def applied(self, source: str) -> str:
        """`source`, the file's text, with the change."""
        for edit in sorted(self.change.edits, key=lambda edit: edit.start, reverse=True):
            source = source[: edit.start] + edit.text + source[edit.end :]
        return source

    def diff(self, source: str) -> str:
        """The changed lines, as a patch without context."""
        before, after = source.splitlines(), self.applied(source).splitlines()
        patch = difflib.unified_diff(before, after, self.path, self.path, lineterm="", n=0)
        return "\n".join(list(patch)[2:])

    @property
    def title(self) -> str:
        """One line for a list."""
        about = " ".join(self.change.about.split())
        return f"{self.id} {self.path}:{self.lines[0]} {self.scope}: {self.change.kind}: {about[:100]}"


def named(path: str, source: str, found: Iterable[tuple[str, Change]]) -> list[Mutant]:
    """The mutants of a file from its changes, each with its scope.

    An id is made of the path, the scope, the operator and the changed text; a number tells equal changes of one scope
    apart. So an edit somewhere else leaves the id as it is.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for scope, change in sorted(found, key=lambda one: (one[1].start, one[1].kind)):
        key = (scope, change.kind, " ".join(change.about.split()))
        text = "\n".join([path, *key, str(seen[key])])
        seen[key] += 1
        last = max(edit.end for edit in change.edits)
        lines = (source.count("\n", 0, change.start) + 1, source.count("\n", 0, last) + 1)
        mutants.append(Mutant(hashlib.sha256(text.encode()).hexdigest()[:8], path, scope, lines, change))
    return mutants
