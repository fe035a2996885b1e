"""Keeps spare children of one pipeline. A spare child is a process that the zygote (a process that has the handlers
loaded) has forked before a run needs it. This module also replaces a zygote that dies.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from leasehold.domain.errors import DeclarationError, LeaseholdError
from leasehold.runtime.gather import cancel_and_wait
from leasehold.worker.sandbox.child_process import ChildProcess
from leasehold.worker.sandbox.zygote_process import Recipe, Zygote

#: The number of spare children of a pipeline. With three, a picture's step and the two steps after it start
#: immediately. Without a spare child, a step waits a few milliseconds for the fork.
SPARE_CHILDREN = 3
#: While a spare child is left, each fork waits for this many seconds, because the run that has just taken a child needs
#: the cores. The fork comes sooner if the last spare child is taken.
_FORK_PAUSE_SECONDS = 0.1
#: If a zygote cannot start, or cannot fork, the next try comes after _FIRST_DELAY seconds. Each further failure doubles
#: the delay, up to _LAST_DELAY.
_FIRST_DELAY, _LAST_DELAY = 0.5, 30.0


class Spares:
    """Call `start` once, then `take` a child for each run. The caller of `take` must stop the child."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._waiting: asyncio.Queue[ChildProcess] = asyncio.Queue()  # the spare children
        self._missing = asyncio.Semaphore(SPARE_CHILDREN)  # how many spare children `_fill` still has to fork
        self._exhausted = asyncio.Event()  # set when no spare child is left
        self._idle: set[ChildProcess] = set()  # the children in `_waiting`
        self._failed = False  # the last start of a zygote, or the last fork, has failed
        self._zygote: Zygote | None = None
        self._keeper: asyncio.Task[None] | None = None  # the loop `_keep_zygote`
        self._log = structlog.get_logger().bind(pipeline=recipe.pipeline)
        self.isolation = ""  # the kernel's mechanisms that confine the children, as text from the zygote

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the zygote and of the spare children."""
        return frozenset(process.pid for process in (self._zygote, *self._idle) if process is not None)

    @property
    def failing(self) -> bool:
        """Whether there is no spare child, and the last try to start a zygote or to fork has failed."""
        return self._failed and self._waiting.empty()

    async def start(self) -> None:
        """Start the zygote, and wait until it has loaded the handlers. Raises DeclarationError when a module or a
        handler is missing.
        """
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep_zygote(started))
        await started

    async def take(self) -> ChildProcess:
        """A living child; waits until there is one."""
        while True:
            child = await self._waiting.get()
            self._remove(child)
            if self._zygote is not None and self._zygote.alive and child.usable:
                return child
            await child.stop()  # the child died while it waited, or will die with its zygote

    async def close(self) -> None:
        if self._keeper is not None:
            await cancel_and_wait(self._keeper)

    async def _keep_zygote(self, started: asyncio.Future[None]) -> None:
        """Start a zygote, and a new one whenever it dies. `started` gets the outcome of the first start."""
        delay = _FIRST_DELAY
        while True:
            try:
                await self._serve_one_zygote(started)
                delay = _FIRST_DELAY  # the zygote started, and died later
            except (LeaseholdError, OSError) as error:
                if not started.done():
                    started.set_exception(_as_declaration_error(error))
                    return
                self._failed = True
                self._log.error("the zygote does not start", reason=str(error), retry_seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)

    async def _serve_one_zygote(self, started: asyncio.Future[None]) -> None:
        """Start a zygote, keep spare children, and clean up when the zygote dies. Raises DeclarationError or OSError
        when it cannot start.
        """
        zygote = await Zygote.start(self._recipe)
        self._zygote, self.isolation = zygote, zygote.isolation
        if not started.done():
            started.set_result(None)
        tasks = [asyncio.create_task(self._fill(zygote)), asyncio.create_task(zygote.exited())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._log.error("the zygote has died; another one is started")
        finally:
            await cancel_and_wait(*tasks)
            while not self._waiting.empty():
                child = self._waiting.get_nowait()
                self._remove(child)
                await child.stop()
            self._zygote = None
            await zygote.stop()

    async def _fill(self, zygote: Zygote) -> None:
        """Fork a child whenever there are fewer than `SPARE_CHILDREN` spare children."""
        delay = _FIRST_DELAY
        while True:
            await self._missing.acquire()
            try:
                await self._wait_until_needed()
                child = await zygote.fork()
            except BaseException as error:
                self._missing.release()  # the child is still missing, also if this asyncio task is cancelled
                if not isinstance(error, OSError):
                    raise
                self._failed = True
                self._log.error("the zygote cannot fork", reason=str(error), retry_seconds=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY)
            else:
                delay = _FIRST_DELAY
                self._failed = False
                self._idle.add(child)
                self._waiting.put_nowait(child)

    async def _wait_until_needed(self) -> None:
        """Wait until no spare child is left, at most `_FORK_PAUSE_SECONDS`."""
        if self._waiting.empty():
            return
        self._exhausted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FORK_PAUSE_SECONDS):
                await self._exhausted.wait()

    def _remove(self, child: ChildProcess) -> None:
        if self._waiting.empty():
            self._exhausted.set()
        self._idle.discard(child)
        self._missing.release()


def _as_declaration_error(error: LeaseholdError | OSError) -> DeclarationError:
    if isinstance(error, DeclarationError):
        return error
    return DeclarationError(f"no child process could be started: {error}")
