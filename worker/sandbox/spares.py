"""The children of one pipeline that wait for a run, forked before they are needed; and their zygote, which is replaced
when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from leasehold.domain.errors import DeclarationError, LeaseholdError
from leasehold.worker.sandbox.child_process import ChildProcess
from leasehold.worker.sandbox.zygote_process import Recipe, Zygote

#: A picture's next two steps begin at once; a fork takes a few milliseconds.
WAITING = 3
#: While one still waits, the next is forked so many seconds later: a run that has just begun needs the cores itself.
_UNHURRIED = 0.1
_FIRST_DELAY, _LAST_DELAY = 0.5, 30.0  # seconds between failing attempts to start a zygote


class Spares:
    """`start`, then `take` a child for each run; whoever takes one stops it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._waiting: asyncio.Queue[ChildProcess] = asyncio.Queue()
        self._room = asyncio.Semaphore(WAITING)
        self._none_waits = asyncio.Event()
        self._idle: set[ChildProcess] = set()
        self._zygote: Zygote | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._log = structlog.get_logger().bind(pipeline=recipe.pipeline)
        self.isolation = ""

    @property
    def pids(self) -> frozenset[int]:
        """The zygote's, and those of the children that wait."""
        return frozenset(one.pid for one in (self._zygote, *self._idle) if one is not None)

    async def start(self) -> None:
        """Raises DeclarationError when a module or a handler is missing."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(first))
        await first

    async def take(self) -> ChildProcess:
        while True:
            child = await self._waiting.get()
            self._left(child)
            if self._zygote is not None and self._zygote.alive and child.usable:
                return child
            await child.stop()  # it died while it waited, or is about to, with its zygote

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Have a zygote, for as long as the pool is open."""
        delay = _FIRST_DELAY
        while True:
            try:
                await self._live(first)
                delay = _FIRST_DELAY  # it lived, and died
            except (LeaseholdError, OSError) as error:
                if not first.done():
                    first.set_exception(_as_declaration(error))
                    return
                self._log.error("no child processes", reason=str(error), retry_seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)

    async def _live(self, first: asyncio.Future[None]) -> None:
        """One zygote's life. Raises DeclarationError and OSError when it cannot start."""
        zygote = await Zygote.start(self._recipe)
        self._zygote, self.isolation = zygote, zygote.isolation
        if not first.done():
            first.set_result(None)
        ends = [asyncio.create_task(self._fill(zygote)), asyncio.create_task(zygote.exited())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._log.error("the process that forks children has ended; another one is started")
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            while not self._waiting.empty():
                child = self._waiting.get_nowait()
                self._left(child)
                await child.stop()
            self._zygote = None
            await zygote.stop()

    async def _fill(self, zygote: Zygote) -> None:
        delay = _FIRST_DELAY
        while True:
            await self._room.acquire()
            try:
                await self._until_wanted()
                child = await zygote.fork()
            except BaseException as error:
                self._room.release()
                if not isinstance(error, OSError):
                    raise
                self._log.error("no child process", reason=str(error), retry_seconds=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY)
            else:
                delay = _FIRST_DELAY
                self._idle.add(child)
                self._waiting.put_nowait(child)

    async def _until_wanted(self) -> None:
        if self._waiting.empty():
            return
        self._none_waits.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNHURRIED):
                await self._none_waits.wait()

    def _left(self, child: ChildProcess) -> None:
        if self._waiting.empty():
            self._none_waits.set()
        self._idle.discard(child)
        self._room.release()


def _as_declaration(error: LeaseholdError | OSError) -> DeclarationError:
    if isinstance(error, DeclarationError):
        return error
    return DeclarationError(f"no child process could be started: {error}")
