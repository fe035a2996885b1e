"""Programs from wheels and packages, copied to where the unprivileged user of the servers can run them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leasehold.embedded.directories import cache_directory
from leasehold.embedded.process import EmbeddedError, RunAs, end


async def can_run(program: Path, run_as: RunAs) -> bool:
    """Whether that user may start `program`: a virtual environment in a closed home is not reachable."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            user=run_as.user,
            group=run_as.group,
            extra_groups=[] if run_as.drops else None,
        )
    except OSError:
        return False
    try:
        return await process.wait() == 0
    finally:
        await end(process)


async def reachable(program: Path, tree: Sequence[Path], run_as: RunAs) -> Path:
    """`program`, or its copy in the cache when `run_as` cannot start it where it is.

    Args:
        program: an executable below one of `tree`
        tree: neighbouring directories or files that must move together, with one parent
        run_as: who will start it

    Raises:
        EmbeddedError: that user can start neither.
    """
    if await can_run(program, run_as):
        return program
    home = tree[0].parent
    copy = cache_directory() / f"{program.name}-{_version(program)}"
    if not copy.exists():
        await asyncio.to_thread(_copy, tree, copy)
    moved = copy / program.relative_to(home)
    if not await can_run(moved, run_as):
        raise EmbeddedError(f"uid {run_as.uid if run_as.uid >= 0 else os.geteuid()} cannot run {program} nor {moved}")
    return moved


def _version(program: Path) -> str:
    seen = program.stat()
    return hashlib.sha256(f"{program.name} {seen.st_size} {seen.st_mtime_ns}".encode()).hexdigest()[:16]


def _copy(tree: Sequence[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
        part = Path(scratch) / "tree"
        part.mkdir(mode=0o755)
        for source in tree:
            if source.is_dir():
                shutil.copytree(source, part / source.name, symlinks=True)
            else:
                shutil.copy2(source, part / source.name)
        part.rename(target)
