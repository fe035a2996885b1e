"""Replays a journal (the rows of a workflow's calls). When the workflow's code runs again from its top, each call takes
the entry (a row of the journal) at the call's place (branch and number). If the entry names another call, the replay
raises `workflow_changed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from leasehold.domain.errors import Retryable
from leasehold.transitions.workflows.reading import Entry
from leasehold.workflows.pending import Journaled, RunCall

Place = tuple[str, int]  # a call's branch, and its number in this branch


class Replay:
    """The entries of the journal that no call has taken yet, and the last call that took its entry."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[Place, Entry] = {(entry.branch, entry.number): entry for entry in entries}
        #: How many calls have made the entries. A call of `ctx.run` makes two entries if its task has a concurrency
        #: limit (see `is_own_run`).
        self.call_count = len(self._entries) - sum(map(is_own_run, self._entries.values()))
        self._last_match: str | None = None
        #: How many entries no call has taken yet. The key is the path of a branch, or the name of a gather (see
        #: `with_ancestors`). A branch counts its own entries and those of all branches below it. A gather counts the
        #: entries of all its branches. None: not counted yet.
        self._left: Counter[str] | None = None

    def at(self, place: Place) -> Entry | None:
        return self._entries.get(place)

    def goes_on(self, branch: str) -> bool:
        """Whether entries of this branch, or of the branches below it, are left. These entries are calls that an
        earlier attempt of the run has made, and that the code has not reached yet.
        """
        return self._count_left()[branch] > 0

    def has_gone_on(self, branches: Iterable[tuple[str, int]]) -> bool:
        """Whether an earlier attempt of the run has made calls, in one of these branches, beyond the point that the
        code has reached now. `branches`: the path of each branch, and how many gathers the code has begun in this
        branch. Calls in the branches of these gathers do not count.
        """
        left = self._count_left()
        # The entries that are left of a branch, minus those that are left of the gathers that the code has begun in it.
        return any(
            left[branch] > sum(left[f"{branch}{gather}."] for gather in range(1, gathers + 1))
            for branch, gathers in branches
        )

    def _count_left(self) -> Counter[str]:
        if self._left is None:
            self._left = Counter(above for entry in self._entries.values() for above in with_ancestors(entry.branch))
        return self._left

    def take(self, call: Journaled[Any]) -> Entry | None:
        """Remove and return the entry at the call's place. Returns None if the call is new. Raises Retryable
        `workflow_changed`.
        """
        entry = self._entries.get((call.branch, call.number))
        if entry is None:
            return None
        # `ctx.run` starts a task with a concurrency limit as a run of its own (`is_own_run`). The entry then has the
        # name of the call's step.
        name = call.step if isinstance(call, RunCall) and call.is_own_run else call.name
        if (_kind_of(entry), entry.name) != (call.kind, name):
            raise self._changed(entry, f"{call.kind} {name}")
        del self._entries[entry.branch, entry.number]
        if self._left is not None:
            self._left.subtract(with_ancestors(entry.branch))
        self._last_match = _described(entry)
        return entry

    def check_end(self) -> None:
        """Call this when the code has ended. Raises Retryable `workflow_changed` if the journal has further calls."""
        if self._entries:
            raise self._changed(self._entries[min(self._entries)], "the end of the function")

    def _changed(self, expected: Entry, actual: str) -> Retryable:
        """The error for code that does not fit the run's journal. A retry may succeed: during a deployment, another
        worker may have the code that wrote the journal, for example with a patch that this code does not know.
        """
        last_match = self._last_match or "none"
        sentence = (
            f"the run's journal has {_described(expected)}, and the code calls {actual}; the last call that agreed: "
            f"{last_match}. Let new code begin with ctx.patched(...), or deploy the code that the run began with and "
            "replay"
        )
        return Retryable(sentence, code="workflow_changed")


def with_ancestors(branch: str) -> Iterator[str]:
    """The paths of the branch and of all branches above it, and the names of the gathers that have made them. A gather
    runs its parts at once, each in a branch. The first branch has the empty path. The path `1.0/2.3/` is that of part 3
    of gather 2 of the branch `1.0/`. The name of this gather is the path up to its last dot, `1.0/2.`. So `1.0/2.3/`
    gives the empty path, `1.`, `1.0/`, `1.0/2.` and `1.0/2.3/`.
    """
    yield ""
    yield from (branch[: end + 1] for end, character in enumerate(branch) if character in "./")


def is_own_run(entry: Entry) -> bool:
    """Whether the entry is the start of a run that `ctx.run` has made because its task has a concurrency limit. Such an
    entry has the name of a step (`charge#1`). The entry of `ctx.start` has the name of the task, which has no `#`.
    """
    return entry.kind == "start" and "#" in entry.name


def _kind_of(entry: Entry) -> str:
    """The kind of the call that has made the entry."""
    return "run" if is_own_run(entry) else entry.kind


def _described(entry: Entry) -> str:
    where = f" of branch {entry.branch}" if entry.branch else ""
    return f"{_kind_of(entry)} {entry.name} as call {entry.number}{where}"
