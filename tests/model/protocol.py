"""The protocol, small enough to look at every state: one task, two workers, hints, leases, a store, and crashes.

The moves are those of docs/explanation/design.md, each atomic where one statement or one message makes it so. Polling
for work without hints is left out: it would heal what the hints' rules must hold by themselves. A guard can be switched
off. The guard `flush`: PostgreSQL answers a claim once it is on the disk; without it a crash may forget the claim. The
guard `whole_batch`: the hints of a batch are deleted once all are confirmed; without it, once any is. The guard
`split`: the relay deletes a batch in the commit that writes its hints one by one; without it, in a commit before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GUARDS = ("epoch", "ack", "outbox", "create_only", "confirm", "flush", "whole_batch", "split")
WORKERS = (0, 1)


class Worker(NamedTuple):
    """`doing`: idle | hinted | claimed | stored | committed. `owes`: an unacknowledged delivery is in its hands."""

    doing: str = "idle"
    epoch: int = 0
    owes: bool = False


class State(NamedTuple):
    row: str = "absent"  # absent | pending | running | done
    epoch: int = 0
    owner: int | None = None
    lapsed: bool = False  # the lease has passed; its owner may not know
    outbox: int = 0
    batched: bool = False  # the hint is in a batch, with the hint of another task
    splitting: bool = False  # guard `split` off: the batch is deleted, its hints are not written yet
    submitting: bool = False  # guard `outbox` off: the row is there, its hint is not yet
    broker: int = 0
    stored: int | None = None  # which attempt's bytes lie under the key
    committed: int | None = None  # which attempt's bytes the row names
    commits: int = 0
    stale_commit: bool = False
    workers: tuple[Worker, ...] = (Worker(), Worker())
    crashes: int = 0
    copies: int = 0
    unheard: int = 0  # publishes whose confirm was lost, or that were not taken
    unflushed: bool = False  # guard `flush` off: the claim is the last commit, and not on the disk


@dataclass(frozen=True)
class Bounds:
    """`epochs`: a living owner's lease lapses only below this one; a dead owner's always does."""

    epochs: int = 3
    crashes: int = 2
    copies: int = 1
    unheard: int = 1


@dataclass
class Protocol:
    off: frozenset[str] = frozenset()
    bounds: Bounds = field(default_factory=Bounds)

    def moves(self, s: State) -> Iterator[tuple[str, State]]:
        yield from self._submit(s)
        yield from self._batch(s)
        yield from self._relay(s)
        yield from self._leases(s)
        yield from self._disk(s)
        for w in WORKERS:
            yield from self._worker(s, w)

    def _submit(self, s: State) -> Iterator[tuple[str, State]]:
        if s.row == "absent":
            if "outbox" in self.off:
                yield "submit writes the row", s._replace(row="pending", submitting=True)
            else:
                yield "submit", s._replace(row="pending", outbox=1)
                yield "submit with another job", s._replace(row="pending", batched=True)
        if s.submitting:
            yield "submit writes the hint", s._replace(submitting=False, outbox=s.outbox + 1)
            if s.crashes < self.bounds.crashes:
                yield "the API dies", s._replace(submitting=False, crashes=s.crashes + 1)

    def _batch(self, s: State) -> Iterator[tuple[str, State]]:
        if s.batched:
            yield "the submitter publishes the batch, confirmed", s._replace(batched=False, broker=s.broker + 1)
            if s.unheard < self.bounds.unheard:
                tried = s._replace(unheard=s.unheard + 1)
                kept = "confirm" not in self.off
                yield "the batch is published, the confirm is lost", tried._replace(batched=kept, broker=s.broker + 1)
                yield "the batch is published, the broker does not take it", tried._replace(batched=kept)
                kept = "whole_batch" not in self.off
                yield "of the batch only the other hint is confirmed", tried._replace(batched=kept)
            if "split" in self.off:
                yield "the relay deletes the batch", s._replace(batched=False, splitting=True)
            else:
                runnable = s.outbox + (s.row == "pending")  # a task that was claimed since needs no hint
                yield "the relay writes the batch's hints one by one", s._replace(batched=False, outbox=runnable)
        if s.splitting:
            yield "the relay writes the hints", s._replace(splitting=False, outbox=s.outbox + 1)
            if s.crashes < self.bounds.crashes:
                yield "the relay dies", s._replace(splitting=False, crashes=s.crashes + 1)

    def _relay(self, s: State) -> Iterator[tuple[str, State]]:
        if s.outbox == 0:
            return
        yield "the relay publishes, confirmed", s._replace(outbox=s.outbox - 1, broker=s.broker + 1)
        if s.unheard < self.bounds.unheard:
            forgets = 1 if "confirm" in self.off else 0
            more: dict[str, Any] = {"outbox": s.outbox - forgets, "unheard": s.unheard + 1}
            yield "the relay publishes, the confirm is lost", s._replace(broker=s.broker + 1, **more)
            yield "the relay publishes, the broker does not take it", s._replace(**more)

    def _leases(self, s: State) -> Iterator[tuple[str, State]]:
        abandoned = all(worker.epoch != s.epoch for worker in s.workers)
        if s.row == "running" and not s.lapsed and (abandoned or s.epoch < self.bounds.epochs):
            yield "the lease lapses", s._replace(lapsed=True)
        if s.row == "running" and s.lapsed:
            more: dict[str, Any] = {
                "row": "pending",
                "owner": None,
                "lapsed": False,
                "outbox": s.outbox + 1,
                "unflushed": False,
            }
            yield "the sweeper ends the lease", s._replace(**more)
        if s.broker and s.copies < self.bounds.copies:
            yield "the broker doubles a hint", s._replace(broker=s.broker + 1, copies=s.copies + 1)

    def _disk(self, s: State) -> Iterator[tuple[str, State]]:
        if s.unflushed:
            yield "PostgreSQL writes the claim to the disk", s._replace(unflushed=False)
            if s.crashes < self.bounds.crashes:
                before: dict[str, Any] = {
                    "row": "pending",
                    "owner": None,
                    "epoch": s.epoch - 1,
                    "lapsed": False,
                    "unflushed": False,
                }
                yield "PostgreSQL crashes, and forgets the claim", s._replace(crashes=s.crashes + 1, **before)

    def _worker(self, s: State, w: int) -> Iterator[tuple[str, State]]:
        me = s.workers[w]
        name = "AB"[w]
        if me.doing == "idle" and s.broker:
            got = Worker("hinted", 0, owes="ack" not in self.off)
            yield f"{name} takes a hint", self._with(s, w, got)._replace(broker=s.broker - 1)
        if me.doing == "hinted":
            yield self._claim(s, w, name)
        if me.doing == "claimed":
            yield self._store(s, w, name)
        if me.doing == "stored":
            yield self._commit(s, w, name)
        if me.doing == "committed":
            yield f"{name} acknowledges", self._with(s, w, Worker())
        if me.doing != "idle" and s.crashes < self.bounds.crashes:
            back = s._replace(crashes=s.crashes + 1, broker=s.broker + me.owes)
            yield f"{name} dies; what it had not acknowledged is delivered again", self._with(back, w, Worker())

    @staticmethod
    def _with(s: State, w: int, me: Worker) -> State:
        return s._replace(workers=tuple(me if n == w else other for n, other in enumerate(s.workers)))

    def _claim(self, s: State, w: int, name: str) -> tuple[str, State]:
        if s.row == "pending" or (s.row == "running" and s.lapsed):
            unflushed = "flush" in self.off and s.row == "pending"  # a takeover is written to the disk in any case
            leased = s._replace(row="running", owner=w, epoch=s.epoch + 1, lapsed=False, unflushed=unflushed)
            return f"{name} claims", self._with(leased, w, Worker("claimed", s.epoch + 1, s.workers[w].owes))
        return f"{name} finds it taken or done, and acknowledges", self._with(s, w, Worker())

    def _store(self, s: State, w: int, name: str) -> tuple[str, State]:
        me = s.workers[w]
        trusted = s.row == "running" and s.epoch == me.epoch
        if "create_only" in self.off or s.stored is None or trusted:
            return f"{name} stores", self._with(s._replace(stored=me.epoch), w, me._replace(doing="stored"))
        return f"{name} meets other bytes, and gives up", self._with(s, w, Worker())

    def _commit(self, s: State, w: int, name: str) -> tuple[str, State]:
        me = s.workers[w]
        fits = s.row == "running" and ("epoch" in self.off or (s.owner == w and s.epoch == me.epoch))
        if not fits:
            return f"{name} is told that its lease is lost", self._with(s, w, Worker())
        settled = s._replace(
            row="done", owner=None, lapsed=False, committed=me.epoch, commits=s.commits + 1,
            stale_commit=s.stale_commit or me.epoch < s.epoch, unflushed=False,
        )  # fmt: skip
        return f"{name} commits", self._with(settled, w, me._replace(doing="committed"))


def violated(s: State) -> str | None:
    """The first promise that does not hold in `s`."""
    if s.commits > 1:
        return "an effect is committed twice"
    if s.stale_commit:
        return "a commit of an older epoch than the row's"
    if s.committed is not None and s.stored != s.committed:
        return "the row names bytes that are not in the store"
    on_the_way = s.batched + s.splitting + s.submitting
    hints = s.outbox + s.broker + sum(w.doing == "hinted" for w in s.workers) + on_the_way
    if s.row == "pending" and hints == 0:
        return "a runnable task that nobody will ever hear of"
    return None


@dataclass
class Explored:
    states: int
    broken: str | None = None
    trace: list[str] = field(default_factory=list)


def explore(protocol: Protocol) -> Explored:
    """Every reachable state, breadth first: the shortest way to a broken promise, or to a dead end."""
    start = State()
    came: dict[State, tuple[State, str] | None] = {start: None}
    before: dict[State, list[State]] = {}
    waiting = deque([start])
    while waiting:
        s = waiting.popleft()
        broken = violated(s)
        if broken is not None:
            return Explored(len(came), broken, _trace(came, s))
        for name, after in protocol.moves(s):
            before.setdefault(after, []).append(s)
            if after not in came:
                came[after] = (s, name)
                waiting.append(after)
    stuck = _cannot_finish(came, before)
    if stuck is not None:
        return Explored(len(came), "a job that can never end", _trace(came, stuck))
    return Explored(len(came))


def _cannot_finish(came: Mapping[State, object], before: Mapping[State, list[State]]) -> State | None:
    can = {s for s in came if s.row == "done"}
    waiting = deque(can)
    while waiting:
        for earlier in before.get(waiting.popleft(), []):
            if earlier not in can:
                can.add(earlier)
                waiting.append(earlier)
    return next((s for s in came if s not in can), None)


def _trace(came: Mapping[State, tuple[State, str] | None], s: State) -> list[str]:
    names = []
    step = came[s]
    while step is not None:
        s, name = step
        names.append(name)
        step = came[s]
    return names[::-1]
