"""That every figure can be measured and kept. What the numbers are is nobody's business here. Each commit measures six
of them, by its hash; LEASEHOLD_TEST_SAMPLE=all measures all.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bench import latency, plot, report, throughput, writes
from bench.__main__ import FIGURES, parse
from bench.figure import Curve, Figure, Goal
from bench.machine import describe
from bench.scale import Scale
from bench.testbed import Testbed
from tests.support.seeds import sample_of_this_commit

FIELDS = {"name", "unit", "median", "min", "max", "runs", "load", "goal", "met", "details"}
#: figure -> how many rows it gives
ROWS = {"writes": 5, "latency": 4, "image": 3, "idle": 7, "submit": 4, "conversion": 7, "generation": 5, "metrics": 5,
        "waiting": 4, "growth": 3, "start": 6, "steady": 3, "tables": 24, "surface": 52, "operations": 9, "sdk": 11,
        "hostile": 15, "migrations": 3, "burst": 3}  # fmt: skip


def test_the_figures_can_be_drawn(tmp_path: Path) -> None:
    figures = [
        Figure("first", "jobs/s", (1.0, 2.0, 4.0), (0.1,) * 3, Goal(3, at_least=True)),
        Figure("second", "jobs/s", (5.0,), (0.1,)),
        Figure("third", "ms", (7.0, 9.0), (0.1,) * 2, Goal(8)),
        *(
            Figure("grown", "ms", (y,), (0.1,), curve=Curve("how it grows", "ms", "jobs beside", ((x, y),)))
            for x, y in ((10, 1.0), (1000, 1.5))
        ),
    ]
    drawn = tmp_path / "figures.svg"
    plot.draw(drawn, figures)
    text = drawn.read_text()
    assert all(word in text for word in ("first", "second", "third", "jobs/s", "ms", "how it grows", "jobs beside"))
    assert "grown" not in text
    again = tmp_path / "again.svg"
    plot.draw(again, figures)
    assert again.read_text() == text


@pytest.mark.parametrize("name", sample_of_this_commit(ROWS, 6))
async def test_a_figure_gives_a_number_for_every_run(name: str, testbed: Testbed, scale: Scale) -> None:
    figures = await _measured(name, testbed, scale)
    assert len(figures) == ROWS[name]
    assert all(len(figure.runs) == len(figure.load) == scale.runs for figure in figures)
    differences = ("%", "% of a core")  # to a run without what is measured
    assert all(run >= 0 for figure in figures if figure.unit not in differences for run in figure.runs)


async def _measured(name: str, testbed: Testbed, scale: Scale) -> list[Figure]:
    for _ in range(4):
        try:
            return await FIGURES[name](testbed, scale)
        except RuntimeError as error:
            if "ended before the traffic beside it" not in str(error):
                raise
    raise AssertionError("a busy machine held the traffic up each time")


async def test_jobs_measured_over_amqp_were_claimed_by_hints(testbed: Testbed, scale: Scale) -> None:
    two_workers_by_hint_one_without_a_broker = (throughput.CASES[1], throughput.CASES[-2])
    for _ in range(4):
        figures = await throughput.measure(testbed, scale, two_workers_by_hint_one_without_a_broker)
        by_hint, by_look = figures[0], figures[len(figures) // 2]
        (claims,) = by_hint.details["claims"]
        if claims["look"] <= 0.1 * scale.jobs:
            break  # else RabbitMQ stood still on a busy machine: the workers connected anew, and looked meanwhile
    assert claims["hint"] + claims["look"] == scale.jobs
    assert claims["look"] <= 0.1 * scale.jobs  # the slot that is kept for whose turn it is
    (looked,) = by_look.details["claims"]
    assert (looked["look"], looked.get("hint", 0)) == (scale.jobs, 0)
    assert [figure.name for figure in figures if min(figure.runs) <= 0] == []


async def test_every_phase_of_a_job_writes_what_its_statement_changes(testbed: Testbed, scale: Scale) -> None:
    jobs = 96
    batches = jobs / 32
    async with testbed.installation(broker="postgres") as installation:
        for _ in range(4):
            written = await writes.by_phase(installation, jobs)
            if all(phase.commits * jobs <= batches + 2 for phase in written.values()):
                break  # else an autovacuum has committed beside them
    assert tuple(written) == writes.PHASES
    for name, phase in written.items():
        assert phase.wal_bytes > 24 * phase.wal_records > 0  # a record's header has 24 bytes
        assert name == "announce" or phase.flushes * jobs >= batches  # each batch is one durable commit
        assert batches <= phase.commits * jobs <= batches + 2  # and the two statements that read the counters
    assert written["submit"].updates == written["announce"].updates == 0
    assert written["claim"].updates == written["settle"].updates == 2  # the task's row, and the job's
    assert written["settle"].as_details()["heap_only_percent"] == 0.0


async def test_the_stages_of_a_wait_add_up_to_it(testbed: Testbed, scale: Scale) -> None:
    waits = await latency.paced_run(testbed, scale, "postgres")
    assert tuple(waits.stages) == latency.STAGES
    assert len(waits.whole) == scale.paced_jobs
    for whole, *stages in zip(waits.whole, *waits.stages.values(), strict=True):
        assert sum(stages) == pytest.approx(whole, abs=0.01)
    assert waits.stages_as_details().keys() == set(latency.STAGES)


async def test_what_is_kept_tells_the_runs_and_the_machine(testbed: Testbed, tmp_path: Path) -> None:
    figure = Figure("f", "ms", (1.0, 2.0), (0.5, 0.5))
    report.write(tmp_path / "figures.json", describe() | {"servers": await testbed.servers()}, [figure])
    kept = orjson.loads((tmp_path / "figures.json").read_bytes())
    assert kept.keys() == {"measured_at", "machine", "figures"}
    assert kept["figures"][0].keys() == FIELDS


async def test_what_is_measured_waits_for_the_disk(testbed: Testbed) -> None:
    servers = await testbed.servers()
    assert {servers[f"postgresql {name}"] for name in ("fsync", "synchronous_commit", "full_page_writes")} == {"on"}


def test_a_figure_tells_its_median_and_whether_the_goal_was_met() -> None:
    figure = Figure("f", "jobs/s", (3.0, 1.0, 2.0), (0.1, 0.2, 0.3), Goal(2.5, at_least=True))
    assert {name: figure.as_json()[name] for name in ("median", "min", "max", "met")} == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "met": False,
    }


def test_an_unknown_figure_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["thruput"])
    assert "no such figure: thruput" in capsys.readouterr().err
