"""Declares a pipeline: its steps, the files that the steps read, and their limits.

A declaration is light, because the API imports it to validate parameters and to write rows. The handlers are in
`Pipeline.module`, which the API never imports. The worker imports it, except if the steps are isolated (they run in a
sandbox): then only the worker's child processes import it.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from leasehold.domain.backoff import DEFAULT_LADDER
from leasehold.domain.errors import DeclarationError
from leasehold.domain.json_pointer import find_value
from leasehold.domain.option_types import check_time, check_whole

#: A function that takes the worker's settings (leasehold.settings.Settings), and opens the object that the pipeline's
#: inline handlers share. (Inline handlers run in the worker's own process.)
Opener: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Any]]
#: A function that takes an attempt of an inline step, and returns a context. The worker enters the context before the
#: attempt, and leaves it afterwards.
Around: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]
#: Like Around, but the context yields whether there is room for the attempt.
Room: TypeAlias = Callable[[Any], AbstractAsyncContextManager[bool]]
#: An Opener that also takes the worker's registry of pipelines.
RegistryOpener: TypeAlias = Callable[[Any, Any], AbstractAsyncContextManager[Any]]
#: A function that takes the worker's settings, and the files of an isolated step by output name. It changes the files
#: before the worker stores them.
Finisher: TypeAlias = Callable[[Any, Mapping[str, Path]], None]
#: What happens to a new run while another run of the same scope (see RunTerms) is unfinished. allow: both run at the
#: same time. reject_same_scope: the new run is refused. queue_same_scope: the new run waits. replace_same_scope: the
#: other run is cancelled, and the new run waits for its end.
Concurrency: TypeAlias = Literal["allow", "reject_same_scope", "queue_same_scope", "replace_same_scope"]
#: The form of the names of steps and queues.
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
#: The form of the names of pipelines. A task of an app is the pipeline `APP.TASK`.
PIPELINE_NAME = re.compile(r"(?=.{1,63}\Z)[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)?")
MIB = 1024 * 1024


def pinned_queue(queue: str, label: str | None) -> str:
    """The name of the queue for the tasks of `queue` that only workers with the label `label` may claim. If `label` is
    None, every worker may claim them, and the name is `queue`.
    """
    return queue if label is None else f"{queue}@{label}"


def unpinned_queue(queue: str) -> str:
    """The queue as the step declares it, without the label."""
    return queue.partition("@")[0]


class NoParams(BaseModel):
    """The parameters of a pipeline that has none."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an isolated step's child process may use at most. Exceeding a limit ends the attempt, not the worker."""

    memory_bytes: int = 1024 * MIB  # of address space
    cpu_seconds: int = 120
    file_bytes: int = 512 * MIB  # of each file that it writes
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class SkipIf:
    """A condition: a job skips the step if the job's parameters have the value `equals` at the JSON pointer (RFC 6901).
    A step that needs the skipped step then waits for the steps that the skipped step needs.
    """

    pointer: str
    equals: Any = True

    def holds(self, params: Any) -> bool:
        """Whether the condition is true for `params`."""
        try:
            value = find_value(params, self.pointer)
        except LookupError:
            return False
        return _are_equal(value, self.equals)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In Python `True == 1`, but `true` and 1 are different JSON values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a pipeline. A job has one row for it in the table `task`: `UNIQUE (job_id, step)`.

    `needs`: steps that must have succeeded before this step runs.
    `reads`: inputs of the job or outputs of needed steps. The worker downloads them before the handler runs.
    `writes`: the primary output. The worker stores it last, so if it exists, the step's other outputs exist, too. The
    key of an output's object has the output's name and, except for parts, no step. So a step replaces another step's
    output of the same name.
    `version`: raise it when the code gives other output bytes for the same input.
    `part`: this step runs only when another step fans out into it (verdicts.FanOut). A part may read any step.
    `cancelable`: whether a cancel may interrupt a running attempt. If not, the job stops when the attempt has ended.
    `retry_ladder`: the delays before the second attempt, the third, and so on. A template over HTTP that uses the
    step's handler has its own delays, in its retry policy.
    `timeout_is_final`: after an attempt that runs longer than `timeout`, there is no further attempt.
    `isolated`: the handler runs in a sandboxed child process. If not, the step is inline: the worker itself runs it.
    `external`: external workers do the step over HTTP. They claim it by `queue`.
    `workflow`: the handler is a workflow of an app, which keeps the run's journal. A run has one journal.
    `handler`: `PIPELINE.STEP`, the name of a step that is declared in code. The handler of that step does this step,
    too. The templates that clients write over HTTP use this field.
    """

    name: str
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: str | None = None
    queue: str = "default"
    max_attempts: int = 5
    timeout: timedelta = timedelta(minutes=5)
    retry_ladder: tuple[timedelta, ...] = DEFAULT_LADDER
    timeout_is_final: bool = False
    isolated: bool = False
    limits: Limits = field(default_factory=Limits)
    version: int = 1
    part: bool = False
    cancelable: bool = True
    skip_if: SkipIf | None = None
    external: bool = False
    workflow: bool = False
    handler: str | None = None
    timeout_seconds: int | None = None  # a template's time limit; it overrides the code's `timeout`

    def __post_init__(self) -> None:
        for text in (self.name, self.queue):
            given: object = text  # for type checkers it is a str, but a program may pass anything
            if not isinstance(given, str):
                raise DeclarationError(f"step {self.name!r}: its name and its queue are str, not {given!r}")
        if not NAME.fullmatch(self.name):
            raise DeclarationError(f"step name {self.name!r} must match {NAME.pattern}")
        if not NAME.fullmatch(self.queue):
            raise DeclarationError(f"step {self.name}: queue {self.queue!r} must match {NAME.pattern}")
        check_whole(f"step {self.name}: max_attempts", self.max_attempts)
        check_time(f"step {self.name}: timeout", self.timeout)
        if self.max_attempts < 1:
            raise DeclarationError(f"step {self.name}: max_attempts must be at least 1")
        if self.timeout <= timedelta(0):
            raise DeclarationError(f"step {self.name}: timeout must be positive")
        ladder: object = self.retry_ladder  # a program may pass anything
        if not isinstance(ladder, list | tuple) or not all(isinstance(delay, timedelta) for delay in ladder):
            raise DeclarationError(
                f"step {self.name}: retry_ladder is a tuple of timedelta, not {ladder!r}:"
                " write retry_ladder=(timedelta(seconds=60),)"
            )
        if not ladder:
            raise DeclarationError(f"step {self.name}: the retry ladder must have at least one delay")


#: The grace of a cancel (see RunTerms) is at most this long, because a client waits until the cancelled run has
#: stopped.
MAX_GRACE = timedelta(hours=1)
#: The longest delay of a run, about ten years.
MAX_DELAY = timedelta(days=3660)


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The terms of a pipeline's runs: which may run at the same time, how long each may take, and who may start them.

    `concurrency`: what happens to a new run while another run of the same scope is unfinished. Two runs have the same
    scope if they were submitted with the same `scope`, the same `scope_id`, and the same values of the parameters that
    `dedupe_keys` names.
    `timeout`: the longest time that a run may take, once its scope and its concurrency limits have let it start.
    `start_within`: the longest time that a run may wait for its scope and its limits. None: no bound.
    `grace`: after a cancel, a running step has this time to stop, and a workflow has this time to undo its work. The
    platform stores the grace in whole seconds, at most MAX_GRACE.
    """

    title: str = ""
    description: str = ""
    concurrency: Concurrency = "allow"
    dedupe_keys: tuple[str, ...] = ()
    timeout: timedelta | None = None
    start_within: timedelta | None = None
    cancelable: bool = True  # a client may cancel a run
    grace: timedelta = timedelta(seconds=30)
    repeatable: bool = True  # a client may start a run of the pipeline again (rerun)
    schedulable: bool = True  # a schedule may start runs of the pipeline
    offered: bool = True  # clients may start runs of this pipeline through /v1/runs
    unlimited: bool = False  # exempt from declared concurrency limits: the pipeline does the platform's own work

    def __post_init__(self) -> None:
        for name, time in (("timeout", self.timeout), ("start_within", self.start_within)):
            if time is not None:
                check_time(name, time)
        check_time("grace", self.grace)
        if not timedelta(0) <= self.grace <= MAX_GRACE:
            raise DeclarationError(f"the grace of a cancel is 0 to {MAX_GRACE.total_seconds():g} s, not {self.grace}")


