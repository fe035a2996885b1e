"""The disks of a run, which a fault can fill or freeze. Only a process with privileges can mount them.

`Disk` is in memory, for the workers' scratch files. `Volume` is an ext4 image on a loop device, for PostgreSQL. While a
volume is frozen every write waits in the kernel, as on a dead disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

_SIZE = "64m"
_BALLAST = "ballast"
_PIECE = bytes(1 << 20)
_LEAST_BYTES = 4096
#: A shell that unmounts the disk when its standard input ends. That also happens if this process is killed, so no mount
#: stays behind, and no frozen one.
_JANITOR = 'read -r disk; read -r _; fsfreeze --unfreeze "$disk"; umount --lazy "$disk"'


class Disk:
    """A disk in memory. `mounted`: False on a machine that cannot mount it; then `fill` does nothing."""

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
        """Use up all room. Returns whether the disk is full now."""
        if not self.mounted:
            return False
        with self._ballast.open("ab", buffering=0) as ballast:
            self._reserve(ballast.fileno())
            try:
                while True:  # the last write is cut to what is free
                    ballast.write(_PIECE)
            except OSError as error:
                return error.errno == errno.ENOSPC

    def _reserve(self, ballast: int) -> None:
        """Allocate most of the room without writing it, which is quicker."""
        size = _free_bytes(self._directory)
        while size >= _LEAST_BYTES:
            try:
                os.posix_fallocate(ballast, os.fstat(ballast).st_size, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            size = size // 2

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


class Volume(Disk):
    """A disk of `megabytes` in a sparse file: it takes only as much of the real disk as was written to it."""

    def __init__(self, directory: Path, *, megabytes: int) -> None:
        super().__init__(directory)
        self._megabytes = megabytes

    async def mount(self) -> None:
        """Make the image and mount it. On a machine that cannot mount it, `directory` is a plain directory."""
        self._directory.mkdir()
        image = self._directory.with_name(f"{self._directory.name}.img")
        with image.open("wb") as file:
            file.truncate(self._megabytes << 20)
        # `-m 0` reserves no blocks for root: root fills the disk, and then PostgreSQL's user must find no room either.
        self.mounted = await _run("mkfs.ext4", "-q", "-F", "-m", "0", os.fspath(image)) and await _run(
            "mount", "-o", "loop,noatime", os.fspath(image), os.fspath(self._directory)
        )
        await self._keep_clean()

    async def freeze(self) -> bool:
        """Make every write to the disk wait. Returns whether the disk is frozen now."""
        return self.mounted and await _run("fsfreeze", "--freeze", os.fspath(self._directory))

    async def thaw(self) -> None:
        if self.mounted:
            await _run("fsfreeze", "--unfreeze", os.fspath(self._directory))


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


async def _run(*command: str) -> bool:
    """Run the command. Returns whether it succeeded."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:  # this machine has no such command
        return False
    return await process.wait() == 0
