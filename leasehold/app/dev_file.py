"""Writes and reads the file by which programs find the servers of a `leasehold dev` that runs in their folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

#: The file holds secrets of throw-away servers: only its owner may read it, and git ignores its folder.
FOLDER = ".leasehold"
NAME = "dev.env"
#: How the first line of the file begins. After it comes the id of the process that wrote the file.
_HEAD = "# of the process "


@contextmanager
def dev_file(variables: Mapping[str, str]) -> Iterator[Path]:
    """Keep the file in the current folder for the block. A second `leasehold dev` in the folder replaces the file. So
    each deletes the file at its end only if the file still names its own process.
    """
    folder = Path.cwd() / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    path = folder / NAME
    new_path = folder / f"{NAME}.{os.getpid()}"
    with os.fdopen(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{_HEAD}{os.getpid()}\n")
        file.writelines(f"{name}={_quoted(value)}\n" for name, value in variables.items())
    new_path.replace(path)
    try:
        yield path
    finally:
        if _pid_of(path) == os.getpid():
            path.unlink()


def _quoted(value: str) -> str:
    """The value, quoted as one word for a shell."""
    return "'" + value.replace("'", "'\\''") + "'"


def living_dev_file() -> Path | None:
    """The file of a `leasehold dev` that runs in the current folder. None: none runs here."""
    path = Path.cwd() / FOLDER / NAME
    pid = _pid_of(path)
    if pid is None:
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process lives, and belongs to another user
        return path
    except OSError:  # the process was killed, and could not delete its file
        return None
    return path


def dev_variables() -> dict[str, str]:
    """The variables in the file of the `leasehold dev` that runs in the current folder; empty: none runs here."""
    path = living_dev_file()
    try:
        lines = [] if path is None else path.read_text().splitlines()[1:]
    except FileNotFoundError:  # the `leasehold dev` has ended and deleted it
        return {}
    return {name: "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


def _pid_of(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text().partition("\n")[0].removeprefix(_HEAD))
    return None
