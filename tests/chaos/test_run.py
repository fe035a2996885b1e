"""Real runs: a seed stays green, and every guard that is taken away is missed by the invariant that it protects.

The longest of the mutants, `fence`, is left to `scripts/chaos --mutate all`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chaos.mutations import CAUGHT_BY
from chaos.plan import DIRECTED, make_plan
from chaos.run import Report, run
from chaos.servers import Servers

SEED = 101
IN_CI = ("ack", "epoch", "outbox")


@pytest.fixture(scope="session")
async def servers() -> AsyncIterator[Servers]:
    async with Servers() as started:
        yield started


def told(report: Report) -> dict[str, tuple[str, ...]]:
    return {verdict.number: verdict.why for verdict in report.violated}


@pytest.mark.timeout(300)
async def test_a_broken_installation_loses_nothing_and_doubles_nothing(servers: Servers) -> None:
    report = await run(servers, make_plan(SEED))
    assert told(report) == {}
    assert len(report.fired) >= 3
    assert sum(report.jobs.values()) > 50


@pytest.mark.parametrize("name", IN_CI)
async def test_a_guard_that_is_taken_away_is_missed(servers: Servers, name: str) -> None:
    report = await run(servers, DIRECTED[name], mutate=name)
    assert report.fired
    assert CAUGHT_BY[name] in told(report)
