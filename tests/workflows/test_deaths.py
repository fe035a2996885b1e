"""A worker dies at every call of the context, before and after each commit: the run ends once, with the same result,
and each effect is committed once.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.factories import Rows, assert_history
from tests.support.seeds import seed_of_this_commit
from tests.workflows import shop
from tests.workflows.conftest import Runs
from tests.workflows.life import Deaths, Life
from tests.workflows.promises import assert_journal

WORKFLOWS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...], Any]] = {
    "steps": (shop.checkout, (shop.Order(id=7, amount=5),), (), "7: 5"),
    "branches": (shop.fans, (3,), (), [6, 0, 4, 8]),
    "compensation": (shop.compensates, ("stolen",), (), "refused; 42"),
    "signals": (shop.approved, (None,), ("approved", "approved"), "approved 1, approved 0"),
    "child": (shop.starts, (), (), "7: 5"),
    "limited": (shop.alone_and_not, (), (), [9, 12]),
    "everything": (shop.everything, (), ("go",), ["drawn", 2, [4, 6], "go 0", "refused"]),
}

#: How many runs there are afterwards, with the workflow's own.
RUNS = {"child": 2, "limited": 3}


async def _once(runs: Runs, name: str, at: int, seed: int, *, keeps: bool) -> int:
    """One run whose worker dies at point `at`. Returns how many points there were."""
    workflow, arguments, signals, expected = WORKFLOWS[name]
    life = Life(runs, keeps, random.Random(seed), Deaths(at))
    life.before = await runs.connection.fetchval("SELECT count(*) FROM job")
    run = await runs.submit(workflow, *arguments)
    await life.live(run, arguments, signals)
    status, result = await runs.ended(run)
    assert (status, result) == ("succeeded", expected), (name, at, seed)
    completed = Counter(
        row["task_id"]
        for row in await runs.connection.fetch(
            "SELECT task_id FROM history WHERE job_id = $1 AND kind = 'completed'", run
        )
    )
    assert set(completed.values()) == {1}
    assert await runs.connection.fetchval("SELECT count(*) FROM signal WHERE job_id = $1", run) == 0
    assert await runs.connection.fetchval("SELECT count(*) FROM job") == life.before + RUNS.get(name, 1)
    await assert_journal(runs.connection, run)
    places = await runs.journal(run)
    assert len({row[:2] for row in places}) == len(places)
    await assert_history(Rows(runs.connection, life.terms), run)
    return life.deaths.reached


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "replayed"])
@pytest.mark.parametrize("name", WORKFLOWS)
async def test_a_workflow_whose_worker_dies_at_any_point_ends_once_with_the_same_result(
    runs: Runs, name: str, keeps: bool
) -> None:
    seed = seed_of_this_commit()
    points = await _once(runs, name, 0, seed, keeps=keeps)
    assert points > 5
    for at in range(1, points + 1):
        await _once(runs, name, at, seed, keeps=keeps)
