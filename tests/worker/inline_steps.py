"""A pipeline whose parameters say what its handlers do: every way an inline step can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done, FanOut, Snooze
from leasehold.settings import Settings


class Script(BaseModel):
    does: str = "ok"


AT_ONCE = (timedelta(milliseconds=1),)
scripted = Pipeline(
    "scripted",
    params=Script,
    module="tests.worker.inline_steps",
    steps=[
        Step("first", max_attempts=2, retry_ladder=AT_ONCE),
        Step("second", needs=("first",), reads=("first",), retry_ladder=AT_ONCE),
    ],
)

#: Its handler hangs. The time limit of other steps must not expire when a busy machine stands still.
hanging = Pipeline(
    "hanging",
    params=Script,
    module="tests.worker.inline_steps",
    steps=[Step("first", max_attempts=2, timeout=timedelta(seconds=1), retry_ladder=AT_ONCE)],
)


class Shared:
    """What all attempts of a worker share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.users = 0
        self.closed = False


#: Every one that a worker opened, the newest last.
OPENED: list[Shared] = []


@scripted.opens
@asynccontextmanager
async def shared(settings: Settings) -> AsyncIterator[Shared]:
    OPENED.append(Shared(settings))
    yield OPENED[-1]
    OPENED[-1].closed = True


def pipelines() -> Pipelines:
    return Pipelines(scripted, hanging, writing)


writing = Pipeline(
    "writing",
    params=Script,
    module="tests.worker.inline_steps",
    steps=[
        Step("whole"),
        Step("part", part=True, max_attempts=2, retry_ladder=AT_ONCE),
        Step("reader", needs=("whole",), reads=("whole",)),
    ],
)


@writing.handles("whole")
async def whole(attempt: Attempt) -> Any:
    """Writes, snoozes or fans out, and writes one of its outputs again."""
    first = not await attempt.note() and await attempt.joined() is None
    await attempt.write("again.txt", b"one" if first else b"three", "text/plain")
    if not first:
        return Done()
    await attempt.write("kept.txt", b"kept", "text/plain")
    if attempt.params.does == "snooze":
        return Snooze(timedelta(milliseconds=1), {"seen": 1})
    seconds = {"fan_out": 2, "fan out nothing": None, "fan out what fails": "fails"}
    second = seconds.get(attempt.params.does, float("nan"))
    return FanOut("part", [1, second])


@writing.handles("part")
async def part(attempt: Attempt) -> Done:
    item = await attempt.item()
    if item == "fails":
        raise Retryable("this part never works", code="part_fails")
    await attempt.write("page.txt", f"page {item}".encode(), "text/plain")
    return Done(value={"item": item})


@writing.handles("reader")
async def reader(attempt: Attempt) -> Done:
    return Done(value={name: (await attempt.read(name)).decode() for name in ("again.txt", "kept.txt")})


class Abort(BaseException):
    """As an error of a library that no `except Exception` may catch."""


class Unprintable(Exception):
    """As an exception of a library whose `__str__` reads an attribute that was never set."""

    def __str__(self) -> str:
        raise AttributeError("no detail")


#: What the handler raises, by what it does.
RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": partial(RuntimeError, "a bug \x00 of somebody's"),
    "permanent": partial(Permanent, "hopeless", "this will never work"),
    "long code": partial(Permanent, "".join(map(chr, range(0x4E00, 0x4E00 + 2000))), "an answer in place of a code"),
    "exit": SystemExit,
    "close": GeneratorExit,
    "abort": Abort,
    "unprintable": Unprintable,
}


async def _with_nul(_attempt: Attempt) -> Any:
    return Done(value={"text": "a NUL: \x00"})


async def _too_large(_attempt: Attempt) -> Any:
    return Done(value={"number": 2**64})


async def _nonsense(_attempt: Attempt) -> Any:
    return 42


async def _diverged(_attempt: Attempt) -> Any:
    return Done(value={"losses": [1.0, (2.0, float("nan"))], "nothing": None})


async def _diverged_in_a_note(attempt: Attempt) -> Any:
    await attempt.remember({"loss": float("inf")})


async def _remembered_elsewhere(attempt: Attempt) -> Any:
    own = await asyncpg.connect(attempt.opened.settings.database_url.get_secret_value())
    try:
        async with own.transaction():
            await attempt.remember({"n": 1}, own)
    finally:
        await own.close()


async def _remembered_in_a_session(attempt: Attempt) -> Any:
    await attempt.remember({"n": 1}, AsyncSession())


async def _diverged_in_a_snooze(_attempt: Attempt) -> Any:
    return Snooze(timedelta(milliseconds=1), {"loss": float("-inf")})


#: How the handler gives what cannot be stored, by what it does.
BAD: dict[str, Callable[[Attempt], Awaitable[Any]]] = {
    "unstorable": _with_nul,
    "unstorable number": _too_large,
    "nonsense": _nonsense,
    "not finite": _diverged,
    "not finite in a note": _diverged_in_a_note,
    "a connection of its own": _remembered_elsewhere,
    "a session of SQLAlchemy": _remembered_in_a_session,
    "not finite in a snooze": _diverged_in_a_snooze,
}


async def _cancelled() -> None:
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


async def _exit() -> None:
    """As a command line: argparse and click exit."""
    raise SystemExit(0)


@scripted.handles("first")
@hanging.handles("first")
async def first(attempt: Attempt) -> Any:
    match attempt.params.does:
        case "flaky" if attempt.number == 1:
            raise Retryable("not yet", code="flaky")
        case does if does in RAISED:
            error = RAISED[does]()
            raise error
        case "fill":
            await asyncio.to_thread(Path("/dev/full").write_bytes, b"more than there is room for")
        case "hang" | "await what was cancelled" as does:
            await (_cancelled() if does != "hang" else asyncio.sleep(3600))
        case "exit in a task":
            await asyncio.gather(_exit())
        case "share":
            attempt.opened.users += 1
            (attempt.directory / "note.txt").write_text("hello")
            await attempt.write_file("note.txt", attempt.directory / "note.txt", "text/plain")
            return Done(value={"directory": str(attempt.directory)})
        case "snooze" | "remember":
            return await _twice(attempt)
        case does if does in BAD:
            return await BAD[does](attempt)
    await attempt.write("greeting.txt", b"hello", "text/plain")
    return Done(value={"attempt": attempt.number})


async def _twice(attempt: Attempt) -> Any:
    """Leaves a note, and the second time says what it was."""
    if noted := await attempt.note():
        return Done(value=noted)
    if attempt.params.does == "snooze":
        return Snooze(timedelta(milliseconds=1), {"seen": 1})
    await attempt.remember({"tried": attempt.number})
    raise Retryable("after it was written", code="flaky")


@scripted.handles("second")
async def second(attempt: Attempt) -> Done:
    if attempt.params.does == "remember":
        return Done(value={"said": await attempt.value("first"), "nobody": await attempt.value("nobody")})
    if attempt.params.does in ("ok", "flaky"):
        assert await attempt.read("greeting.txt") == b"hello"
    return Done()
