from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.verdicts import Done
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.worker.sandbox.children import Children

PARAMS: dict[str, Any] = {"model_id": 40000, "version": "0001", "platform": "720"}


@dataclass
class Bench:
    """A fenced child of the conversion pipeline, and a short way to run its steps."""

    children: Children
    work_dir: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    heard: list[tuple[float, str]] = field(default_factory=list)

    def directory(self) -> Path:
        made = self.work_dir / f"attempt-{next(self.numbers)}"
        (made / "out").mkdir(parents=True)
        return made

    async def run(self, step: str, files: dict[str, Path], directory: Path | None = None, **params: Any) -> Done:
        declared = conversion.by_name[step]
        self.heard.clear()
        return await self.children.run(
            pipeline="conversion",
            step=step,
            params=PARAMS | params,
            files=files,
            directory=(directory or self.directory()) / "out",
            timeout=90,
            limits=declared.limits,
            on_progress=lambda percent, summary: self.heard.append((percent, summary)),
        )

    async def convert(self, model: Path, references: Path, **params: Any) -> dict[str, Path]:
        """All three steps; answers every file that they made."""
        made = {"model": model, "references": references}
        for step in conversion.steps:
            done = await self.run(step.name, made, **params)
            made |= {name: file.path for name, file in done.files.items()}
        return made


@pytest.fixture(scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    work_dir = tmp_path_factory.mktemp("conversion") / "work"
    children = Children(1, pipelines=["conversion"], work_dir=work_dir, source="tests.conversion.source:pipelines")
    await children.start()
    yield Bench(children, work_dir)
    await children.close()
