"""A worker to be killed: starts children, prints their process ids, and stays."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.worker.children.conftest import pool
from tests.worker.children.waiting import until


async def main(work_dir: Path, state: str) -> None:
    made = await pool(work_dir, size=2)
    directories = [made.directory(), made.directory()]
    hangs = [made.act("hang", directory=directory) for directory in directories if state == "running"]
    tasks = [asyncio.create_task(hang) for hang in hangs]
    if tasks:
        await until(lambda: all((path / "started").exists() for path in directories), "both run")
    print(*made.children.pids, flush=True)  # noqa: T201 - the test reads it
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
