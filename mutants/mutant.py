"""A mutant: one small change of one source file. Its id stays the same if other lines of the file change."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the characters of a source from `start` up to `end` by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change that an operator proposes. `kind`: the name of the operator. `about`: the text that it changes."""

    kind: str
    about: str
    edits: tuple[Edit, ...]

    @property
    def start(self) -> int:
        return self.edits[0].start


@dataclass(frozen=True, slots=True)
class Mutant:
    """`path`: from the repository's root. `scope`: the name of the changed function, class or constant. `lines`: the
    first and the last line of the change.
    """

    id: str
    path: str
    scope: str
    lines: tuple[int, int]
    change: Change

    def applied(self, source: str) -> str:
        """The text of the file with the change. `source`: the text without it."""
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
        """The mutant in one line."""
        about = " ".join(self.change.about.split())
        return f"{self.id} {self.path}:{self.lines[0]} {self.scope}: {self.change.kind}: {about[:100]}"


def named(path: str, source: str, changes: Iterable[tuple[str, Change]]) -> list[Mutant]:
    """The mutants of a file. `changes`: (scope, change).

    The id is a hash of the path, the scope, the operator and the changed text, with a number for equal changes of one
    scope. So an edit elsewhere in the file does not change the id.
    """
    equal_before: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for scope, change in sorted(changes, key=lambda scoped: (scoped[1].start, scoped[1].kind)):
        key = (scope, change.kind, " ".join(change.about.split()))
        text = "\n".join([path, *key, str(equal_before[key])])
        equal_before[key] += 1
        last = max(edit.end for edit in change.edits)
        lines = (source.count("\n", 0, change.start) + 1, source.count("\n", 0, last) + 1)
        mutants.append(Mutant(hashlib.sha256(text.encode()).hexdigest()[:8], path, scope, lines, change))
    return mutants
