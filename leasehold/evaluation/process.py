"""A child process of the evaluator as its parent sees it: start, ask, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import orjson

from leasehold.evaluation.child import ANSWER, KEPT, QUESTION

_MOST_ANSWER = 64 * 1024
_GRACE_SECONDS = 2.0


class Died(Exception):
    """The child ended without an answer. `spent`: because the answer took too much CPU time."""

    def __init__(self, *, spent: bool) -> None:
        super().__init__("too much CPU time" if spent else "the child died")
        self.spent = spent


class Late(Exception):
    """No answer came in time by the clock on the wall; the child has been killed."""


class Process:
    """One question at a time. `asked`: how many it has answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.asked = 0

    @classmethod
    async def start(cls, memory_bytes: int) -> Process:
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-B", "-P", "-m", "leasehold.evaluation.child", str(memory_bytes),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, question: bytes, cpu_seconds: float, wall_seconds: float) -> dict[str, Any]:
        """Raises Died or Late; then, as when it is cancelled, the child is gone."""
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(wall_seconds):
                self._process.stdin.write(QUESTION.pack(len(question), cpu_seconds) + question)
                await self._process.stdin.drain()
                answer = await self._answer()
        except TimeoutError:
            await self.end()
            raise Late from None
        except (OSError, EOFError):  # IncompleteReadError is an EOFError
            raise Died(spent=await self._status() == -signal.SIGPROF) from None
        except BaseException:
            await self.end()
            raise
        self.asked += 1
        return answer

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (size,) = ANSWER.unpack(await self._process.stdout.readexactly(ANSWER.size))
        if size > _MOST_ANSWER:
            raise EOFError
        answer: dict[str, Any] = orjson.loads(await self._process.stdout.readexactly(size))
        return answer

    async def _status(self) -> int:
        """Of a child that closed its pipe: how it ended, as subprocess gives it. One that lingers is killed."""
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            return await self.end()

    async def end(self) -> int:
        """Kill it if it still runs, and reap it. Its status as subprocess gives it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # Popen's own would reap it first, and asyncio lose its status
        return await asyncio.shield(asyncio.ensure_future(self._process.wait()))
