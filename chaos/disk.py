"""Disks of a run's own, which can be full or stand still. To mount one takes privileges.

`Disk` is in memory, for the workers' scratch files. `Volume` is an ext4 image on a loop device, for PostgreSQL:
fsfreeze stalls it as a dead disk does, every write waits in the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

_SIZE = "64m"
_BALLAST = "ballast"
_PIECE = bytes(1 << 20)
_LEAST = 4096
#: Whatever ends this process, a mount that nobody uses must not stay, and a frozen one less so: its input ends with us.
_JANITOR = 'read -r disk; read -r _; fsfreeze --unfreeze "$disk"; umount --lazy "$disk"'


class Disk:
    """`mounted`: whether there is one; without it nothing can be filled."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ballast = directory / _BALLAST
        self._janitor: asyncio.subprocess.Process | None = None
        self.mounted = False

    async def mount(self) -> None:
        self._directory.mkdir()
        options = f"size={_SIZE},mode=0700"
        self.mounted = await _run("mount", "-t", "tmpfs", "-o", options, "chaos", os.fspath(self._directory))
        await self._keep_clean()

    async def _keep_clean(self) -> None:
        if self.mounted:
            self._janitor = await asyncio.create_subprocess_exec(
                "sh", "-c", _JANITOR, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert self._janitor.stdin is not None
            self._janitor.stdin.write(os.fsencode(self._directory) + b"\n")

    async def unmount(self) -> None:
        if self._janitor is not None:
            assert self._janitor.stdin is not None
            self._janitor.stdin.close()
            await self._janitor.wait()
            self._janitor, self.mounted = None, False

    def fill(self) -> bool:
        """Take what room there is; returns whether the disk is full."""
        if not self.mounted:
            return False
        with self._ballast.open("ab", buffering=0) as ballast:
            self._reserve(ballast.fileno())
            try:
                while True:  # what does not fit as a whole is written as far as it does
                    ballast.write(_PIECE)
            except OSError as error:
                return error.errno == errno.ENOSPC

    def _reserve(self, ballast: int) -> None:
        """Take most of it without writing it."""
        size = _room(self._directory)
        while size >= _LEAST:
            try:
                os.posix_fallocate(ballast, os.fstat(ballast).st_size, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            size = size // 2

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


class Volume(Disk):
    """As Disk, of `megabytes`, which takes no more of the real disk than what was written to it."""

    def __init__(self, directory: Path, *, megabytes: int) -> None:
        super().__init__(directory)
        self._megabytes = megabytes

    async def mount(self) -> None:
        """Where it cannot be mounted, `directory` is a plain one."""
        self._directory.mkdir()
        image = self._directory.with_name(f"{self._directory.name}.img")
        with image.open("wb") as file:
            file.truncate(self._megabytes << 20)
        # No blocks are kept for root: it is root that fills it, and somebody else who then finds no room.
        self.mounted = await _run("mkfs.ext4", "-q", "-F", "-m", "0", os.fspath(image)) and await _run(
            "mount", "-o", "loop,noatime", os.fspath(image), os.fspath(self._directory)
        )
        await self._keep_clean()

    async def freeze(self) -> bool:
        """Let every write to it wait from now on; returns whether it does."""
        return self.mounted and await _run("fsfreeze", "--freeze", os.fspath(self._directory))

    async def thaw(self) -> None:
        if self.mounted:
            await _run("fsfreeze", "--unfreeze", os.fspath(self._directory))


def _room(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


async def _run(*command: str) -> bool:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:  # there is no such command here
        return False
    return await process.wait() == 0
