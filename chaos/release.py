"""Unpacks the wheel of a published release, and puts the kinds of work of a chaos run beside it."""

from __future__ import annotations

import asyncio
import compileall
import os
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from leasehold.settings import as_variables, servers_of_database

_ROOT = Path(__file__).parents[1]
VERSION = "0.1.0"
_WHEEL = _ROOT / "tests" / "fixtures" / f"leasehold-{VERSION}-py3-none-any.whl"


class Release:
    """The unpacked release. `directory`: its processes run there, and find its code there before any other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def unpack(self) -> None:
        await asyncio.to_thread(self._unpack)

    def _unpack(self) -> None:
        with zipfile.ZipFile(_WHEEL) as wheel:
            wheel.extractall(self.directory)
        compileall.compile_dir(self.directory, quiet=1, workers=2)  # as pip does; else every process would compile
        (self.directory / "chaos").symlink_to(_ROOT / "chaos")

    def command(self, module: str) -> list[str]:
        """`module`: worker or api."""
        return [sys.executable, "-m", "chaos.old_process", module]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables without failpoints: the release has others, and writes no journal line about them."""
        return {**variables, "PYTHONPATH": os.fspath(self.directory), "LEASEHOLD_FAILPOINTS": ""}

    async def migrate(self, url: str) -> None:
        """Give an empty database the release's schema, by its `leasehold migrate`. Raises RuntimeError on failure."""
        await migrate_with(self.directory, self.environment(os.environ | as_variables(servers_of_database(url))))


async def migrate_with(directory: Path, environment: Mapping[str, str], log: Path | None = None) -> None:
    """Run `leasehold migrate` of the code in `directory`. Raises RuntimeError, with its last output, if it fails.

    `log`: the file to which the output is appended, each line with the seconds since the start.
    """
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leasehold.cli.main", "migrate",
        cwd=directory, env=dict(environment), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [f"{time.monotonic() - began:6.1f} {line.decode(errors='replace')}" async for line in process.stdout]
    status = await process.wait()
    if log is not None:
        with log.open("a") as file:
            file.writelines([*lines, f"{time.monotonic() - began:6.1f} it ended with {status}\n"])
    if status:
        raise RuntimeError(f"leasehold migrate failed: {''.join(lines)[-500:]}")
