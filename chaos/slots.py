"""`Slot` runs processes of the platform, one after another. When a process ends, the slot starts the next one, with the
plan's next failpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from chaos.release import Release

_ROOT = Path(__file__).parents[1]
_RESTART_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class Slot:
    """`environment(generation)`: the environment of the process with this number; the first is 0.

    `release`: the next process runs the code of this release; None: the code of this repository.
    """

    def __init__(
        self, name: str, *, directory: Path, environment: Callable[[int], Mapping[str, str]], mutate: str = ""
    ) -> None:
        self.name = name
        self.generation = -1
        self.started: dict[str, int] = {}  # name in journals -> pid, of every process so far
        self._directory = directory
        self._environment = environment
        self._mutate = mutate
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self._up = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self.stopped_by_us = False
        self.release: Release | None = None

    @property
    def process_name(self) -> str:
        """The name of the present process in journals."""
        return f"{self.name}.{self.generation}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def log(self) -> Path:
        return self._directory / f"{self.name}.{self.generation}.log"

    def start(self) -> None:
        self._loop = asyncio.create_task(self._keep_running())

    async def until_up(self, sign: str) -> None:
        """Wait until the log of the present process contains `sign`."""
        await self._up.wait()
        while sign not in self.log.read_text(errors="replace"):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)

    def signal(self, number: signal.Signals) -> bool:
        if (pid := self.pid) is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def is_stopped(self) -> bool:
        """Whether a SIGSTOP holds the present process."""
        try:
            return self.pid is not None and _state(self.pid) == "T"
        except OSError:
            return False

    async def close(self, grace: float) -> int | None:
        """Send SIGTERM, and SIGKILL after `grace` seconds. Returns the exit code."""
        self._closing = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace)
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self._process.wait()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        return self._process.returncode if self._process is not None else None

    async def _keep_running(self) -> None:
        while not self._closing:
            self.generation += 1
            command, directory, environment = self._program()
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command, cwd=directory, env=environment, stdout=output, stderr=output,
                    preexec_fn=_die_with_parent,
                )  # fmt: skip
            self.started[self.process_name] = self._process.pid
            self._up.set()
            await self._process.wait()
            await asyncio.sleep(_RESTART_SECONDS)

    def _program(self) -> tuple[list[str], Path, dict[str, str]]:
        module, environment = self.name.partition("-")[0], self._environment(self.generation)
        if self.release is not None:
            return self.release.command(module), self.release.directory, self.release.environment(environment)
        mutation = ["--mutate", self._mutate] if self._mutate else []
        return [sys.executable, "-m", "chaos.process", module, *mutation], _ROOT, dict(environment)


def _state(pid: int) -> str:
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
