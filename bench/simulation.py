"""A model of an installation by discrete events: workers, their event loops, PostgreSQL's cores and its log.

The unit is a statement of a batch: a claim or a settlement of as many tasks as wait at that moment. So the batches grow
with the load by themselves, as those of the real batchers do. A statement needs the worker's event loop, then a core of
PostgreSQL, then a flush of the log that it shares with all commits that wait for one.

What the model leaves out is written where its tables stand: docs/operations/scale.md.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from itertools import count
from random import Random
from typing import Any, Self

import simpy

Process = Generator[simpy.Event, Any, Any]

#: The most tasks of one statement (worker/parts.py).
BATCH = 128
#: Seconds that a process keeps a core while others wait for one: so processes share cores, and do not queue for them.
_SLICE = 0.001
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
    flush_seconds: float  # of the log
    trip_seconds: float  # of an empty statement
    log_bytes: float  # of a task, from its submission to its end

    @classmethod
    def of(cls, values: dict[str, float]) -> Self:
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def slowed(self, factor: float) -> Costs:
        """The costs on cores that other programs keep busy for a part of the time."""
        return replace(
            self,
            **{
                field.name: getattr(self, field.name) * factor
                for field in fields(self)
                if field.name.startswith(("worker", "database", "broker"))
            },
        )


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

    def hint(self, tasks: int) -> None:
        """The broker delivers the hints, and gets their ACKs, beside everything else."""
        seconds = tasks * self.costs.broker_task
        self.used["broker"] += seconds
        self.env.process(self._core_of_broker.work(seconds))


class _Worker:
    """Claims for at most half of its slots at once, and settles all that has ended: one statement of each at a time."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet, self._env = fleet, fleet.env
        self._loop = simpy.Resource(fleet.env, 1)
        self._free = fleet.plan.slots
        self._ended = 0
        self._may_claim, self._may_settle = fleet.env.event(), fleet.env.event()
        for process in (self._claim(), self._settle(), self._background()):
            fleet.env.process(process)

    def _on_loop(self, tasks: int) -> Process:
        """The worker's own CPU for a statement."""
        costs = self._fleet.costs
        with self._loop.request() as turn:
            yield turn
            yield from self._fleet.of_worker(costs.worker_statement + tasks * costs.worker_task / 2)

    def _claim(self) -> Process:
        # The workers of a fleet did not start at the same instant.
        yield self._env.timeout(self._fleet.random.uniform(0, 0.01))
        while True:
            tasks = self._fleet.take(min(self._free, max(1, self._fleet.plan.slots // 2), BATCH))
            if not tasks:
                self._may_claim = self._env.event()
                yield self._may_claim
                continue
            self._free -= tasks
            self._fleet.hint(tasks)
            yield from self._on_loop(tasks)
            yield from self._fleet.statement(tasks)
            self._run(tasks)

    def _run(self, tasks: int) -> None:
        mean = self._fleet.plan.task_seconds
        if not mean:
            self._end(tasks)
            return
        for _ in range(tasks):
            ending = self._env.timeout(self._fleet.random.expovariate(1 / mean))
            assert ending.callbacks is not None
            ending.callbacks.append(lambda _event: self._end(1))

    def _end(self, tasks: int) -> None:
        self._ended += tasks
        if not self._may_settle.triggered:
            self._may_settle.succeed()

    def _settle(self) -> Process:
        while True:
            tasks = min(self._ended, BATCH)
            if not tasks:
                self._may_settle = self._env.event()
                yield self._may_settle
                continue
            self._ended -= tasks
            yield from self._on_loop(tasks)
            yield from self._fleet.statement(tasks)
            self._free += tasks
            self._fleet.end(tasks)
            if not self._may_claim.triggered:
                self._may_claim.succeed()

    def _background(self) -> Process:
        """The worker's statements beside its tasks. Each second: polls, presence and duties. At every _RENEW_SECONDS
        also a renewal of each lease.
        """
        fleet, costs = self._fleet, self._fleet.costs
        yield self._env.timeout(fleet.random.uniform(0, 1))
        for second in count(1):
            leases = fleet.plan.slots - self._free if second % _RENEW_SECONDS == 0 else 0
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
