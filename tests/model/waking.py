"""How a workflow waits and is woken, small enough to look at every state: two steps, a signal, a worker that may die.

The moves are those of docs/explanation/workflows.md, each atomic where one statement makes it so. A guard can be
switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: `compare`: a suspension compares the news that the worker has read. `count`: an end counts while the workflow runs.
#: `epoch`: a write names the epoch of its lease. `consume`: a signal goes with the row that records it.
GUARDS = ("compare", "count", "epoch", "consume")


class Worker(NamedTuple):
    """One attempt: what it has read. `doing`: idle | claimed | read."""

    doing: str = "idle"
    epoch: int = 0
    seen: int = 0
    ended: int = 0  # steps that had ended when it read
    signal: bool = False


class State(NamedTuple):
    row: str = "due"  # due | running | waiting | done
    epoch: int = 0
    lapsed: bool = False
    news: int = 0
    started: bool = False  # the steps are there: the journal has their places
    ended: int = 0  # steps that have ended
    sent: bool = False
    kept: bool = False  # the signal waits to be consumed
    consumed: int = 0  # how often the journal has recorded it
    stale: bool = False  # a write of an older epoch than the row's
    workers: tuple[Worker, Worker] = (Worker(), Worker())


STEPS = 2
EPOCHS = 5


@dataclass
class Waking:
    """The workflow gathers two steps, and then waits for a signal."""

    off: frozenset[str] = frozenset()

    def moves(self, s: State) -> Iterator[tuple[str, State]]:
        for w in (0, 1):
            yield from self._worker(s, w)
        if s.started and s.ended < STEPS and s.row != "done":
            yield "a step ends", self._noticed(s._replace(ended=s.ended + 1), wakes=s.ended + 1 == STEPS)
        if not s.sent and s.row != "done":
            wakes = s.started and s.ended == STEPS
            yield "a signal comes", self._noticed(s._replace(sent=True, kept=True), wakes=wakes)
        if s.row == "running" and not s.lapsed and s.epoch < EPOCHS:
            yield "the lease passes", s._replace(lapsed=True)

    def _noticed(self, s: State, *, wakes: bool) -> State:
        if s.row == "running" and "count" in self.off:
            return s
        due = s.row == "waiting" and wakes
        return s._replace(news=s.news + 1, row="due" if due else s.row)

    def _worker(self, s: State, w: int) -> Iterator[tuple[str, State]]:
        me, name = s.workers[w], "AB"[w]
        if me.doing == "idle" and s.epoch < EPOCHS and (s.row == "due" or (s.row == "running" and s.lapsed)):
            claimed = s._replace(row="running", epoch=s.epoch + 1, lapsed=False)
            yield f"{name} claims", _with(claimed, w, Worker("claimed", s.epoch + 1))
        if me.doing == "claimed":
            read = me._replace(doing="read", seen=s.news, ended=s.ended, signal=s.kept)
            yield f"{name} reads the journal", _with(s, w, read if self._fits(s, me) else Worker())
        if me.doing == "read":
            yield f"{name} settles", self._settle(s, w)
        if me.doing != "idle":
            yield f"{name} dies", _with(s._replace(lapsed=s.lapsed or me.epoch == s.epoch), w, Worker())

    def _fits(self, s: State, me: Worker) -> bool:
        return s.row == "running" and ("epoch" in self.off or me.epoch == s.epoch)

    def _settle(self, s: State, w: int) -> State:
        """What the worker has read decides: it starts the steps, waits for them, waits for the signal, or ends."""
        me = s.workers[w]
        s = _with(s, w, Worker())
        if not self._fits(s, me):
            return s
        s = s._replace(stale=s.stale or me.epoch < s.epoch, started=True)
        if me.ended == STEPS and me.signal:
            kept = s.kept if "consume" in self.off else False
            done = "due" if "consume" in self.off and s.consumed == 0 else "done"
            return s._replace(row=done, consumed=s.consumed + 1, kept=kept)
        news = s.news != me.seen and "compare" not in self.off
        return s._replace(row="due" if news else "waiting")


def _with(s: State, w: int, me: Worker) -> State:
    return s._replace(workers=(me, s.workers[1]) if w == 0 else (s.workers[0], me))


def violated(s: State) -> str | None:
    """The first promise that does not hold in `s`."""
    if s.stale:
        return "a write of an older epoch than the row's"
    if s.consumed > 1:
        return "a signal is consumed twice"
    asleep = s.row == "waiting" and not any(worker.doing != "idle" and worker.epoch == s.epoch for worker in s.workers)
    if asleep and s.started and s.ended == STEPS and s.kept:
        return "a workflow that nobody wakes has all that it waits for"
    return None
