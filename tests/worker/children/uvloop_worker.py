"""A worker on uvloop that tries what a pool must do, and prints what came of it as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop

from leasehold.domain.errors import ChildCrashed, StepTimeout
from tests.worker.children.conftest import Pool, is_there, pool
from tests.worker.children.waiting import until


async def main(work_dir: Path) -> None:
    made = await pool(work_dir, size=2)
    found: dict[str, Any] = {"value": await made.value("ok", n=1)}
    try:
        await made.act("segfault")
    except ChildCrashed as crash:
        found["crash"] = "SIGSEGV" if "SIGSEGV" in crash.message else crash.message
    try:
        await made.act("hang", timeout=0.2)
    except StepTimeout as timeout:
        found["timeout"] = timeout.code
    found["cancelled"] = await _cancelled(made)
    names = (await made.value("whoami"))["descriptors"]
    found["descriptors"] = sorted(name.partition(":")[0] for name in names)
    pids = made.children.pids
    await made.children.close()
    found["left"] = [pid for pid in pids if is_there(pid)]
    print(json.dumps(found), flush=True)  # noqa: T201 - the test reads it


async def _cancelled(made: Pool) -> bool:
    directory = made.directory()
    task = asyncio.create_task(made.act("hang", directory=directory))
    await until((directory / "started").exists, "the step has started")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()


uvloop.run(main(Path(sys.argv[1])))
