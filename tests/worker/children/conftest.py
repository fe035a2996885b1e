from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.pipeline import MIB, Limits
from leasehold.domain.verdicts import Done
from leasehold.worker.sandbox.children import Children

SOURCE = "tests.scripted:pipelines"
LIMITS = Limits(memory_bytes=256 * MIB, cpu_seconds=30, file_bytes=8 * MIB, open_files=64)


@dataclass
class Pool:
    """Children of the scripted pipeline, and a short way to have one act."""

    children: Children
    work_dir: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def directory(self) -> Path:
        made = self.work_dir / f"attempt-{next(self.numbers)}"
        made.mkdir()
        return made

    async def act(
        self,
        act: str = "ok",
        *,
        directory: Path | None = None,
        files: Mapping[str, Path] | None = None,
        timeout: float = 120,
        limits: Limits = LIMITS,
        on_progress: Callable[[float, str], None] = lambda _percent, _summary: None,
        **args: Any,
    ) -> Done:
        return await self.children.run(
            pipeline="scripted",
            step="act",
            params={"act": act, "args": args},
            files=files or {},
            directory=directory or self.directory(),
            timeout=timeout,
            limits=limits,
            on_progress=on_progress,
        )

    async def pid(self) -> int:
        """The process that acts next, in a pool of one."""
        return int((await self.value("whoami"))["pid"])

    async def value(self, act: str, **args: Any) -> dict[str, Any]:
        done = await self.act(act, **args)
        assert done.value is not None
        return dict(done.value)


async def pool(work_dir: Path, size: int = 1, source: str = SOURCE, **options: Any) -> Pool:
    children = Children(size, pipelines=["scripted"], work_dir=work_dir, source=source, **options)
    await children.start()
    return Pool(children, work_dir)


@pytest.fixture(scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """A pool of one child, so that the next act runs in the same one, if that has survived."""
    made = await pool(tmp_path_factory.mktemp("children") / "work")
    yield made
    pids = made.children.pids
    await made.children.close()
    assert not [pid for pid in pids if is_there(pid)], "every child is killed and reaped"


def is_there(pid: int) -> bool:
    """Whether the process exists at all, as a zombie too."""
    return Path(f"/proc/{pid}").exists()


def is_running(pid: int) -> bool:
    """Whether the process can still do anything: a zombie, of a parent that we do not control, cannot."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
