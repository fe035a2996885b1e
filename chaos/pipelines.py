"""The kinds of work that a chaos run does beside pictures; each ends in a way that is known before.

Light, as declarations are. Delays are seconds instead of the usual minutes: waiting is not what is tried here.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.pipelines import shipped

SOON = (timedelta(seconds=0.5), timedelta(seconds=1), timedelta(seconds=2))


class Words(BaseModel):
    """What a job's outputs are made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(default="", max_length=100)


def _step(name: str, *needs: str, **said: object) -> Step:
    # Isolated steps have as many slots as a worker has children; their queue is not to hold up the others'.
    queue = "chaos-isolated" if said.get("isolated") else "chaos"
    return Step(name, needs=needs, queue=queue, retry_ladder=SOON, **said)  # type: ignore[arg-type]  # Step's own fields


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

#: What clients change their minds about.
STOPPABLE = (short, long, parked)
KINDS = (short, long, fork, parked, flaky, hopeless, wrong, poison, unlike)


def tried() -> Pipelines:
    """Ours, and what ships, with the shorter delays."""
    pipelines = shipped()
    for pipeline in pipelines:
        pipeline.steps = tuple(replace(step, retry_ladder=SOON) for step in pipeline.steps)
        pipeline.by_name = {step.name: step for step in pipeline.steps}
    for kind in KINDS:
        pipelines.add(kind)
    return pipelines