@dataclass(frozen=True, slots=True)
class PipelineLimit:
    """A concurrency limit of one pipeline's runs. It counts the runs of each tenant separately. `at_most`: how many
    runs may be admitted and unfinished at once. `per_minute`: how many runs may be admitted within a minute. None: no
    such bound. `pointer`: a JSON pointer into the parameters. Each value found there has a limit of its own, which
    counts only the runs with that value.
    """

    at_most: int | None = None
    per_minute: int | None = None
    pointer: str | None = None


class Pipeline:
    """A named, versioned set of steps. A wrong declaration raises DeclarationError when its module is imported."""

    def __init__(
        self,
        name: str,
        *,
        steps: list[Step],
        module: str,
        params: type[BaseModel] = NoParams,
        inputs: tuple[str, ...] = (),
        version: int = 1,
        terms: RunTerms | None = None,
        slots: str | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        """`slots`: the name of a setting with the number of worker slots that only this pipeline's inline steps use.

        Use `slots` for steps that wait for servers of strangers, because a slow server must not hold the slots of other
        pipelines. The queues of these steps must have no steps of other pipelines.

        `preload`: modules that load slowly, and that isolated handlers import only when they run. The pipeline's zygote
        (the process from which its child processes are forked) loads them once, after the worker has begun to serve. So
        the first run waits for them, but the worker's start does not.
        """
        if not PIPELINE_NAME.fullmatch(name):
            raise DeclarationError(f"pipeline name {name!r} must match {PIPELINE_NAME.pattern}")
        self.name = name
        self.version = version
        self.params = params
        self.inputs = inputs
        self.module = module
        self.terms = terms if terms is not None else RunTerms()
        self.steps: tuple[Step, ...] = self._check_and_sort(steps)
        self.by_name: dict[str, Step] = {step.name: step for step in self.steps}
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.slots = slots
        self.preload = preload
        self.opener: Opener | None = None
        #: The pipeline of the run that starts when a run of this pipeline fails or expires (transitions/webhooks.py).
        self.on_failure: Pipeline | None = None
        #: Concurrency limits of this pipeline's runs, beside those that an operator declares.
        self.limits: tuple[PipelineLimit, ...] = ()
        #: The worker enters this context around each inline attempt. The context gets the handler's error, and must not
        #: swallow it.
        self.around: Around | None = None
        #: The worker enters this context before `around`. If there is no room, the attempt snoozes, and the step runs
        #: again later.
        self.room: Room | None = None
        self.registry_opener: RegistryOpener | None = None
        self.finishers: dict[str, Finisher] = {}

    def _check_and_sort(self, steps: list[Step]) -> tuple[Step, ...]:
        """The steps, each after the steps that it needs. Raises DeclarationError."""
        if all(step.part for step in steps):
            raise DeclarationError(f"pipeline {self.name} has no steps")
        by_name = {step.name: step for step in steps}
        if len(by_name) != len(steps):
            raise DeclarationError(f"pipeline {self.name} declares a step twice")
        written = [step.writes for step in steps if step.writes is not None and not step.part]
        if len(set(written)) != len(written):
            raise DeclarationError(f"pipeline {self.name} has two steps that write the same output")
        self._check_needs(steps, by_name)
        try:
            order = list(graphlib.TopologicalSorter({s.name: s.needs for s in steps}).static_order())
        except graphlib.CycleError as cycle:
            raise DeclarationError(f"pipeline {self.name} has a cycle: {cycle.args[1]}") from cycle
        for step in steps:
            self._check_reads(step, by_name)
        return tuple(by_name[name] for name in order)

    def _check_needs(self, steps: list[Step], by_name: dict[str, Step]) -> None:
        for step in steps:
            if unknown_needs := [need for need in step.needs if need not in by_name or by_name[need].part]:
                raise DeclarationError(f"{self.name}.{step.name} needs unknown steps {unknown_needs}")
            if step.part and step.needs:
                raise DeclarationError(f"{self.name}.{step.name} is a part: it needs no steps, a fan-out starts it")

    def _check_reads(self, step: Step, by_name: dict[str, Step]) -> None:
        # Refuse a read that is neither an input of the job nor the output of an ancestor. (The ancestors are the steps
        # that this step needs, directly or by way of other steps.) Then refuse two reads that give files of the same
        # name.
        #
        # A part may read every step that is not a part, including the step that fans out into it. The part reads the
        # outputs that are committed when it runs.
        ancestors = {other.name for other in by_name.values() if not other.part} if step.part else set()
        unvisited = list(step.needs)
        while unvisited:
            name = unvisited.pop()
            if name not in ancestors:
                ancestors.add(name)
                unvisited.extend(by_name[name].needs)
        if unreadable := [read for read in step.reads if read not in self.inputs and read not in ancestors]:
            raise DeclarationError(
                f"{self.name}.{step.name} reads {unreadable}: neither an input nor a step that it needs"
            )

        names = [read if read in self.inputs else by_name[read].writes for read in step.reads]
        if twice := sorted({name for name in names if name is not None and names.count(name) > 1}):
            raise DeclarationError(
                f"{self.name}.{step.name} reads {twice} twice: inputs and outputs need names of their own"
            )

    def move_to(self, queue: str) -> None:
        """Put all steps into the queue. Call this only for a pipeline that has no run yet and that no worker serves.
        Raises DeclarationError if `queue` cannot be the name of a queue.
        """
        self.steps = tuple(replace(step, queue=queue) for step in self.steps)
        self.by_name = {step.name: step for step in self.steps}

    def handles(self, step: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that registers the handler of `step`. Use it in the pipeline's `module`."""
        if step not in self.by_name:
            raise DeclarationError(f"pipeline {self.name} has no step {step!r}")

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            if self.handlers.get(step, handler) is not handler:
                raise DeclarationError(f"{self.name}.{step} has two handlers")
            self.handlers[step] = handler
            return handler

        return register

    def skipped(self, params: Any) -> frozenset[str]:
        """The names of the steps that a job with these parameters skips."""
        return frozenset(step.name for step in self.steps if step.skip_if is not None and step.skip_if.holds(params))

    def has_code_of(self, step: Step, with_children: Collection[str]) -> bool:
        """Whether this worker can run the step. It can if the step's handler is loaded here or, for an isolated step,
        in child processes. `with_children`: the pipelines for which this worker has child processes.
        """
        return self.name in with_children if step.isolated else step.name in self.handlers

    def opens(self, opener: Opener) -> Opener:
        """A decorator that registers the pipeline's opener. An opener opens, for example, a client or a pool.

        A worker enters the opener once for all inline attempts of this pipeline, and leaves the opener when it stops.
        Handlers read the opened object as `attempt.opened`. Use the decorator in the pipeline's `module`.
        """
        if self.opener not in (None, opener):
            raise DeclarationError(f"pipeline {self.name} has two openers")
        self.opener = opener
        return opener

    def opens_with_pipelines(self, opener: RegistryOpener) -> RegistryOpener:
        """Do the same as `opens`, for steps that act on jobs of other pipelines. The opener also gets the worker's
        registry.
        """
        self.registry_opener = opener
        return opener

    def opened(self, settings: Any, pipelines: Any) -> AbstractAsyncContextManager[Any] | None:
        """The context manager that this pipeline's opener returns. None: the pipeline has no opener."""
        if self.registry_opener is not None:
            return self.registry_opener(settings, pipelines)
        return None if self.opener is None else self.opener(settings)

    def finishes(self, step: str, finisher: Finisher) -> None:
        """Register a function that the worker itself calls, in a thread, on the files of the isolated `step`.

        Use it where the last change to the files needs a secret, which the child process must not see. The function
        must not parse the files, because they come from outside.
        """
        if step not in self.by_name or not self.by_name[step].isolated:
            raise DeclarationError(f"pipeline {self.name} has no isolated step {step!r}")
        self.finishers[step] = finisher
