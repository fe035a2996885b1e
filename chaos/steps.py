"""The handlers of the chaos pipelines. Each inline handler writes its begin and its end into the journal."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from chaos import journal
from chaos.pipelines import (
    BROKEN,
    LARGE_BYTES,
    PARTS,
    abroad,
    flaky,
    fork,
    gated,
    hopeless,
    large,
    long,
    mendable,
    paced,
    parked,
    poison,
    short,
    spread,
    unlike,
    wrong,
)
from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done, FanOut, Snooze
from leasehold.domain.work import Work

_BRIEF = 0.05
_LONG = 7.0
#: The seconds between two journal lines of a handler. By the lines the checker sees when a worker stopped the handler.
_TICK = 0.2
_GATED = 0.5
#: The attempts of `flaky` that fail.
_FAILURES = 2


@asynccontextmanager
async def _journaled(attempt: Attempt, seconds: float = _BRIEF) -> AsyncIterator[Done]:
    """Write into the journal that the step begins, works, and ends or is stopped. The step takes `seconds`. Its result
    has the id of this run of the handler.
    """
    fields = {"run": uuid.uuid4().hex, "task": str(attempt.task_id), "step": attempt.step, "number": attempt.number}
    journal.note("begin", **fields)
    try:
        while seconds > _TICK:
            await asyncio.sleep(_TICK)
            journal.note("tick", **fields)
            seconds -= _TICK
        await asyncio.sleep(seconds)
        yield Done(value={"run": fields["run"]})
    except BaseException:
        journal.note("stop", **fields)
        raise
    journal.note("end", **fields)


def text_of(step: str, before: bytes, text: str) -> bytes:
    """The output of a step of `short`: a function of the step, its input and the words of the job."""
    return f"{step} {text} {hashlib.sha256(before).hexdigest()}\n".encode()


async def _pass_on(attempt: Attempt, read: str | None, write: str) -> Done:
    async with _journaled(attempt) as done:
        before = await attempt.read(read) if read else b""
        await attempt.write(write, text_of(attempt.step, before, attempt.params.text), "text/plain")
    return done


@short.handles("first")
async def first(attempt: Attempt) -> Done:
    return await _pass_on(attempt, None, "first.txt")


@short.handles("second")
async def second(attempt: Attempt) -> Done:
    return await _pass_on(attempt, "first.txt", "second.txt")


@short.handles("third")
async def third(attempt: Attempt) -> Done:
    return await _pass_on(attempt, "second.txt", "third.txt")


@long.handles("wait")
async def wait(attempt: Attempt) -> Done:
    async with _journaled(attempt, _LONG) as done:
        pass
    return done


@long.handles("tell")
@fork.handles("top")
@fork.handles("left")
@fork.handles("right")
@fork.handles("join")
@wrong.handles("good")
@spread.handles("piece")
@spread.handles("after")
@mendable.handles("after")
@paced.handles("work")
@abroad.handles("before")
@abroad.handles("after")
async def brief(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        pass
    return done


@parked.handles("poll")
async def poll(attempt: Attempt) -> Done | Snooze:
    async with _journaled(attempt) as done:
        polls = (await attempt.note()).get("polls", 0)
    return done if polls else Snooze(timedelta(seconds=1), {"polls": polls + 1})


@flaky.handles("try")
async def succeed_at_last(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        if attempt.number <= _FAILURES:
            raise Retryable("not yet", code="not_yet")
    return done


@hopeless.handles("try")
async def never_succeed(attempt: Attempt) -> Done:
    async with _journaled(attempt):
        raise Retryable("not now", code="not_now")


@wrong.handles("bad")
async def refuse(attempt: Attempt) -> Done:
    async with _journaled(attempt):
        raise Permanent("refused", "this can never be done")


@hopeless.handles("never")
@wrong.handles("never")
async def unreachable(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        pass
    return done


@poison.handles("die")
def die(_work: Work) -> Done:
    os.kill(os.getpid(), signal.SIGKILL)
    return Done()


@poison.handles("never")
async def after_death(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        pass
    return done


@unlike.handles("write")
async def write(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        await attempt.write("unlike.txt", uuid.uuid4().hex.encode() * 4, "text/plain")
    return done


@spread.handles("gather")
async def gather(attempt: Attempt) -> Done | FanOut:
    async with _journaled(attempt) as done:
        joined = await attempt.joined()
    if joined is None:
        return FanOut("piece", list(range(PARTS)))
    if len(joined) != PARTS:
        raise Permanent("parts_missing", f"{len(joined)} of {PARTS} parts are there")
    return done


@mendable.handles("try")
async def fail_if_broken(attempt: Attempt) -> Done:
    async with _journaled(attempt) as done:
        if attempt.params.text == BROKEN:
            raise Permanent("broken", "the payload says so")
    return done


@gated.handles("work")
async def work(attempt: Attempt) -> Done:
    async with _journaled(attempt, _GATED) as done:
        pass
    return done


@large.handles("write")
async def write_large(attempt: Attempt) -> Done:
    """Write a sparse file, which takes neither disk nor memory."""
    async with _journaled(attempt) as done:
        path = attempt.directory / "large"
        with path.open("wb") as file:
            file.truncate(LARGE_BYTES)
        await attempt.write_file("large.bin", path, "application/octet-stream")
    return done
