"""The kinds of work that a chaos run does beside pictures; each ends in a way that is known before.

Light, as declarations are. Delays are seconds instead of the usual minutes: waiting is not what is tried here.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.domain.registry import Pipelines
from leasehold.pipelines import shipped

#: What makes a run of `mendable` fail, and what it is retried with.
BROKEN, MENDED = "broken", "mended"
#: The workflow that is cancelled, and its call that undoes its work (chaos/workflows.py).
TAKES_BACK, PUT_BACK = "chaos.takes_back", "put_back"
#: Where external workers claim.
ABROAD_QUEUE = "abroad"
#: More than goes up in one piece: see SINGLE_PUT_BYTES of chaos/settings.py.
LARGE_BYTES = 11 * 1024 * 1024
PARTS = 4
SOON = (timedelta(seconds=0.5), timedelta(seconds=1), timedelta(seconds=2))


class Words(BaseModel):
    """What a job's outputs are made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(default="", max_length=100)


def _step(name: str, *needs: str, **options: object) -> Step:
    # Isolated steps have as many slots as a worker has children; their queue is not to hold up the others'.
    queue = "chaos-isolated" if options.get("isolated") else "chaos"
    options = {"queue": queue} | options
    return Step(name, needs=needs, retry_ladder=SOON, **options)  # type: ignore[arg-type]  # Step's own fields


def _pipeline(name: str, *steps: Step) -> Pipeline:
    return Pipeline(name, params=Words, module="chaos.steps", steps=list(steps))


#: Three steps, each reading what the one before wrote.
short = _pipeline(
    "short",
    _step("first", writes="first.txt"),
    _step("second", "first", reads=("first",), writes="second.txt"),
    _step("third", "second", reads=("second",), writes="third.txt"),
)
#: Longer than a chaos run's leases.
long = _pipeline("long", _step("wait"), _step("tell", "wait"))
#: Less than its first step takes: a cancel has to end it.
long.terms = RunTerms(grace=timedelta(seconds=2))
#: Two branches, and a step that needs both.
fork = _pipeline("fork", _step("top"), _step("left", "top"), _step("right", "top"), _step("join", "left", "right"))
#: Gives its lease back once and comes again.
parked = _pipeline("parked", _step("poll"))
#: Fails twice and then does not: more attempts than a chaos run can cost it.
flaky = _pipeline("flaky", _step("try", max_attempts=30))
#: Fails for as long as it is allowed to.
hopeless = _pipeline("hopeless", _step("try", max_attempts=3), _step("never", "try"))
#: Fails at once, and for good.
wrong = _pipeline("wrong", _step("good"), _step("bad", "good"), _step("never", "bad"))
#: Kills the child process that it runs in.
poison = _pipeline("poison", _step("die", isolated=True), _step("never", "die"))
#: Breaks the rule that equal work makes equal bytes: only a create-only put can keep such outputs whole.
unlike = _pipeline("unlike", _step("write", writes="unlike.txt"))

#: Fans out, and joins.
spread = _pipeline("spread", _step("gather"), _step("piece", part=True), _step("after", "gather"))
#: Fails by its payload, and is retried with another.
mendable = _pipeline("mendable", _step("try"), _step("after", "try"))
#: Concurrency limits are declared for these: so many at once, and so many a minute.
gated = _pipeline("gated", _step("work"))
paced = _pipeline("paced", _step("work"))
#: Done by external workers, between two steps of ours.
abroad = _pipeline(
    "abroad", _step("before"), _step("far", "before", external=True, queue=ABROAD_QUEUE), _step("after", "far")
)
#: Writes an object that goes up in parts.
large = _pipeline("large", _step("write", writes="large.bin"))

#: What clients change their minds about.
STOPPABLE = (short, long, parked, abroad)
#: Asked for over HTTP, and in the client's own transaction.
BY_HTTP = (short, long, fork, parked, flaky, hopeless, wrong, poison, unlike, spread, gated, paced, abroad, large)
BY_DIRECT = (short, long)
KINDS = (*BY_HTTP, mendable)


def tried() -> Pipelines:
    """Ours, and what ships, with the shorter delays: for the platform's processes. It changes the shipped pipelines of
    this process; any other process reads `declared`.
    """
    for pipeline in shipped():
        pipeline.steps = tuple(replace(step, retry_ladder=SOON) for step in pipeline.steps)
        pipeline.by_name = {step.name: step for step in pipeline.steps}
    return declared()


def declared() -> Pipelines:
    """Ours, and what ships."""
    pipelines = shipped()
    for kind in (*KINDS, *_workflows()):
        pipelines.add(kind)
    return pipelines


def _workflows() -> list[Pipeline]:
    """Of chaos/workflows.py; none where this code is loaded by the release that is out, which has no workflows."""
    if find_spec("leasehold.workflows") is None:
        return []
    app: Any = import_module("chaos.workflows").app
    return [pipeline for pipeline in app.pipelines() if pipeline.name.startswith(f"{app.name}.")]
