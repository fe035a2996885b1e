"""Makes PostgreSQL's clock jump. Every process of the server loads libfaketime, which reads from a file by how many
seconds the clock is ahead.

Leases, retries, timeouts and schedules use this clock. Other programs of the machine have the true clock. The monotonic
clocks do not jump, as POSIX demands.
"""

from __future__ import annotations

import asyncio
import fcntl
import shlex
import shutil
import tempfile
from pathlib import Path

from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.process import EmbeddedError

_PACKAGE = "libfaketime"
_LIBRARY = "usr/lib/*/faketime/libfaketime.so.1"
_WRAPPER = """#!/bin/sh
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={file} FAKETIME_NO_CACHE=1
export FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1
exec {program} "$@"
"""


async def find_library() -> Path | None:
    """The path of the system's libfaketime; else of Debian's package, unpacked into the cache. None: this machine has
    neither.
    """
    if system := _below(Path("/")):
        return system
    target = cache_directory() / _PACKAGE
    with (target.parent / f"{_PACKAGE}.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # another run may be unpacking it now
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=f"{_PACKAGE}.", dir=target.parent) as scratch:
                root = Path(scratch) / "root"
                root.mkdir(mode=0o755)
                try:
                    await unpack_packages([_PACKAGE], root)
                except EmbeddedError:
                    return None
                root.rename(target)
    return _below(target)


def _below(root: Path) -> Path | None:
    return next(root.glob(_LIBRARY), None)


class DatabaseClock:
    """One clock that can jump, for one server. A server that is started from the directory `programs` reads this clock.

    Args:
        directory: the directory to make; the server's user must be able to read it
        library: from `find_library`
        programs: PostgreSQL's own programs
    """

    def __init__(self, directory: Path, library: Path, programs: Path) -> None:
        self.programs = directory
        self.file = directory / "clock"
        directory.mkdir(mode=0o755)
        self.jump(0)
        own_library = str(shutil.copy(library, directory / "libfaketime.so"))
        for name in ("postgres", "initdb"):
            script = _WRAPPER if name == "postgres" else '#!/bin/sh\nexec {program} "$@"\n'
            wrapper = directory / name
            wrapper.write_text(
                script.format(
                    library=shlex.quote(own_library), file=shlex.quote(str(self.file)),
                    program=shlex.quote(str(programs / name)),
                )
            )  # fmt: skip
            wrapper.chmod(0o755)

    def jump(self, seconds: int) -> None:
        """Put the clock `seconds` ahead of the true clock; behind it, if negative."""
        new_file = self.file.with_name("clock.new")
        new_file.write_text(f"{seconds:+d}")
        new_file.chmod(0o644)
        new_file.rename(self.file)
