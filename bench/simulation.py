"""A model of an installation by discrete events: workers, their event loops, PostgreSQL's cores and its log.

The unit is a statement of a batch: a claim or a settlement of as many tasks as wait at that moment. So the batches grow
with the load by themselves, as those of the real batchers do. A statement needs the worker's event loop, then a core of
PostgreSQL, then a flush of the log that it shares with all commits that wait for one. While its tasks use the event
loop, the next statement of the same batcher is under way: so more than two batches of a worker are about.

What the model leaves out is written where its tables stand: docs/operations/scale.md.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from itertools import count
from random import Random
from typing import Any, Self

import simpy

Process = Generator[simpy.Event, Any, Any]

#: The most tasks of one statement (worker/parts.py).
BATCH = 128
#: Seconds that a process keeps a core while others wait for one: so processes share cores, and do not queue for them.
_SLICE = 0.001
#: The most hints that a worker reads from its socket at once.
_READ = 32
#: Seconds between two renewals of a worker's leases.
_RENEW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What the calibration measures (bench/calibration.py). Seconds of CPU, unless the name says otherwise.

    A task costs one claim and one settlement, and each of them half of `worker_task` and of `database_task`. Each
    statement costs `worker_statement` and `database_statement`, whatever its size.
    """

    worker_task: float
    worker_statement: float
    database_task: float
    database_statement: float
    database_submission: float
    database_renewal: float
    database_idle_worker: float  # a second, for a worker without work
    database_notification: float  # for each session that listens
    broker_task: float
    flush_seconds: float  # of the write-ahead log
    trip_seconds: float  # of an empty statement
    log_bytes: float  # of the write-ahead log, of a task from its submission to its end

    @classmethod
    def of(cls, values: dict[str, float]) -> Self:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Plan:
    """An installation, or a cell of one. `cores`: of the machine with PostgreSQL. `shared`: the workers and the broker
    run on it, too; else each worker has a core of its own. `slots`: tasks at once in a worker. `task_seconds`: how long
    a task runs on average, without CPU. `backlog`: tasks that wait at the beginning; None: there are always some, and
    as many are submitted as end.
    """

    workers: int
    cores: int
    shared: bool
    slots: int = BATCH
    task_seconds: float = 0.0
    backlog: int | None = None
    trip_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation. `database`, `broker`: cores that PostgreSQL and the broker kept busy. `worst_commit`:
    the 99th percentile of a statement's seconds. `batch`: tasks of a statement.
    """

    seconds: float
    tasks: int
    database: float
    broker: float
    worst_commit: float
    batch: float

    @property
    def rate(self) -> float:
        return self.tasks / self.seconds


class _Cores:
    def __init__(self, env: simpy.Environment, count: int) -> None:
        self._env = env
        self._resource = simpy.Resource(env, count)

    def work(self, seconds: float) -> Process:
        while seconds > 0:
            part = min(seconds, _SLICE)
            with self._resource.request() as core:
                yield core
                yield self._env.timeout(part)
            seconds -= part


class _Log:
    """Flushes for all commits that wait. A commit that comes during a flush waits for the next one."""

    def __init__(self, env: simpy.Environment, seconds: float) -> None:
        self._env, self._seconds = env, seconds
        self._waiting: list[simpy.Event] = []
        self._is_flushing = False

    def commit(self) -> simpy.Event:
        written = self._env.event()
        self._waiting.append(written)
        if not self._is_flushing:
            self._is_flushing = True
            self._env.process(self._flush())
        return written

    def _flush(self) -> Process:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            yield self._env.timeout(self._seconds)
            for written in batch:
                written.succeed()
        self._is_flushing = False


class _Fleet:
    """PostgreSQL, its log, the broker and the backlog: what all workers of a simulation share."""

    def __init__(self, env: simpy.Environment, costs: Costs, plan: Plan, random: Random) -> None:
        self.env, self.costs, self.plan, self.random = env, costs, plan, random
        self._cores = _Cores(env, plan.cores)
        self._core_of_broker = self._cores if plan.shared else _Cores(env, 1)
        self.used = {"database": 0.0, "broker": 0.0}
        self.log = _Log(env, costs.flush_seconds)
        self.backlog = plan.backlog
        self.trip = costs.trip_seconds if plan.trip_seconds is None else plan.trip_seconds
        self.ended = 0
        self.done = env.event()
        self.statements: list[tuple[int, float]] = []  # tasks and seconds of each

    def take(self, at_most: int) -> int:
        """Take at most `at_most` tasks from the backlog. Returns their number."""
        if self.backlog is None:
            return at_most
        taken = min(at_most, self.backlog)
        self.backlog -= taken
        return taken

    def of_database(self, seconds: float) -> Process:
        self.used["database"] += seconds
        yield from self._cores.work(seconds)

    def of_worker(self, seconds: float) -> Process:
        """Use a worker's core for `seconds`. A worker has one core at most, because its event loop runs on one."""
        if self.plan.shared:
            yield from self._cores.work(seconds)
        else:
            yield self.env.timeout(seconds)

    def statement(self, tasks: int) -> Process:
        began = self.env.now
        costs = self.costs
        yield self.env.timeout(self.trip)
        yield from self.of_database(costs.database_statement + tasks * costs.database_task / 2)
        yield self.log.commit()
        self.statements.append((tasks, self.env.now - began))

    def end(self, tasks: int) -> None:
        self.ended += tasks
        if self.plan.backlog is None:
            self.env.process(self.of_database(tasks * self.costs.database_submission))
        elif self.ended == self.plan.backlog:
            self.done.succeed()

    def of_broker(self, hints: int) -> Process:
        """The broker delivers the hints, and gets the ACKs of as many."""
        seconds = hints * self.costs.broker_task
        self.used["broker"] += seconds
        yield from self._core_of_broker.work(seconds)


