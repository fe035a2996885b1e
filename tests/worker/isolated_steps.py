"""Pipelines of isolated steps, of which the later ones read what the first made."""

from __future__ import annotations

import time
from datetime import timedelta

from pydantic import BaseModel

from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work


class Script(BaseModel):
    second: str = "ok"


halves = Pipeline(
    "halves",
    params=Script,
    module="tests.worker.isolated_steps",
    steps=[
        Step("first", writes="a.txt", isolated=True, retry_ladder=(timedelta(milliseconds=1),)),
        Step("second", needs=("first",), reads=("first",), writes="b.txt", isolated=True),
    ],
)


thirds = Pipeline(
    "thirds",
    params=Script,
    module="tests.worker.isolated_steps",
    steps=[
        Step("first", writes="a.txt", isolated=True),
        Step("second", needs=("first",), reads=("first",), writes="b.txt", isolated=True),
        Step("third", needs=("second",), reads=("first",), writes="c.txt", isolated=True),
    ],
)


joins = Pipeline(
    "joins",
    params=Script,
    inputs=("start",),
    module="tests.worker.isolated_steps",
    steps=[
        Step("first", reads=("start",), writes="a.txt", isolated=True),
        Step("second", needs=("first",), reads=("first", "start"), writes="b.txt", isolated=True),
    ],
)


class Fault(BaseModel):
    """Until `busy_until` (seconds since 1970) it asks for another attempt."""

    busy_until: float = 0.0


#: Its ladder is the default one: a minute, five, thirty, two hours.
faulty = Pipeline("faulty", params=Fault, module="tests.worker.isolated_steps", steps=[Step("raise", isolated=True)])


def pipelines() -> Pipelines:
    return Pipelines(halves, thirds, joins, faulty)


@faulty.handles("raise")
def raise_something(work: Work) -> Done:
    if time.time() < work.params.busy_until:
        raise Retryable("not yet", code="busy", after=timedelta(seconds=2.5))
    raise ZeroDivisionError("nobody thought of it")


@halves.handles("first")
@thirds.handles("first")
@joins.handles("first")
def first(work: Work) -> Done:
    path = work.directory / "a.txt"
    path.write_text("made by the first")
    return Done({"a.txt": File(path, "text/plain")})


@halves.handles("second")
@thirds.handles("second")
def second(work: Work) -> Done:
    read = work.files["a.txt"].read_text()
    if work.params.second == "refuse":
        raise Permanent("not_wanted", "said the second")
    if work.params.second == "wait":
        while True:  # until it is asked to stop
            work.checkpoint()
            time.sleep(0.01)
    path = work.directory / "b.txt"
    path.write_text(f"{read}, and by the second")
    return Done({"b.txt": File(path, "text/plain")})


@joins.handles("second")
def join(work: Work) -> Done:
    path = work.directory / "b.txt"
    path.write_text(f"{work.files['a.txt'].read_text()}, from {work.files['start'].read_text()}")
    return Done({"b.txt": File(path, "text/plain")})


@thirds.handles("third")
def third(work: Work) -> Done:
    path = work.directory / "c.txt"
    path.write_text(f"{work.files['a.txt'].read_text()}, and by the third")
    return Done({"c.txt": File(path, "text/plain")})
