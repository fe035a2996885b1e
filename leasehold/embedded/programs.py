"""Finds out whether the unprivileged user of the embedded servers can run a program, such as PostgreSQL. If the user
cannot, this module copies the program to a place where the user can run it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leasehold.embedded.directories import cache_directory
from leasehold.embedded.process import EmbeddedError, RunAs, kill_if_running


async def can_run(program: Path, run_as: RunAs) -> bool:
    """Whether the user can start `program`, which may be in a home directory that is closed to others."""
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
            extra_groups=[] if run_as.is_other_user else None,
        )
    except OSError:
        return False
    try:
        return await process.wait() == 0
    finally:
        await kill_if_running(process)


async def runnable_copy_of(program: Path, tree: Sequence[Path], run_as: RunAs) -> Path:
    """The path of `program` or, if `run_as` cannot start it where it is, the path of a copy in the cache.

    Args:
        program: an executable, either one of the files in `tree` or a file below one of its directories
        tree: the directories and files that the program needs. All of them are in one directory, and are copied
            together.
        run_as: the user that will start the program

    Raises:
        EmbeddedError: the user can start neither the program nor the copy.
    """
    if await can_run(program, run_as):
        return program
    parent = tree[0].parent
    copy = cache_directory() / f"{program.name}-{_fingerprint(program)}"
    if not copy.exists():
        await asyncio.to_thread(_copy, tree, copy)
    copied_program = copy / program.relative_to(parent)
    if not await can_run(copied_program, run_as):
        uid = run_as.uid if run_as.is_other_user else os.geteuid()
        raise EmbeddedError(f"uid {uid} cannot run {program} nor {copied_program}")
    return copied_program


def _fingerprint(program: Path) -> str:
    """A text that changes when the program is replaced, so that the copy of an older program is not used for a newer
    one.
    """
    status = program.stat()
    return hashlib.sha256(f"{program.name} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]


def _copy(tree: Sequence[Path], target: Path) -> None:
    """Copy the tree to `target`, which appears only when it is complete."""
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
        unfinished_copy = Path(scratch) / "tree"
        unfinished_copy.mkdir()
        for source in tree:
            if source.is_dir():
                shutil.copytree(source, unfinished_copy / source.name, symlinks=True)
            else:
                shutil.copy2(source, unfinished_copy / source.name)
        _open_to_all(unfinished_copy)
        try:
            unfinished_copy.rename(target)
        except OSError:
            if not target.exists():  # if it exists, another process has made the same copy meanwhile
                raise


def _open_to_all(tree: Path) -> None:
    """Let every user read the tree, and run the programs that its owner can run. With an umask such as 077, only the
    owner of a program and of its folders may do so.
    """
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(stat.S_IMODE(mode) | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))
