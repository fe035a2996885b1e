"""Makes, names and removes the directories of attempts.

An attempt's directory lies beneath the worker's work directory. A child (the process of an isolated step) reads its
inputs in `in` and writes to `out`. The worker asks the child to stop by making a file (frames.CANCEL) in the attempt's
directory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from uuid import UUID

import structlog

from leasehold.domain.lease import Lease
from leasehold.worker.sandbox import frames

log = structlog.get_logger(__name__)


class Directories:
    """The directories of all attempts of one worker. The attempt of an isolated step always calls `make`. The attempt
    of an inline step calls it only when the handler first asks for the directory, because most handlers never do.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # Directories of speculative executions, by the task and the epoch of the attempt that has taken them over.
        self._adopted: dict[tuple[UUID, int], Path] = {}

    def path_of(self, lease: Lease) -> Path:
        return self._adopted.get(_key(lease)) or self._root / f"{lease.task_id}-{lease.epoch}"

    def make(self, lease: Lease) -> Path:
        """The attempt's directory, with its `in` and `out`."""
        directory = self.path_of(lease)
        _make_in_and_out(directory)
        return directory

    def make_linked(self, lease: Lease, step: str, files: Mapping[str, Path]) -> tuple[Path, dict[str, Path]]:
        """Make a directory for a speculative execution of `step`, a later step that the attempt with `lease` starts
        before its own outcome is committed. `files`: its inputs, which are in the directory of the attempt. They are
        linked into the new directory, because the attempt's directory is removed when the attempt ends. Returns the new
        directory and the links. After an error, this method removes the new directory, and raises OSError.
        """
        directory = self._root / f"{lease.task_id}-{lease.epoch}-{step}"
        linked = {name: directory / "in" / str(number) for number, name in enumerate(files)}
        try:
            _make_in_and_out(directory)
            for name, link in linked.items():
                os.link(files[name], link, follow_symlinks=False)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory, linked

    def adopt(self, lease: Lease, directory: Path) -> None:
        """From now on, `directory` of a speculative execution is the directory of the attempt with `lease`."""
        self._adopted[_key(lease)] = directory

    def request_stop(self, lease: Lease) -> None:
        """Make the file that asks the handler to stop at its next checkpoint (a call that checks whether to go on)."""
        try:
            (self.path_of(lease) / frames.CANCEL).touch()
        except FileNotFoundError:
            pass  # the attempt has no directory, and so no child
        except OSError as error:
            log.warning("cannot ask a handler to stop: it is cancelled when its grace ends", error=str(error))

    async def remove(self, lease: Lease) -> None:
        """Remove the attempt's directory. The removal goes on if the caller is cancelled meanwhile."""
        directory = self.path_of(lease)
        self._adopted.pop(_key(lease), None)
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def remove_later(directory: Path) -> None:
    """Remove the directory in a thread. Nobody waits for the removal."""
    asyncio.get_running_loop().run_in_executor(None, partial(shutil.rmtree, directory, ignore_errors=True))


def _make_in_and_out(directory: Path) -> None:
    (directory / "in").mkdir(parents=True)
    (directory / "out").mkdir()


def _key(lease: Lease) -> tuple[UUID, int]:
    return lease.task_id, lease.epoch
