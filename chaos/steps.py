"""The handlers of the chaos pipelines: each inline one says in the journal that it began and that it ended."""

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
from chaos.pipelines import flaky, fork, hopeless, long, parked, poison, short, unlike, wrong
from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done, Snooze
from leasehold.domain.work import Work

_BRIEF = 0.05
_LONG = 3.0
#: So often a handler says that it goes on: a worker that has lost its lease must stop it.
_TICK = 0.2
_FAILURES = 2


@asynccontextmanager
async def _told(attempt: Attempt, seconds: float = _BRIEF) -> AsyncIterator[Done]:
    """The side effect of a chaos step is its lines in the journal: that it began, that it goes on, that it ended or was
    stopped. Its answer says which run it was.
    """
    said = {"run": uuid.uuid4().hex, "task": str(attempt.task_id), "step": attempt.step, "number": attempt.number}
    journal.note("begin", **said)
    try:
        while seconds > _TICK:
            await asyncio.sleep(_TICK)
            journal.note("tick", **said)
            seconds -= _TICK
        await asyncio.sleep(seconds)
        yield Done(value={"run": said["run"]})
    except BaseException:
        journal.note("stop", **said)
        raise
    journal.note("end", **said)


def text_of(step: str, before: bytes, text: str) -> bytes:
    """What a step of `short` writes: a function of the step, of what it read, and of the job's words."""
    return f"{step} {text} {hashlib.sha256(before).hexdigest()}\n".encode()


async def _pass_on(attempt: Attempt, read: str | None, write: str) -> Done:
    async with _told(attempt) as done:
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
    async with _told(attempt, _LONG) as done:
        pass
    return done


@long.handles("tell")
@fork.handles("top")
@fork.handles("left")
@fork.handles("right")
@fork.handles("join")
@wrong.handles("good")
async def brief(attempt: Attempt) -> Done:
    async with _told(attempt) as done:
        pass
    return done


@parked.handles("poll")
async def poll(attempt: Attempt) -> Done | Snooze:
    async with _told(attempt) as done:
        asked = (await attempt.note()).get("asked", 0)
    return done if asked else Snooze(timedelta(seconds=1), {"asked": asked + 1})


@flaky.handles("try")
async def succeed_at_last(attempt: Attempt) -> Done:
    async with _told(attempt) as done:
        if attempt.number <= _FAILURES:
            raise Retryable("not yet", code="not_yet")
    return done


@hopeless.handles("try")
async def never_succeed(attempt: Attempt) -> Done:
    async with _told(attempt):
        raise Retryable("not now", code="not_now")


@wrong.handles("bad")
async def refuse(attempt: Attempt) -> Done:
    async with _told(attempt):
        raise Permanent("refused", "this can never be done")


@hopeless.handles("never")
@wrong.handles("never")
async def unreachable(attempt: Attempt) -> Done:
    async with _told(attempt) as done:
        pass
    return done


@poison.handles("die")
def die(_work: Work) -> Done:
    os.kill(os.getpid(), signal.SIGKILL)
    return Done()


@poison.handles("never")
async def after_death(attempt: Attempt) -> Done:
    async with _told(attempt) as done:
        pass
    return done


@unlike.handles("write")
async def write(attempt: Attempt) -> Done:
    async with _told(attempt) as done:
        await attempt.write("unlike.txt", uuid.uuid4().hex.encode() * 4, "text/plain")
    return done
