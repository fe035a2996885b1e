"""The parent's side of the child process that evaluates clients' JSON Schemas. `Process` starts the child, sends it
questions, and kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import orjson

from leasehold.evaluation.child import ANSWER, ENVIRONMENT, QUESTION

_MAX_ANSWER_BYTES = 64 * 1024
#: The seconds that a child may take to end after it has closed its pipe.
_GRACE_SECONDS = 2.0


class Died(Exception):
    """The child ended without an answer. `cpu_spent`: the child had used all its CPU time."""

    def __init__(self, *, cpu_spent: bool) -> None:
        super().__init__("too much CPU time" if cpu_spent else "the child died")
        self.cpu_spent = cpu_spent


class Late(Exception):
    """No answer came in time. The child has been killed."""


class Process:
    """A child process that answers one question at a time. `answered`: how many questions it has answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.answered = 0

    @classmethod
    async def start(cls, memory_bytes: int) -> Process:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
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
        """The child's answer. Raises Died or Late. After such an error, and after a cancellation, the child is dead.

        `question`: the question as JSON (evaluator._Question.encode).
        """
        assert self._process.stdin is not None
        # QUESTION and ANSWER (child.py) are the heads of the two messages. A head has the length of its message.
        try:
            async with asyncio.timeout(wall_seconds):
                self._process.stdin.write(QUESTION.pack(len(question), cpu_seconds) + question)
                await self._process.stdin.drain()
                answer = await self._read_answer()
        except TimeoutError:
            await self.end()
            raise Late from None
        except (OSError, EOFError):  # IncompleteReadError is an EOFError
            # SIGPROF kills a child that has used all its CPU time (child.py).
            raise Died(cpu_spent=await self._exit_status() == -signal.SIGPROF) from None
        except BaseException:
            await self.end()
            raise
        self.answered += 1
        return answer

    async def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (size,) = ANSWER.unpack(await self._process.stdout.readexactly(ANSWER.size))
        if size > _MAX_ANSWER_BYTES:
            raise EOFError  # no answer is this large, so `ask` treats the child as dead
        answer: dict[str, Any] = orjson.loads(await self._process.stdout.readexactly(size))
        return answer

    async def _exit_status(self) -> int:
        """The exit status of a child that closed its pipe, as subprocess reports it. If the child does not end within
        _GRACE_SECONDS, it is killed.
        """
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            return await self.end()

    async def end(self) -> int:
        """Kill the child if it still runs, and reap it. Returns its exit status, as subprocess reports it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not Popen.kill, which would reap the child before asyncio does
        return await asyncio.shield(asyncio.ensure_future(self._process.wait()))
