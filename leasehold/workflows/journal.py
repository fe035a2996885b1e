"""Replays a journal (the rows of a workflow's calls). When the workflow's code runs again from its top, each call takes
the entry at its place (branch and number). The entry must name the same call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from leasehold.domain.errors import Retryable
from leasehold.transitions.workflows.reading import Entry
from leasehold.workflows.pending import Journaled, RunCall

Place = tuple[str, int]  # the branch of the call, and the call's number in it


class Replay:
    """The entries that no call has taken yet, and the last call that matched its entry."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[Place, Entry] = {(entry.branch, entry.number): entry for entry in entries}
        #: How many calls have made the entries. The call of a limited task has two (`is_own_run`).
        self.call_count = len(self._entries) - sum(map(is_own_run, self._entries.values()))
        self._last_match: str | None = None
        #: How many entries are left in each branch and in the branches below it, and in the branches of each gather.
        #: None: nobody has asked for it yet.
        self._left: Counter[str] | None = None

    def at(self, place: Place) -> Entry | None:
        return self._entries.get(place)

    def goes_on(self, branch: str) -> bool:
        """Whether the run has made calls in this branch that the code has not come to yet, or in the branches of its
        later gathers.
        """
        return self._count_left()[branch] > 0

    def has_gone_on(self, branches: Iterable[tuple[str, int]]) -> bool:
        """Whether the run has made calls after the point that the code has come to in one of these branches. Each has
        its path, and how many gathers it has begun: calls in the branches of these gathers do not count.
        """
        left = self._count_left()
        return any(
            left[branch] > sum(left[f"{branch}{gather}."] for gather in range(1, gathers + 1))
            for branch, gathers in branches
        )

    def _count_left(self) -> Counter[str]:
        if self._left is None:
            self._left = Counter(above for entry in self._entries.values() for above in with_ancestors(entry.branch))
        return self._left

    def take(self, call: Journaled[Any]) -> Entry | None:
        """The entry at the call's place. None: the call is new. Raises Retryable `workflow_changed`."""
        entry = self._entries.get((call.branch, call.number))
        if entry is None:
            return None
        # The call of a limited task has the row of a start.
        name = call.step if isinstance(call, RunCall) and call.is_own_run else call.name
        if (_kind_of(entry), entry.name) != (call.kind, name):
            raise self._changed(entry, f"{call.kind} {name}")
        del self._entries[entry.branch, entry.number]
        if self._left is not None:
            self._left.subtract(with_ancestors(entry.branch))
        self._last_match = _described(entry)
        return entry

    def check_end(self) -> None:
        """Raises Retryable `workflow_changed` if the code has ended and the journal has further calls."""
        if self._entries:
            raise self._changed(self._entries[min(self._entries)], "the end of the function")

    def _changed(self, expected: Entry, actual: str) -> Retryable:
        """The error for code that is not that of the run's journal. Retryable: during a deployment, another worker may
        have the run's code, such as a patch that this code does not know.
        """
        last_match = self._last_match or "none"
        sentence = (
            f"the run's journal has {_described(expected)}, and the code calls {actual}; the last call that agreed: "
            f"{last_match}. Let new code begin with ctx.patched(...), or deploy the code that the run began with and "
            "replay"
        )
        return Retryable(sentence, code="workflow_changed")


def with_ancestors(branch: str) -> Iterator[str]:
    """The branch, all branches above it, and their gathers. The path of a branch ends with `/`, and begins with that of
    the branch above; the path of the first branch is empty. A gather is named by the part of the path up to the point.
    """
    yield ""
    yield from (branch[: end + 1] for end, character in enumerate(branch) if character in "./")


def is_own_run(entry: Entry) -> bool:
    """Whether the entry is of `ctx.run`, and a run of its own does the work, because the task is limited. Such an entry
    has the name of a step (`charge#1`). The entry of `ctx.start` has the name of the task, which has no `#`.
    """
    return entry.kind == "start" and "#" in entry.name


def _kind_of(entry: Entry) -> str:
    """The kind of the call that has made the entry."""
    return "run" if is_own_run(entry) else entry.kind


def _described(entry: Entry) -> str:
    where = f" of branch {entry.branch}" if entry.branch else ""
    return f"{_kind_of(entry)} {entry.name} as call {entry.number}{where}"
