"""The README's example runs as it is printed there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.greeting import greeting, pipelines
from leasehold.db.database import connect
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob, submit
from leasehold.worker.worker import Worker

SECONDS = 30.0


async def test_the_example_counts_what_its_first_step_wrote(settings: Settings, tmp_path: Path) -> None:
    changes = {"work_dir": str(tmp_path), "pipelines": "examples.greeting:pipelines", "poll_seconds": 0.1}
    connection = await connect(settings, "test")
    job = NewJob(greeting, tenant_id="me")
    async with Worker(settings.model_copy(update=changes), pipelines()), asyncio.timeout(SECONDS):
        await submit(connection, [job])
        while await connection.fetchval("SELECT status FROM job WHERE id = $1", job.id) != "succeeded":
            await asyncio.sleep(0.02)
    value = await connection.fetchval(
        "SELECT value FROM result JOIN task ON task.id = task_id WHERE job_id = $1", job.id
    )
    assert value == {"characters": 12}
    await connection.close()


@pytest.mark.parametrize("page", ["README.md", "docs/start/first-job.md"])
def test_a_page_prints_the_example_as_it_is(page: str) -> None:
    root = Path(__file__).parents[2]
    code = (root / "examples/greeting.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (root / page).read_text()
    assert len([line for line in code.splitlines() if line]) <= 15
