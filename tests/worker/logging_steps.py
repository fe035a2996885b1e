"""Pipelines whose handlers log: inline, plain and isolated."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.plain_attempt import PlainAttempt
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done, File, Snooze
from leasehold.domain.work import Work

log = logging.getLogger("shop")


class Script(BaseModel):
    does: str = "ok"


AT_ONCE = (timedelta(milliseconds=1),)
talking = Pipeline(
    "talking",
    params=Script,
    module="tests.worker.logging_steps",
    steps=[Step("talk", max_attempts=2, retry_ladder=AT_ONCE)],
)
#: Its handler logs, and then hangs: within its time limit a busy machine must have written what it logs.
hanging = Pipeline(
    "hanging",
    params=Script,
    module="tests.worker.logging_steps",
    steps=[Step("talk", max_attempts=1, timeout=timedelta(seconds=5))],
)
patient = Pipeline("patient", params=Script, module="tests.worker.logging_steps", steps=[Step("talk", max_attempts=1)])
plain = Pipeline("plain", params=Script, module="tests.worker.logging_steps", steps=[Step("talk", max_attempts=1)])
apart = Pipeline(
    "apart",
    params=Script,
    module="tests.worker.logging_steps",
    steps=[
        Step("first", writes="a.txt", isolated=True, max_attempts=1, retry_ladder=AT_ONCE),
        Step("second", needs=("first",), reads=("first",), writes="b.txt", isolated=True),
    ],
)
#: Set by a test: a handler waits for it.
GO_ON: list[asyncio.Event] = []


def pipelines() -> Pipelines:
    return Pipelines(talking, hanging, patient, plain, apart)


async def lose_a_task_of_others() -> None:
    """A failed task of another context goes here. asyncio reports its error then, in this attempt's context."""

    async def fail() -> None:
        raise RuntimeError("the secret of another tenant")

    tasks = [asyncio.get_running_loop().create_task(fail(), context=contextvars.Context())]
    await asyncio.wait(tasks)
    tasks.clear()
    gc.collect()


async def chat() -> None:
    for number in range(5000):
        log.info("line %s", number)


TALES = {"chatty": chat, "collect": lose_a_task_of_others}


@talking.handles("talk")
@hanging.handles("talk")
@patient.handles("talk")
async def talk(attempt: Attempt) -> Any:
    does = attempt.params.does
    if does == "nothing":
        return None
    if does == "emit":
        return await emit(attempt)
    log.info("attempt %s begins", attempt.number)
    attempt.log.info("to its own logger", hats=2)
    await asyncio.to_thread(log.warning, "in a thread")
    if does == "fail":
        raise Permanent("no_hats", "there are none")
    if does == "bug":
        buy_a_hat()
    if does == "flaky" and attempt.number == 1:
        raise Retryable("not yet", code="not_yet")
    if does == "hang":
        await the_hat_maker()
    if does in TALES:
        await TALES[does]()
    if does == "wait":
        await GO_ON[-1].wait()
    return None


async def emit(attempt: Attempt) -> Any:
    """The first attempt fails in the middle, the second snoozes once."""
    again = bool(await attempt.note())
    for number in range(3):
        assert attempt.emit(f"{'again' if again else attempt.number}.{number}")
    if attempt.number == 1:
        raise Retryable("not yet", code="not_yet")
    return None if again else Snooze(timedelta(milliseconds=1), {"seen": True})


def buy_a_hat() -> None:
    raise ZeroDivisionError("no hats")


async def the_hat_maker() -> None:
    await asyncio.sleep(3600)


@plain.handles("talk")
def talk_plainly(attempt: PlainAttempt) -> Any:
    log.info("in the worker's thread")
    if attempt.params.does == "emit":
        return {"fits": [attempt.emit({"number": number}) for number in range(12)]}
    attempt.log.info("to its own logger")
    buy_a_hat()
    return None


@apart.handles("first")
def first(work: Work) -> Done:
    log.info("a child works")
    work.emit("from a child")
    sys.stdout.write("printed\n")
    if work.params.does == "bug":
        buy_a_hat()
    if work.params.does == "fail":
        raise Permanent("no_hats", "there are none")
    if work.params.does == "die":
        log.warning("it dies")
        os.kill(os.getpid(), signal.SIGKILL)
    (work.directory / "a.txt").write_text("a")
    return Done(files={"a.txt": File(Path("a.txt"), "text/plain")})


@apart.handles("second")
def second(work: Work) -> Done:
    log.info("another child works")
    work.emit(["from another"])
    (work.directory / "b.txt").write_text("b")
    return Done(files={"b.txt": File(Path("b.txt"), "text/plain")})
