"""A worker serves before its heavy libraries are loaded, and no run loads them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

from leasehold.domain.pipeline import Limits
from leasehold.worker.sandbox.children import Children
from tests.worker.children.waiting import until


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_libraries_load_once_children_are_ready_and_a_broken_one_harms_no_run(tmp_path: Path) -> None:
    children = Children(
        1, pipelines=["preloading"], work_dir=tmp_path, source="tests.worker.children.preloading:pipelines"
    )
    await children.start()  # would wait for ever if it waited for the library that stops
    try:
        (zygote,) = children.pids
        await until(lambda: _is_stopped(zygote), "the zygote loads the library")
        os.kill(zygote, signal.SIGCONT)
        (tmp_path / "attempt").mkdir()
        done = await children.run(
            pipeline="preloading",
            step="look",
            params={},
            files={},
            directory=tmp_path / "attempt",
            timeout=timedelta(seconds=30).total_seconds(),
            limits=Limits(),
        )
    finally:
        await children.close()
    assert done.value == {"stopping": True, "broken": False}
