"""Declaring a kind of work: its steps, what each reads, and the limits it runs under.

A declaration is light: the API imports it to validate parameters and to write the rows. The handlers live in
`Pipeline.module`, which only a worker (for isolated steps, only its child process) imports.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from leasehold.backoff import DEFAULT_LADDER
from leasehold.errors import DeclarationError

NAME = re.compile(r"^[a-z][a-z0-9_-]{0,62}$")
MIB = 1024 * 1024


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
class Step:
    """One step: `UNIQUE(job, step)` makes it one row, however often it is announced.

    `needs`: steps that must have succeeded. `reads`: inputs of the job or outputs of needed steps, downloaded
    before the handler runs. `writes`: the primary output, stored last, so that its presence proves the rest.
    `version` belongs to the bytes: raise it when the same input would give other bytes.
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
    ) -> None:
        if not NAME.match(name):
            raise DeclarationError(f"pipeline name {name!r} must match {NAME.pattern}")
        self.name = name
        self.version = version
        self.params = params
        self.inputs = inputs
        self.module = module
        self.steps: tuple[Step, ...] = self._ordered(steps)
        self.by_name: dict[str, Step] = {step.name: step for step in self.steps}
        self.handlers: dict[str, Callable[..., Any]] = {}

    def _ordered(self, steps: list[Step]) -> tuple[Step, ...]:
        names = [step.name for step in steps]
        if not names:
            raise DeclarationError(f"pipeline {self.name} has no steps")
        if len(set(names)) != len(names):
            raise DeclarationError(f"pipeline {self.name} declares a step twice")
        known = {step.name: step for step in steps}
        for step in steps:
            if unknown := [need for need in step.needs if need not in known]:
                raise DeclarationError(f"{self.name}.{step.name} needs unknown steps {unknown}")
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
