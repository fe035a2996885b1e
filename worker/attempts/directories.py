"""Makes, names and removes the directories of attempts, and puts a file there that asks a handler to stop.

An attempt's directory lies beneath the worker's work directory. A child reads its inputs in `in`, writes to `out`, and
finds the file that asks it to stop (frames.CANCEL) beside both.
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
    """The directories of all attempts of one worker. `make` or the first use makes an attempt's directory: most inline
    attempts need none.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._adopted: dict[tuple[UUID, int], Path] = {}

    def of(self, lease: Lease) -> Path:
        """The directory of the attempt with this lease."""
        return self._adopted.get(_key(lease)) or self._root / f"{lease.task_id}-{lease.epoch}"

    def make(self, lease: Lease) -> Path:
        """The attempt's directory, with its `in` and `out`."""
        directory = self.of(lease)
        _make_in_and_out(directory)
        return directory

    def make_linked(self, lease: Lease, step: str, files: Mapping[str, Path]) -> tuple[Path, dict[str, Path]]:
        """Make a directory for the speculative execution of `step`, beside the attempt with `lease`. It has hard links
        to `files`, because the originals are removed with that attempt's directory. Raises OSError, and leaves nothing
        then.
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
        """The attempt with `lease` uses the directory of a speculative execution."""
        self._adopted[_key(lease)] = directory

    def request_stop(self, lease: Lease) -> None:
        """Make the file that asks the handler to stop at its next checkpoint."""
        try:
            (self.of(lease) / frames.CANCEL).touch()
        except FileNotFoundError:
            pass  # the attempt has no directory, and so no child
        except OSError as error:
            log.warning("a handler cannot be asked to stop; it is cancelled after its grace", error=str(error))

    async def remove(self, lease: Lease) -> None:
        """Remove the attempt's directory. The removal goes on if the caller is cancelled meanwhile."""
        directory = self.of(lease)
        self._adopted.pop(_key(lease), None)
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def remove_later(directory: Path) -> None:
    """Remove the directory in a thread; nobody waits for it."""
    asyncio.get_running_loop().run_in_executor(None, partial(shutil.rmtree, directory, ignore_errors=True))


def _make_in_and_out(directory: Path) -> None:
    (directory / "in").mkdir(parents=True)
    (directory / "out").mkdir()


def _key(lease: Lease) -> tuple[UUID, int]:
    return lease.task_id, lease.epoch
