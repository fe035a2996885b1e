"""Real runs: a seed stays green, and every guard that is taken away is missed by the invariant that it protects.

Each commit takes away one guard of IN_CI, by its hash; LEASEHOLD_TEST_SAMPLE=all takes away each. The longest of the
mutants, `fence`, is left to `scripts/chaos --mutate all`.
"""

from __future__ import annotations

import pytest

from chaos.mutations import CAUGHT_BY
from chaos.pipelines import KINDS
from chaos.plan import DIRECTED, make_plan
from chaos.run import Report, run
from chaos.servers import Servers
from tests.support.seeds import sample_of_this_commit

SEED = 101
#: A plan waits for a moment, such as a hint on its way when its worker dies: a busy machine may let it pass.
TRIES = 6
#: Kinds that ship with the platform, and that the load asks for.
SHIPPED = {"media", "conversion", "generation", "webhook"}
IN_CI = ("ack", "epoch", "outbox")


def told(report: Report) -> dict[str, tuple[str, ...]]:
    return {verdict.number: verdict.why for verdict in report.violated}


@pytest.mark.timeout(300)
async def test_a_broken_installation_loses_nothing_and_doubles_nothing(servers: Servers) -> None:
    report = await run(servers, make_plan(SEED))
    assert told(report) == {}
    assert len(report.fired) >= 3
    assert sum(report.jobs.values()) > 50
    assert {job.partition(" ")[0] for job in report.jobs} >= {kind.name for kind in KINDS} | SHIPPED
    assert report.refused == []
    (keys,) = (verdict for verdict in report.verdicts if verdict.number == "I2")
    assert keys.observed["repeated answer"] > 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sample_of_this_commit(IN_CI, 1))
async def test_a_guard_that_is_taken_away_is_missed(servers: Servers, name: str) -> None:
    for _ in range(TRIES):
        report = await run(servers, DIRECTED[name], mutate=name)
        assert report.fired
        if CAUGHT_BY[name] in told(report):
            return
    pytest.fail(f"{CAUGHT_BY[name]} was not violated in any of {TRIES} runs")
