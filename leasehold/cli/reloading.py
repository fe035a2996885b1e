"""Starts the API and the worker of `leasehold dev` again when a Python file of the current folder changes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic

from rich.console import Console

from leasehold.cli.installation import Installation, environment_with
from leasehold.embedded.process import EmbeddedError
from leasehold.runtime.exits import describe_exit

_POLL_SECONDS = 0.5  # between two checks of the files
#: If a process ends by itself, `_Keeper` starts it again after a pause. The first pause is _FIRST_PAUSE_SECONDS. Each
#: further pause is twice as long as the previous pause, up to _LONGEST_PAUSE_SECONDS.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
#: Names of folders without the user's code. Hidden folders are also skipped.
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "build", "dist"})
#: The most files that are watched. Reading the times of more files would take too long.
_MOST_FILES = 5000
#: A program that loads the code which the first argument names. On stderr it writes a NUL and then the error. The NUL
#: divides the error from what the user's code itself prints to stderr.
_CHECK_PROGRAM = """
import sys
from leasehold.domain.errors import CodeBroken, DeclarationError
from leasehold.domain.registry import Pipelines
try:
    Pipelines.from_source(sys.argv[1])
except DeclarationError as error:
    sys.exit(f"\\0{error}\\n{error.trace}" if isinstance(error, CodeBroken) else f"\\0{error}")
"""


async def reload_on_change(installation: Installation, console: Console) -> None:
    """Watch the folder until cancelled, and restart the processes when a file changes. If the changed code cannot be
    loaded, print its error, and leave the running processes alone. If a process does not start with the changed code,
    print the error, and start the processes at the next change.

    Also watch the processes. A process that ends by itself is started again, because nobody else would do its work.
    """
    old_times = await asyncio.to_thread(times_of, Path.cwd())
    keeper = _Keeper(installation, console)
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        new_times = await asyncio.to_thread(times_of, Path.cwd())
        changed_names = sorted(
            path.name for path in new_times.keys() | old_times.keys() if new_times.get(path) != old_times.get(path)
        )
        if not changed_names:
            await keeper.check()
            continue
        old_times = new_times
        if (problem := await _problem(installation.environment)) is not None:
            console.print(f"{changed_names[0]} changed, and cannot be loaded: {problem}", style="red", markup=False)
            continue
        try:
            await installation.restart()
        except EmbeddedError as error:  # the next change starts the processes again
            console.print(f"{changed_names[0]} changed, and does not start: {error}", style="red", markup=False)
            keeper = _Keeper(installation, console, waits_for_change=True)
        else:
            console.print(f"{changed_names[0]} changed: loaded again", highlight=False, markup=False)
            keeper = _Keeper(installation, console)


class _Keeper:
    """Starts a process again if it ends by itself, until the code changes. The pauses grow, so that code that ends its
    process again and again does not fill the terminal. `waits_for_change`: start nothing until the code changes,
    because a start just failed.
    """

    def __init__(self, installation: Installation, console: Console, *, waits_for_change: bool = False) -> None:
        self._installation = installation
        self._console = console
        self._waits_for_change = waits_for_change
        self._pause = _FIRST_PAUSE_SECONDS
        self._start_at: float | None = None  # when to start the ended processes; None: no process has ended

    async def check(self) -> None:
        """Check whether a process has ended. If so, print that, and start the process again once its pause is over."""
        if self._waits_for_change:
            return
        if self._start_at is None:
            for server in self._installation.ended:
                self._print(server.failure(f"has ended, and starts again in {self._pause:g} s"))
                self._start_at = monotonic() + self._pause
        elif monotonic() >= self._start_at:
            self._start_at, self._pause = None, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            try:
                await self._installation.restart_ended()
            except EmbeddedError as error:
                self._print(f"{error}\nThe next change of a file starts it again.")
                self._waits_for_change = True

    def _print(self, sentence: object) -> None:
        self._console.print(str(sentence), style="red", highlight=False, markup=False)


async def _problem(environment: Mapping[str, str]) -> str | None:
    """The error of the changed code; None: the code can be loaded. A new process tries to load the code, because this
    process has loaded the old code. `environment`: the environment of the processes that run the code.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHECK_PROGRAM, environment["LEASEHOLD_PIPELINES"],
        env=environment_with(environment), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode == 0:
        return None
    text = errors.decode(errors="replace").strip()
    if "\0" in text:  # _CHECK_PROGRAM has written the error's sentence
        return text.rpartition("\0")[2]
    # For any other error, the sentence is the last line of the traceback. A process that was killed has written
    # nothing.
    return text.rpartition("\n")[2] or f"the process that loads it: {describe_exit(process.returncode or 0)}"


def times_of(folder: Path) -> dict[Path, int]:
    """When each Python file below the folder was last changed, in nanoseconds. At most _MOST_FILES files."""
    return dict(_times(folder))


def _times(folder: Path) -> Iterator[tuple[Path, int]]:
    files_left = _MOST_FILES
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        for name in files:
            if name.endswith(".py") and files_left:
                files_left -= 1
                path = Path(directory) / name
                try:
                    yield path, path.stat().st_mtime_ns
                except OSError:  # the file was deleted between the two calls
                    continue
