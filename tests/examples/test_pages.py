"""The examples run as the pages print them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples import shop
from examples.letters import letters, pipelines
from leasehold.db.database import connect
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob, submit
from leasehold.worker.worker import Worker

SECONDS = 60.0


async def test_the_example_counts_what_its_first_step_wrote(settings: Settings, tmp_path: Path) -> None:
    changes = {"work_dir": str(tmp_path), "pipelines": "examples.letters:pipelines", "poll_seconds": 0.1}
    connection = await connect(settings, "test")
    job = NewJob(letters, tenant_id="me")
    async with Worker(settings.model_copy(update=changes), pipelines()), asyncio.timeout(SECONDS):
        await submit(connection, [job])
        while await connection.fetchval("SELECT status FROM job WHERE id = $1", job.id) != "succeeded":
            await asyncio.sleep(0.02)
    value = await connection.fetchval(
        "SELECT value FROM result JOIN task ON task.id = task_id WHERE job_id = $1", job.id
    )
    assert value == {"characters": 12}
    await connection.close()


async def test_the_five_lines_run(settings: Settings, tmp_path: Path) -> None:
    quick = settings.model_copy(update={"work_dir": str(tmp_path), "poll_seconds": 0.1})
    shop.app.use(quick)
    async with Worker(quick, shop.app.pipelines()), asyncio.timeout(SECONDS):
        run = await shop.send_receipt.asubmit(17, "me@home")
        assert await run == "receipt 17 is on its way to me@home"
    shop.app.close()


@pytest.mark.parametrize(
    ("page", "example"),
    [("README.md", "shop"), ("docs/start/first-job.md", "shop"), ("docs/guides/pipelines.md", "letters")],
)
def test_a_page_prints_the_example_as_it_is(page: str, example: str) -> None:
    root = Path(__file__).parents[2]
    code = (root / f"examples/{example}.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (root / page).read_text()
    assert len([line for line in code.splitlines() if line]) <= {"shop": 5, "letters": 15}[example]
