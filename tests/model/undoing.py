"""How a cancelled workflow sees its cancel and undoes its work, small enough to look at every state: it runs a step,
then waits for a signal; two workers, each of which may die; a client that cancels at any moment.

The moves are those of docs/explanation/workflows.md, each atomic where one statement makes it so. A guard can be
switched off. What undoes the work runs at least once, so the model asks where it ran, not how often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: `resume`: the cancel makes a workflow that waits due. `leased`: the job counts that workflow as leased. `refuse`: a
#: suspension in a cancelled job writes nothing. `mark`: the journal has where the code met the cancel before its next
#: effect. `epoch`: a write names the epoch of its lease. `return`: a lost worker's workflow is due again within the
#: grace. `called`: only a workflow that has called something goes on after the cancel.
GUARDS = ("resume", "leased", "refuse", "mark", "epoch", "return", "called")
#: Where the code stands, by what its worker has read.
AT_STEP, AT_SIGNAL, AT_END = 0, 1, 2
EPOCHS = 4
_ENDED = ("done", "cancelled")


class Worker(NamedTuple):
    """One attempt. `doing`: idle | claimed | read | undoing | undone. `hears`: it knows of the cancel."""

    doing: str = "idle"
    epoch: int = 0
    at: int = AT_STEP
    hears: bool = False


class State(NamedTuple):
    row: str = "due"  # due | running | waiting | done | cancelled
    epoch: int = 0
    lapsed: bool = False
    called: bool = False  # task.journaled
    step: str = "absent"  # absent | leased | ended | stopped
    signal: bool = False
    cancelling: bool = False
    overdue: bool = False  # the grace has passed
    mark: int | None = None  # the journal: where the code met the cancel
    undone: frozenset[int] = frozenset()  # where the code stood when it undid its work
    began: bool = False  # a workflow that had called nothing was claimed after its cancel
    workers: tuple[Worker, Worker] = (Worker(), Worker())


@dataclass
class Undoing:
    off: frozenset[str] = frozenset()

    def moves(self, s: State) -> Iterator[tuple[str, State]]:
        """Up to so many claims: EPOCHS."""
        if s.row not in _ENDED:
            yield from self._others(s)
            yield from self._sweeper(s)
        for w in (0, 1):
            yield from self._worker(s, w)

    def _others(self, s: State) -> Iterator[tuple[str, State]]:
        if s.step == "leased":
            yield "the step succeeds", self._step_ends(s, "ended")
            if s.cancelling:
                yield "the step is stopped", self._step_ends(s, "stopped")
        if not s.signal and not s.cancelling:
            wakes = s.row == "waiting" and s.step == "ended"
            yield "a signal comes", s._replace(signal=True, row="due" if wakes else s.row)
        if not s.cancelling:
            yield "a client cancels", self._cancel(s)
        elif not s.overdue:
            yield "the grace passes", s._replace(overdue=True)
        if s.row == "running" and not s.lapsed and s.epoch < EPOCHS:
            yield "the lease passes", s._replace(lapsed=True)

    def _step_ends(self, s: State, step: str) -> State:
        s = s._replace(step=step, row="due" if s.row == "waiting" else s.row)
        workflow_is_counted = s.row == "running" or "leased" not in self.off
        return s._replace(row="cancelled") if s.cancelling and not workflow_is_counted else s

    def _cancel(self, s: State) -> State:
        if s.row == "running":
            return s._replace(cancelling=True)
        if s.called and "resume" not in self.off:
            return s._replace(cancelling=True, row="due")
        return s._replace(cancelling=True, row="cancelled")

    def _sweeper(self, s: State) -> Iterator[tuple[str, State]]:
        if not s.cancelling:
            return
        if s.overdue:
            yield "the sweeper ends what outlived the grace", s._replace(row="cancelled")
        elif s.row == "running" and s.lapsed:
            goes_on = "return" not in self.off and (s.called or "called" in self.off)
            row = "due" if goes_on else "cancelled"
            yield "the sweeper ends the lost lease", s._replace(row=row, lapsed=False)

    def _worker(self, s: State, w: int) -> Iterator[tuple[str, State]]:
        me, name = s.workers[w], "AB"[w]
        if me.doing == "idle" and self._is_claimable(s):
            began = s.began or (s.cancelling and not s.called)
            claimed = s._replace(row="running", epoch=s.epoch + 1, lapsed=False, began=began)
            yield f"{name} claims", _with(claimed, w, Worker("claimed", s.epoch + 1, hears=s.cancelling))
        if me.doing in ("claimed", "read") and s.cancelling and not me.hears and me.epoch == s.epoch:
            yield f"{name} hears of the cancel", _with(s, w, me._replace(hears=True))
        if me.doing == "claimed":
            read = me._replace(doing="read", at=_place(s))
            yield f"{name} reads the journal", _with(s, w, read if self._fits(s, me) else Worker())
        if me.doing == "read":
            yield f"{name} goes on", self._go_on(s, w)
        if me.doing == "undoing":
            undone = s._replace(undone=s.undone | {me.at})
            yield f"{name} undoes the work", _with(undone, w, me._replace(doing="undone"))
        if me.doing == "undone":
            ended = s._replace(row="cancelled") if self._fits(s, me) else s
            yield f"{name} acknowledges the cancel", _with(ended, w, Worker())
        if me.doing != "idle":
            yield f"{name} dies", _with(s._replace(lapsed=s.lapsed or me.epoch == s.epoch), w, Worker())

    def _is_claimable(self, s: State) -> bool:
        if s.epoch == EPOCHS:
            return False
        if s.row == "due":
            return s.called or not s.cancelling or "called" in self.off
        return s.row == "running" and s.lapsed and not s.cancelling

    def _fits(self, s: State, me: Worker) -> bool:
        return s.row == "running" and ("epoch" in self.off or me.epoch == s.epoch)

    def _go_on(self, s: State, w: int) -> State:
        """The code ends, meets the cancel where it stands, or waits there."""
        me = s.workers[w]
        if not self._fits(s, me):
            return _with(s, w, Worker())
        if me.at == AT_END:
            return _with(s._replace(row="done"), w, Worker())
        if me.hears:
            marked = s._replace(called=True, mark=None if "mark" in self.off else me.at)
            return _with(marked, w, me._replace(doing="undoing"))
        s = _with(s, w, Worker())
        if s.cancelling and "refuse" not in self.off:  # it releases the lease; without calls it acknowledges
            return s._replace(row="due" if s.called else "cancelled", lapsed=False)
        s = s._replace(called=True, step="leased" if s.step == "absent" else s.step, lapsed=False)
        return s._replace(row="waiting" if _place(s) == me.at else "due")


def _place(s: State) -> int:
    if s.mark is not None:
        return s.mark
    if s.step != "ended":
        return AT_STEP
    return AT_END if s.signal else AT_SIGNAL


def _with(s: State, w: int, me: Worker) -> State:
    return s._replace(workers=(me, s.workers[1]) if w == 0 else (s.workers[0], me))


def violated(s: State) -> str | None:
    """The first promise that does not hold in `s`."""
    if s.began:
        return "a workflow that has called nothing begins after its cancel"
    if len(s.undone) > 1:
        return "the code meets its cancel at two places"
    if s.undone and s.row == "done":
        return "a run whose work was undone succeeds"
    if s.cancelling and s.row == "waiting":
        return "a workflow waits that is to see its cancel"
    if s.row == "cancelled" and s.called and not s.undone and not s.overdue:
        return "a workflow ends within the grace and has not seen its cancel"
    return None
