"""A small disk of a run's own, for its workers' scratch files, that can be full. To mount one takes privileges."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

_SIZE = "64m"
_BALLAST = "ballast"
_PIECE = bytes(1 << 20)


class Disk:
    """`mounted`: whether there is one; without it nothing can be filled."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ballast = directory / _BALLAST
        self.mounted = False

    async def mount(self) -> None:
        self._directory.mkdir()
        options = f"size={_SIZE},mode=0700"
        self.mounted = await _run("mount", "-t", "tmpfs", "-o", options, "chaos", os.fspath(self._directory))

    async def unmount(self) -> None:
        if self.mounted:
            await _run("umount", "--lazy", os.fspath(self._directory))

    def fill(self) -> bool:
        """Take what room there is; returns whether the disk said that it is full."""
        if not self.mounted:
            return False
        with self._ballast.open("ab", buffering=0) as ballast:
            try:
                while True:  # what does not fit as a whole is written as far as it does
                    ballast.write(_PIECE)
            except OSError as error:
                return error.errno == errno.ENOSPC

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


async def _run(*command: str) -> bool:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:  # there is no such command here
        return False
    return await process.wait() == 0