class _Batcher:
    """As leasehold/db/batcher.py: one statement at a time, for all tasks that wait when it begins. `after` goes on with
    the tasks of a statement, beside the next statement.
    """

    def __init__(self, worker: _Worker, after: Callable[[int], Process]) -> None:
        self._worker, self._after = worker, after
        self._env = worker.fleet.env
        self._waiting = 0
        self._has_tasks = self._env.event()
        self._env.process(self._run())

    def add(self, tasks: int) -> None:
        self._waiting += tasks
        if not self._has_tasks.triggered:
            self._has_tasks.succeed()

    def _run(self) -> Process:
        while True:
            yield self._has_tasks
            # The tasks that the event loop has got by now go along: the batcher runs after them.
            yield from self._worker.on_loop(self._worker.fleet.costs.worker_statement)
            tasks = min(self._waiting, BATCH)
            self._waiting -= tasks
            if not self._waiting:
                self._has_tasks = self._env.event()
            yield from self._worker.fleet.statement(tasks)
            self._env.process(self._after(tasks))


class _Worker:
    """Gets as many hints as it has slots, claims, runs and settles their tasks, and gets a hint for each that ended."""

    def __init__(self, fleet: _Fleet) -> None:
        self.fleet, self._env = fleet, fleet.env
        self._loop = simpy.Resource(fleet.env, 1)
        self._leases = 0
        self._claims, self._settlements = _Batcher(self, self._run), _Batcher(self, self._free)
        for process in (self._start(), self._background()):
            fleet.env.process(process)

    def on_loop(self, seconds: float) -> Process:
        """Use the worker's event loop."""
        with self._loop.request() as turn:
            yield turn
            yield from self.fleet.of_worker(seconds)

    def _start(self) -> Process:
        # The workers of a fleet did not start at the same instant.
        yield self._env.timeout(self.fleet.random.uniform(0, 0.01))
        yield from self._deliver(self.fleet.plan.slots)

    def _deliver(self, slots: int) -> Process:
        """Get the hints of `slots` tasks, or of fewer if the queue has fewer."""
        left = self.fleet.take(slots)
        while left:
            hints = min(left, _READ)
            left -= hints
            yield from self.fleet.of_broker(hints)
            self._claims.add(hints)

    def _run(self, claimed: int) -> Process:
        self._leases += claimed
        yield from self.on_loop(claimed * self.fleet.costs.worker_task / 2)
        mean = self.fleet.plan.task_seconds
        if not mean:
            self._settlements.add(claimed)
            return
        for _ in range(claimed):
            ending = self._env.timeout(self.fleet.random.expovariate(1 / mean))
            assert ending.callbacks is not None
            ending.callbacks.append(lambda _event: self._settlements.add(1))

    def _free(self, settled: int) -> Process:
        self._leases -= settled
        self.fleet.end(settled)
        yield from self.on_loop(settled * self.fleet.costs.worker_task / 2)
        yield from self._deliver(settled)

    def _background(self) -> Process:
        """The worker's statements beside its tasks. Each second: polls, presence and duties. At every _RENEW_SECONDS
        also a renewal of each lease.
        """
        fleet, costs = self.fleet, self.fleet.costs
        yield self._env.timeout(fleet.random.uniform(0, 1))
        for second in count(1):
            leases = self._leases if second % _RENEW_SECONDS == 0 else 0
            yield from fleet.of_database(costs.database_idle_worker + leases * costs.database_renewal)
            yield self._env.timeout(1)


def simulate(costs: Costs, plan: Plan, *, seed: int, seconds: float = 3.0, warm_up: float = 2.0) -> Outcome:
    """Drain the backlog of the plan; without one, work for `seconds` after a warm-up."""
    env = simpy.Environment()
    fleet = _Fleet(env, costs, plan, Random(seed))  # noqa: S311 - the same seed gives the same table
    for _ in range(plan.workers):
        _Worker(fleet)
    if plan.backlog is not None:
        return _measure(fleet, fleet.done)
    env.run(until=warm_up)
    return _measure(fleet, warm_up + seconds)


def _measure(fleet: _Fleet, until: simpy.Event | float) -> Outcome:
    """Run the simulation until the event or the time. Returns the outcome of this part alone."""
    began, ended, used = fleet.env.now, fleet.ended, dict(fleet.used)
    fleet.statements.clear()
    fleet.env.run(until=until)
    lasted, statements = fleet.env.now - began, fleet.statements
    times = sorted(time for _, time in statements)
    return Outcome(
        seconds=lasted,
        tasks=fleet.ended - ended,
        database=(fleet.used["database"] - used["database"]) / lasted,
        broker=(fleet.used["broker"] - used["broker"]) / lasted,
        worst_commit=times[int(len(times) * 0.99)] if times else 0.0,
        batch=sum(tasks for tasks, _ in statements) / max(1, len(statements)),
    )
