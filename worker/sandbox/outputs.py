"""What a child claims to have made, checked before anything of it is uploaded or committed.

The child may have been taken over by its input, so a path is not believed: each part is opened without
following links, and only a regular file with one name is accepted.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pydantic_core import to_json

from leasehold.domain.errors import Permanent
from leasehold.domain.verdicts import Done, File
from leasehold.worker.sandbox import frames

_NAME = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")
_CONTENT_TYPE = re.compile(r"[a-z0-9][a-z0-9.+-]*/[a-z0-9][a-z0-9.+-]*(; ?[a-z0-9-]+=[A-Za-z0-9._-]+)?")
MAX_VALUE_BYTES = 64 * 1024


def checked(finished: frames.Finished, directory: Path) -> Done:
    """Turn a child's answer into the handler's verdict, with paths beneath `directory`.

    Raises Permanent("bad_output") when a name, a path, a content type or the value is not acceptable.
    """
    if finished.value is not None and len(to_json(finished.value)) > MAX_VALUE_BYTES:
        raise _bad(f"the value is larger than {MAX_VALUE_BYTES} bytes")
    files: dict[str, File] = {}
    for name, made in finished.files.items():
        if not _is_safe(name):
            raise _bad(f"the output name {name[:100]!r} is not of a-z 0-9 . _ - and /")
        if not _CONTENT_TYPE.fullmatch(made.content_type):
            raise _bad(f"output {name}: {made.content_type[:100]!r} is no content type")
        files[name] = File(_regular_file(directory, made.path, name), made.content_type)
    return Done(files=files, value=finished.value)


def _is_safe(path: str) -> bool:
    return _NAME.fullmatch(path) is not None and not {".", ".."} & set(path.split("/"))


def _regular_file(directory: Path, path: str, name: str) -> Path:
    if not _is_safe(path):
        raise _bad(f"output {name}: its path leaves the directory, or is not of a-z 0-9 . _ - and /")
    *folders, last = path.split("/")
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = inner
        found = os.stat(last, dir_fd=opened, follow_symlinks=False)
    except OSError as error:
        raise _bad(f"output {name}: {error.strerror or 'not to be read'}") from error
    finally:
        os.close(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise _bad(f"output {name} is not a plain file of its own")
    return directory / path


def _bad(message: str) -> Permanent:
    return Permanent("bad_output", message)
