"""`python -m chaos.old_process worker|api`: a process of the release. chaos/release.py sets the path on which Python
finds the release's code first.

It makes one change in that code: its database sessions name their process, so that the triggers that record changes
of rows know the process of each commit. It imports only what the platform had at that release.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import leasehold
from chaos import journal

_PROCESS = "chaos.process"


def main(module: str) -> None:
    journal.note("release", code=leasehold.__file__)
    if module == "worker":
        database: Any = importlib.import_module("leasehold.db.database")
        settings = database._server_settings  # noqa: SLF001 - as chaos/process.py does
        own = {_PROCESS: os.environ[journal.PROCESS_VARIABLE]}
        database._server_settings = lambda name: settings(name) | own  # noqa: SLF001 - as above
        importlib.import_module("leasehold.worker.main").main()
    else:
        moved = importlib.util.find_spec("leasehold.api.main")  # in __main__ before 0.2
        importlib.import_module("leasehold.api.main" if moved else "leasehold.api.__main__").main([])


if __name__ == "__main__":
    main(sys.argv[1])
