"""Writes and reads `.leasehold/dev.env`. By this file, programs find the servers of a `leasehold dev` that runs in the
same folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

#: The folder and the name of the file. The file holds the secrets of the throw-away servers that `leasehold dev` runs.
#: So only the file's owner may read it, and git ignores its folder.
FOLDER = ".leasehold"
NAME = "dev.env"
#: How the first line of the file begins. The line goes on with the process that wrote the file (`_name_of`).
_HEAD = "# of the process "
#: The index of the field in /proc/PID/stat that says when the process began. The first field after the process's state
#: has the index 0.
_BEGAN = 18


@contextmanager
def dev_file(variables: Mapping[str, str]) -> Iterator[Path]:
    """Keep the file, with these variables, below the current folder during the block. A second `leasehold dev` in the
    folder replaces the file of the first. When the second one ends, it restores the first one's file if the first one
    still runs, and otherwise deletes the file. A `leasehold dev` that ends changes the file only if the file still
    names its own process.
    """
    folder = Path.cwd() / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    path = folder / NAME
    text_of_other = _text_of_living(path)
    process = _name_of(os.getpid())
    _write(path, "".join([f"{_HEAD}{process}\n", *(f"{name}={_quoted(value)}\n" for name, value in variables.items())]))
    try:
        yield path
    finally:
        if _process_in(path) == process:
            if text_of_other is not None and _lives(_process_of(text_of_other)):
                _write(path, text_of_other)
            else:
                path.unlink()


def _write(path: Path, text: str) -> None:
    # Replace the file in one step, so that a reader never finds half of the text.
    new_path = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new_path.replace(path)


def _quoted(value: str) -> str:
    """The value, quoted as one word for a shell."""
    return "'" + value.replace("'", "'\\''") + "'"


def dev_variables() -> dict[str, str]:
    """The variables in the file of the `leasehold dev` that runs in the current folder. Empty if none runs here."""
    text = _text_of_living(Path.cwd() / FOLDER / NAME)
    words = [] if text is None else shlex.split(text.partition("\n")[2])  # a value may have several lines
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _text_of_living(path: Path) -> str | None:
    """The text of the file. None if there is no file, or if the process that wrote the file has ended. (A process that
    was killed cannot delete its file.)
    """
    try:
        text = path.read_text()
    except (OSError, ValueError):  # there is no file, the file belongs to another user, or it is not text
        return None
    return text if _lives(_process_of(text)) else None


def _process_in(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        return _process_of(path.read_text())
    return None


def _process_of(text: str) -> str:
    """The process that wrote the text, as `_name_of` names it."""
    return text.partition("\n")[0].removeprefix(_HEAD)


def _lives(process: str) -> bool:
    pid = process.partition(" ")[0]
    return pid.isdecimal() and _name_of(int(pid)) == process


def _name_of(pid: int) -> str | None:
    """The id of the process, and when it began. The id alone would not be enough, because after a restart of the
    machine or of a container, another process may have the same id. Returns None if the process has ended.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None if Path("/proc/self").exists() else _name_without_proc(pid)
    state, *fields = status.rpartition(b")")[2].split()  # skip the program's name, which may contain spaces
    # Z: the process has ended, but its parent has not read its exit status yet.
    return None if state == b"Z" else f"{pid} {fields[_BEGAN].decode()}"


def _name_without_proc(pid: int) -> str | None:
    """The same as `_name_of`, but only the id. A system without /proc does not say when a process began."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process lives, and belongs to another user
        return str(pid)
    except OSError:
        return None
    return str(pid)
