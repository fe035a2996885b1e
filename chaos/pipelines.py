"""The kinds of work of a chaos run, beside those that ship. It is known in advance how each kind ends.

This module only declares the kinds, because the API imports it; the handlers are in chaos/steps.py. Delays are seconds
instead of minutes, because a run does not test long waits.
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

#: The text with which a run of `mendable` fails, and the text with which a retry succeeds.
BROKEN, MENDED = "broken", "mended"
#: The workflow that is cancelled, and its call that undoes its work (chaos/workflows.py).
UNDOING_WORKFLOW, UNDO_CALL = "chaos.takes_back", "put_back"
#: The queue of the external workers.
ABROAD_QUEUE = "abroad"
#: More than SINGLE_PUT_BYTES of chaos/settings.py: the upload is a multipart upload.
LARGE_BYTES = 6 * 1024 * 1024
PARTS = 4
SOON = (timedelta(seconds=0.5), timedelta(seconds=1), timedelta(seconds=2))


class Words(BaseModel):
    """The parameters of a job: its outputs are made of the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(default="", max_length=100)


def _step(name: str, *needs: str, **options: object) -> Step:
    # A worker runs only as many isolated steps at once as it has children. A queue of their own keeps isolated steps
    # from delaying the other steps.
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
#: The first step takes longer than a lease of a chaos run lasts.
long = _pipeline("long", _step("wait"), _step("tell", "wait"))
#: The grace is shorter than the first step: a cancel has to end the step.
long.terms = RunTerms(grace=timedelta(seconds=2))
#: Two branches, and a step that needs both.
fork = _pipeline("fork", _step("top"), _step("left", "top"), _step("right", "top"), _step("join", "left", "right"))
#: Snoozes once.
parked = _pipeline("parked", _step("poll"))
#: Fails twice, then succeeds. It has more attempts than the faults of a run can use up.
flaky = _pipeline("flaky", _step("try", max_attempts=30))
#: Every attempt fails with an error that allows another attempt.
hopeless = _pipeline("hopeless", _step("try", max_attempts=3), _step("never", "try"))
#: Fails immediately, and for good.
wrong = _pipeline("wrong", _step("good"), _step("bad", "good"), _step("never", "bad"))
#: Kills the child process that it runs in.
poison = _pipeline("poison", _step("die", isolated=True), _step("never", "die"))
#: Breaks the rule that equal work makes equal bytes. So only create-only puts keep a later attempt from changing an
#: output.
unlike = _pipeline("unlike", _step("write", writes="unlike.txt"))

#: Fans out, and joins.
spread = _pipeline("spread", _step("gather"), _step("piece", part=True), _step("after", "gather"))
#: Fails by its payload, and is retried with another.
mendable = _pipeline("mendable", _step("try"), _step("after", "try"))
#: The load declares limits for these two: how many run at once, and how many start a minute.
gated = _pipeline("gated", _step("work"))
paced = _pipeline("paced", _step("work"))
#: External workers do the middle step.
abroad = _pipeline(
    "abroad", _step("before"), _step("far", "before", external=True, queue=ABROAD_QUEUE), _step("after", "far")
)
#: Writes an object with a multipart upload.
large = _pipeline("large", _step("write", writes="large.bin"))

#: The kinds that clients cancel.
STOPPABLE = (short, long, parked, abroad)
#: The kinds that clients submit over HTTP, and those that they submit in transactions of their own.
BY_HTTP = (short, long, fork, parked, flaky, hopeless, wrong, poison, unlike, spread, gated, paced, abroad, large)
BY_DIRECT = (short, long)
KINDS = (*BY_HTTP, mendable)


def with_short_delays() -> Pipelines:
    """All pipelines, with short delays for those that ship, too. Only the platform's processes call this, because it
    changes the shipped pipelines in the calling process. Other processes call `declared`.
    """
    for pipeline in shipped():
        pipeline.steps = tuple(replace(step, retry_ladder=SOON) for step in pipeline.steps)
        pipeline.by_name = {step.name: step for step in pipeline.steps}
    return declared()


def declared() -> Pipelines:
    """The pipelines of this module, the workflows of a chaos run, and the pipelines that ship."""
    pipelines = shipped()
    for kind in (*KINDS, *_workflows()):
        pipelines.add(kind)
    return pipelines


def _workflows() -> list[Pipeline]:
    """The workflows of chaos/workflows.py. A process of the release also loads this module: it has no workflows, and
    gets an empty list.
    """
    if find_spec("leasehold.workflows") is None:
        return []
    app: Any = import_module("chaos.workflows").app
    return [pipeline for pipeline in app.pipelines() if pipeline.name.startswith(f"{app.name}.")]
