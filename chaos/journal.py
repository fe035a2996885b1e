"""A file of JSON lines to which many processes append. One write has a whole line: a SIGKILL leaves no half line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from time_machine import escape_hatch

#: The environment variables: the path of the journal, and the name that this process has in it.
PATH_VARIABLE = "CHAOS_JOURNAL"
PROCESS_VARIABLE = "CHAOS_PROCESS"


def note(what: str, **fields: Any) -> None:
    """Append a line: what happened, in which process, and when (seconds since 1970)."""
    line = json.dumps({"what": what, "process": os.environ[PROCESS_VARIABLE], "at": _true_time(), **fields})
    file = os.open(os.environ[PATH_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def _true_time() -> float:
    """The true time, also in a process whose clock a fault has moved (F33)."""
    return escape_hatch.time.time() if escape_hatch.is_travelling() else time.time()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
