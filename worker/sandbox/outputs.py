"""Checks the answer of a child process that ran an isolated step. The worker calls this before it uploads the files
that the answer names, or commits the answer's value.

A hostile input may have taken control of the child, so the worker does not trust the paths in the answer. The worker
opens each part of a path without following links, and accepts only a regular file that has a single name (hard link).
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from leasehold.domain.errors import Permanent
from leasehold.domain.storable import NotStorable, encode_storable
from leasehold.domain.verdicts import Done, File
from leasehold.worker.sandbox import frames

#: The names of outputs, and the paths of their files. A `/` separates the parts.
_NAME = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")
_CONTENT_TYPE = re.compile(r"[a-z0-9][a-z0-9.+-]*/[a-z0-9][a-z0-9.+-]*(; ?[a-z0-9-]+=[A-Za-z0-9._-]+)?")
#: The most bytes of JSON that a step's value may have. The value is a column in PostgreSQL, so larger results belong in
#: files.
MAX_VALUE_BYTES = 64 * 1024


def checked(finished: frames.Finished, directory: Path, result_bytes: int = 0) -> Done:
    """The child's answer as a verdict. The paths in the answer are relative to `directory`. `result_bytes`: how many
    bytes the value may have beyond MAX_VALUE_BYTES, for the result of an app's task.

    Raises Permanent("bad_output") when a name, a path, a content type or the value is not allowed.
    """
    at_most = MAX_VALUE_BYTES + result_bytes
    if finished.value is not None and len(_encoded(finished.value)) > at_most:
        raise _bad(f"the value is larger than {at_most} bytes")
    files: dict[str, File] = {}
    for name, output in finished.files.items():
        if not _is_safe(name):
            raise _bad(f"the output name {name[:100]!r} may only have the characters a-z 0-9 . _ - and /")
        if not _CONTENT_TYPE.fullmatch(output.content_type):
            raise _bad(f"output {name}: {output.content_type[:100]!r} is not a content type")
        files[name] = File(_regular_file(directory, output.path, name), output.content_type)
    return Done(files=files, value=finished.value)


def _encoded(value: Any) -> bytes:
    """The value as JSON. Before the worker uploads the files, this refuses a value that PostgreSQL cannot store. The
    error is permanent, because another attempt would make the same value.
    """
    try:
        return encode_storable(value)
    except NotStorable as error:
        raise _bad(f"the value cannot be stored: {error}") from None


def _is_safe(path: str) -> bool:
    return _NAME.fullmatch(path) is not None and not {".", ".."} & set(path.split("/"))


def _regular_file(directory: Path, path: str, name: str) -> Path:
    """The path of the output `name`. Raises Permanent unless it is a regular file inside `directory` with a single
    name.
    """
    if not _is_safe(path):
        raise _bad(f"output {name}: its path leaves the directory, or has characters other than a-z 0-9 . _ - and /")
    *folders, last = path.split("/")
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = inner
        status = os.stat(last, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise _bad(f"output {name}: {error.strerror or 'cannot be read'}") from error
    finally:
        os.close(parent)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise _bad(f"output {name} is not a regular file, or has a second name (a hard link)")
    return directory / path


def _bad(message: str) -> Permanent:
    return Permanent("bad_output", message)
