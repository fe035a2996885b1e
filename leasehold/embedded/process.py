"""Runs servers as child processes that end with this process. If this process is root, the servers run as `nobody`.

Each server has a guard (guard.py) between it and this process. The guard kills the server if this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasehold.domain.errors import LeaseholdError

#: The program of the guards.
GUARD = Path(__file__).with_name("guard.py")
#: An EmbeddedError shows this many lines from the end of the server's log.
LOG_LINES_SHOWN = 15


class EmbeddedError(LeaseholdError):
    """An embedded server could not be installed, started or used. If the server was started, the message ends with the
    last lines of its log.
    """


@dataclass(frozen=True)
class RunAs:
    """The ids of the user and the group that a server runs as; -1: the user or the group of this process."""

    uid: int = -1
    gid: int = -1

    @property
    def is_other_user(self) -> bool:
        """Whether the server runs as another user than this process."""
        return self.uid >= 0

    @property
    def user(self) -> int | None:
        """The uid, as `subprocess` expects it."""
        return self.uid if self.is_other_user else None

    @property
    def group(self) -> int | None:
        return self.gid if self.is_other_user else None

    def give(self, path: Path) -> Path:
        """Make the server's user the owner of the path."""
        if self.is_other_user:
            os.chown(path, self.uid, self.gid)
        return path

    def make_directory(self, path: Path) -> Path:
        """Make a directory that only the server's user can read, if it does not exist."""
        path.mkdir(mode=0o700, exist_ok=True)
        return self.give(path)

    def write_file(self, path: Path, text: str) -> Path:
        """Write a file that only the server's user can read. If this process dies meanwhile, `path` is unchanged."""
        new_file = path.with_name(f"{path.name}.new")
        new_file.unlink(missing_ok=True)
        with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        return self.give(new_file).replace(path)


def unprivileged() -> RunAs:
    """The user `nobody` if this process is root; else the user of this process. PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return RunAs()
    nobody = pwd.getpwnam("nobody")
    return RunAs(nobody.pw_uid, nobody.pw_gid)


class Server:
    """One running server behind its guard."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        run_as: RunAs,
        last_signal: signal.Signals = signal.SIGKILL,
    ) -> Server:
        """Start `argv` with the environment `env` and no other variables, and write its output to `log`. If this
        process dies, the guard sends `last_signal` to the server, and kills it a little later.
        """
        guard = [sys.executable, "-I", "-S", GUARD, os.getpid(), run_as.uid, run_as.gid, int(last_signal)]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *map(str, guard),
                *map(str, argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,  # Ctrl-C must reach this process only, which then stops the servers in order
            )
        return cls(name, process, log)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code, once the server and all processes that it started have ended."""
        return await self._process.wait()

    async def wait_until_ready(self, probe: Coroutine[Any, Any, None], *, seconds: float) -> None:
        """Wait until `probe`, which asks the server whether it is ready, returns. If `probe` raises or takes longer
        than `seconds`, kill the server.

        Raises:
            EmbeddedError: the server did not answer within `seconds`. Also raises what `probe` raises.
        """
        try:
            await asyncio.wait_for(probe, seconds)
        except TimeoutError:
            await self.kill()
            raise self.failure(f"did not answer within {seconds:g} s") from None
        except BaseException:
            await self.kill()
            raise

    async def stop(self, number: signal.Signals, *, grace: float, again: float | None = None) -> None:
        """Send the signal `number`, and wait for at most `grace` seconds until the server has ended. If it has not, and
        `again` is given, send the same signal a second time, and wait for at most `again` seconds. Then kill the
        server. The signal goes to the guard as one byte, and the guard sends it to the server.
        """
        await self._send_and_wait(number, grace)
        if again is not None:
            await self._send_and_wait(number, again)
        await self.kill()

    async def _send_and_wait(self, number: signal.Signals, seconds: float) -> None:
        """Send the signal `number`, and wait for at most `seconds` until the server has ended."""
        pipe = self._process.stdin
        if self.running and pipe is not None:
            with contextlib.suppress(ConnectionError):
                pipe.write(bytes([number]))
                await pipe.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), seconds)

    async def kill(self) -> None:
        """SIGKILL the server. Its guard kills the processes that the server started."""
        pipe = self._process.stdin
        if self.running and pipe is not None:
            with contextlib.suppress(ConnectionError):
                pipe.write(bytes([signal.SIGKILL]))
                await pipe.drain()
        await self.wait()
        if pipe is not None:
            pipe.close()

    def failure(self, event: str) -> EmbeddedError:
        """An error that names the `event`, such as "did not start", and shows the end of the server's log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return EmbeddedError("\n  ".join([f"{self.name} {event}; the end of its log:", *lines]))


def event_of_stop_signals() -> asyncio.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set. A terminal that closes sends SIGHUP. If this process ignores
    SIGHUP, as under `nohup`, SIGHUP stays ignored.
    """
    stop_event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop_event.set)
    return stop_event


async def kill_if_running(process: asyncio.subprocess.Process) -> None:
    """Kill a child program that still runs, for example after the wait for it was cancelled."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            process.kill()
        await process.wait()


async def run(
    name: str, argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path, run_as: RunAs
) -> None:
    """Run a program to its end.

    Raises:
        EmbeddedError: the program exited with a code other than 0.
    """
    program = await Server.start(name, argv, log=log, env=env, cwd=cwd, run_as=run_as)
    try:
        code = await program.wait()
    finally:
        await program.kill()
    if code:
        raise program.failure(f"exited with {code}")
