"""A pipeline of plain functions, and of an async one that does what it should not."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Cancelled, Retryable
from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.domain.plain_attempt import PlainAttempt
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done
from leasehold.telemetry import logs


class Script(BaseModel):
    does: str = "ok"


#: What handlers tell the tests, and what lets them go on.
HEARD: list[Any] = []
#: The attempts that hang, or did.
HUNG: list[int] = []
GO_ON = threading.Event()
AT_ONCE = (timedelta(milliseconds=1),)

plain = Pipeline(
    "plain",
    params=Script,
    module="tests.worker.plain_steps",
    steps=[
        Step("first", max_attempts=2, retry_ladder=AT_ONCE),
        Step("second", needs=("first",), reads=("first",), retry_ladder=AT_ONCE),
    ],
    terms=RunTerms(grace=timedelta(seconds=1)),
)
#: Its handler hangs. The time limit of other steps must not expire when a busy machine stands still.
hanging = Pipeline(
    "hanging",
    params=Script,
    module="tests.worker.plain_steps",
    steps=[Step("first", max_attempts=2, timeout=timedelta(seconds=1), retry_ladder=AT_ONCE)],
)
rude = Pipeline("rude", params=Script, module="tests.worker.plain_steps", steps=[Step("only")])


@plain.handles("first")
@hanging.handles("first")
def first(attempt: PlainAttempt) -> Done | None:
    match attempt.params.does:
        case "flaky" if attempt.number == 1:
            raise Retryable("not yet", code="flaky")
        case "exit":
            raise SystemExit(3)
        case "hang":
            HUNG.append(attempt.number)
            GO_ON.wait(300)
            try:
                attempt.write("late.txt", b"too late", "text/plain")
            except Cancelled:
                HEARD.append("cancelled")
                raise
        case "work":
            HEARD.append("working")
            while True:
                attempt.checkpoint()
                time.sleep(0.01)
    attempt.progress(25)
    attempt.progress(percent=50, summary="half")
    attempt.write("greeting.txt", b"hello", "text/plain")
    said = logs._FACTS.get()  # what each line of the log says in this context
    return Done(value={"thread": threading.current_thread().name, "job_id": str(said["job_id"])})


@plain.handles("second")
def second(attempt: PlainAttempt) -> dict[str, Any]:
    return {"read": attempt.read("greeting.txt").decode(), "first": attempt.value("first")["job_id"]}


@rude.handles("only")
async def only(_attempt: Attempt) -> None:
    time.sleep(0.3)  # noqa: ASYNC251 - this is what it is for


def pipelines() -> Pipelines:
    return Pipelines(plain, hanging, rude)
