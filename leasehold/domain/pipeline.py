"""Declaring a kind of work: its steps, what each reads, and the limits it runs under.

A declaration is light: the API imports it to validate parameters and to write the rows. The handlers live in
`Pipeline.module`, which only a worker (for isolated steps, only its child process) imports.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from leasehold.domain.backoff import DEFAULT_LADDER
from leasehold.domain.errors import DeclarationError

#: Opens, given the worker's leasehold.settings.Settings, what the inline handlers of a pipeline share.
Opener: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Any]]
#: Given the worker's settings and the files of an isolated step, by output name, before they are stored.
Finisher: TypeAlias = Callable[[Any, Mapping[str, Path]], None]
Concurrency: TypeAlias = Literal["allow", "reject_same_scope", "queue_same_scope", "replace_same_scope"]
NAME = re.compile(r"^[a-z][a-z0-9_-]{0,62}$")
MIB = 1024 * 1024


def pinned_queue(queue: str, label: str | None) -> str:
    """The queue of work that only workers with the label do."""
    return queue if label is None else f"{queue}@{label}"


def unpinned_queue(queue: str) -> str:
    """The queue as steps declare it."""
    return queue.partition("@")[0]


class NoParams(BaseModel):
    """A pipeline without parameters."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the child process of an isolated step may use; exceeding one ends the attempt, not the worker."""

    memory_bytes: int = 1024 * MIB
    cpu_seconds: int = 120
    file_bytes: int = 512 * MIB
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class SkipIf:
    """Skip the step when the job's parameters have `equals` at the JSON pointer `pointer` (RFC 6901)."""

    pointer: str
    equals: Any = True

    def holds(self, params: Any) -> bool:
        found = params
        for part in self.pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return False
        return bool(found == self.equals) and isinstance(found, bool) == isinstance(self.equals, bool)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `UNIQUE(job, step)` makes it one row, however often it is announced.

    `needs`: steps that must have succeeded. `reads`: inputs of the job or outputs of needed steps, downloaded
    before the handler runs. `writes`: the primary output, stored last, so that its presence proves the rest.
    `version` belongs to the bytes: raise it when the same input would give other bytes.
    `part`: no step of its own, but what another step spreads into (verdicts.FanOut).
    `cancelable`: may be interrupted; else it runs to its end, and the job stops after it.
    `external`: done by workers outside, over HTTP, which ask by `queue`.
    `handler`: `pipeline.step` of other code that does it (templates written over HTTP).
    """

    name: str
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: str | None = None
    queue: str = "default"
    max_attempts: int = 5
    timeout: timedelta = timedelta(minutes=5)
    retry_ladder: tuple[timedelta, ...] = DEFAULT_LADDER
    isolated: bool = False
    limits: Limits = field(default_factory=Limits)
    version: int = 1
    part: bool = False
    cancelable: bool = True
    skip_if: SkipIf | None = None
    external: bool = False
    handler: str | None = None
    timeout_seconds: int | None = None  # a template's own, over the code's `timeout`

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise DeclarationError(f"step name {self.name!r} must match {NAME.pattern}")
        if not NAME.match(self.queue):
            raise DeclarationError(f"step {self.name}: queue {self.queue!r} must match {NAME.pattern}")
        if self.max_attempts < 1:
            raise DeclarationError(f"step {self.name}: max_attempts must be at least 1")
        if self.timeout <= timedelta(0):
            raise DeclarationError(f"step {self.name}: timeout must be positive")
        if not self.retry_ladder:
            raise DeclarationError(f"step {self.name}: the retry ladder must have a delay")


@dataclass(frozen=True, slots=True)
class RunTerms:
    """How runs of a pipeline stand to one another and to time.

    `concurrency`: allow | reject_same_scope | queue_same_scope | replace_same_scope; runs are of the same scope when
    scope, scope_id and the parameters named in `dedupe_keys` are equal. `timeout`: of a whole run, from when
    it is admitted at its scope and its limits; `start_within`: how long it may wait for that; None: any time. `grace`:
    how long a cancelled step may take to stop.
    """

    title: str = ""
    description: str = ""
    concurrency: Concurrency = "allow"
    dedupe_keys: tuple[str, ...] = ()
    timeout: timedelta | None = None
    start_within: timedelta | None = None
    cancelable: bool = True
    grace: timedelta = timedelta(seconds=30)
    repeatable: bool = True
    schedulable: bool = True
    offered: bool = True  # clients may run it through /v1/runs
    unlimited: bool = False  # the platform's own work: no declared limit holds it back


class Pipeline:
    """A named, versioned set of steps. Wrong declarations are refused here, at import."""

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
    ) -> None:
        """`slots`: the setting that says how many slots of their own the inline steps have in a worker: for steps that
        wait for strangers, who must not hold everybody's. Their queues are this pipeline's alone.
        """
        if not NAME.match(name):
            raise DeclarationError(f"pipeline name {name!r} must match {NAME.pattern}")
        self.name = name
        self.version = version
        self.params = params
        self.inputs = inputs
        self.module = module
        self.terms = terms if terms is not None else RunTerms()
        self.steps: tuple[Step, ...] = self._ordered(steps)
        self.by_name: dict[str, Step] = {step.name: step for step in self.steps}
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.slots = slots
        self.opener: Opener | None = None
        self.finishers: dict[str, Finisher] = {}

    def _ordered(self, steps: list[Step]) -> tuple[Step, ...]:
        names = [step.name for step in steps]
        if all(step.part for step in steps):
            raise DeclarationError(f"pipeline {self.name} has no steps")
        if len(set(names)) != len(names):
            raise DeclarationError(f"pipeline {self.name} declares a step twice")
        known = {step.name: step for step in steps}
        for step in steps:
            if unknown := [need for need in step.needs if need not in known or known[need].part]:
                raise DeclarationError(f"{self.name}.{step.name} needs unknown steps {unknown}")
            if step.part and step.needs:
                raise DeclarationError(f"{self.name}.{step.name} is a part: what it is a part of comes before it")
        try:
            order = list(graphlib.TopologicalSorter({s.name: s.needs for s in steps}).static_order())
        except graphlib.CycleError as cycle:
            raise DeclarationError(f"pipeline {self.name} has a cycle: {cycle.args[1]}") from cycle
        for step in steps:
            self._check_reads(step, known)
        return tuple(known[name] for name in sorted(order, key=lambda name: (order.index(name),)))

    def _check_reads(self, step: Step, known: dict[str, Step]) -> None:
        ancestors: set[str] = set()
        queue = list(step.needs)
        while queue:
            name = queue.pop()
            if name not in ancestors:
                ancestors.add(name)
                queue.extend(known[name].needs)
        if wrong := [read for read in step.reads if read not in self.inputs and read not in ancestors]:
            raise DeclarationError(f"{self.name}.{step.name} reads {wrong}: neither an input nor a step that it needs")

    def handles(self, step: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the handler of `step`; used in the pipeline's `module`."""
        if step not in self.by_name:
            raise DeclarationError(f"pipeline {self.name} has no step {step!r}")

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            if self.handlers.get(step, handler) is not handler:
                raise DeclarationError(f"{self.name}.{step} has two handlers")
            self.handlers[step] = handler
            return handler

        return register

    def opens(self, opener: Opener) -> Opener:
        """Register what a worker opens once for all inline attempts of this pipeline, and closes when it stops: a
        client, a pool. Used in the pipeline's `module`; handlers find it as `attempt.opened`.
        """
        if self.opener not in (None, opener):
            raise DeclarationError(f"pipeline {self.name} opens two things")
        self.opener = opener
        return opener

    def finishes(self, step: str, finisher: Finisher) -> None:
        """Have the worker itself do the last thing to the files of the isolated `step`, in a thread: what needs a
        secret that the child must not see. It parses nothing.
        """
        if step not in self.by_name or not self.by_name[step].isolated:
            raise DeclarationError(f"pipeline {self.name} has no isolated step {step!r}")
        self.finishers[step] = finisher
