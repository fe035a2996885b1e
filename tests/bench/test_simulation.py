"""The simulation's own logic: it loses no task, knows its cores, its log and its batches, and repeats itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import simulation_tables as tables
from bench.simulation import BATCH, Costs, Plan, simulate

FREE = Costs(**dict.fromkeys(Costs.__slots__, 0.0))


def drain(costs: Costs, workers: int = 1, cores: int = 2, tasks: int = 2560, slots: int = BATCH) -> float:
    """Seconds of a drain on one machine."""
    plan = Plan(workers, cores, shared=True, slots=slots, backlog=tasks)
    outcome = simulate(costs, plan, seed=1)
    assert outcome.tasks == tasks
    return outcome.seconds


def test_the_same_seed_gives_the_same_outcome_and_another_seed_another() -> None:
    costs = replace(FREE, database_task=1e-4, worker_task=1e-4)
    plan = Plan(4, 2, shared=False, slots=8, task_seconds=0.1)
    assert simulate(costs, plan, seed=7) == simulate(costs, plan, seed=7)
    assert simulate(costs, plan, seed=7) != simulate(costs, plan, seed=8)


def test_a_database_with_more_work_than_cores_ends_at_its_cores() -> None:
    costs = replace(FREE, database_task=1e-3)
    for cores in (1, 2, 4):
        assert drain(costs, workers=8, cores=cores) == pytest.approx(2560 * 1e-3 / cores, rel=0.05)


def test_a_worker_uses_one_core_and_more_workers_use_more_until_the_cores_are_busy() -> None:
    costs = replace(FREE, worker_task=1e-3)
    seconds = {workers: drain(costs, workers=workers, cores=2, tasks=10_240) for workers in (1, 2, 4)}
    assert seconds[1] == pytest.approx(10.24, rel=0.05)
    assert seconds[2] == pytest.approx(5.12, rel=0.05)
    assert seconds[4] == pytest.approx(5.12, rel=0.05)


def test_the_broker_takes_its_cores_from_the_others_only_on_a_shared_machine() -> None:
    costs = replace(FREE, database_task=1e-3, broker_task=1e-3)
    shared = simulate(costs, Plan(4, 1, shared=True, backlog=10_240), seed=1)
    apart = simulate(costs, Plan(4, 1, shared=False, backlog=10_240), seed=1)
    assert shared.seconds == pytest.approx(2 * apart.seconds, rel=0.2)
    assert apart.broker == pytest.approx(1.0, rel=0.1)


def test_few_slots_make_small_statements_and_each_statement_costs() -> None:
    costs = replace(FREE, database_statement=1e-3, worker_task=1e-5)
    many = simulate(costs, Plan(1, 2, shared=True, backlog=2560), seed=1)
    few = simulate(costs, Plan(1, 2, shared=True, slots=8, backlog=2560), seed=1)
    assert many.batch > 8 * few.batch
    assert few.batch <= 8
    assert few.seconds > 6 * many.seconds


def test_batches_grow_while_statements_are_slow_and_never_beyond_their_bound() -> None:
    costs = replace(FREE, broker_task=1e-5)
    quick, slow = (
        simulate(replace(costs, database_statement=seconds), Plan(1, 2, shared=True, backlog=5120), seed=1)
        for seconds in (1e-5, 1e-2)
    )
    assert quick.batch < slow.batch <= BATCH


def test_a_statement_goes_on_while_the_tasks_of_the_one_before_run() -> None:
    """As the real batchers: else the loop and the database would wait for each other."""
    costs = replace(FREE, worker_task=1e-3, database_task=1e-3, broker_task=1e-6)
    assert drain(costs, workers=1, cores=2) < 0.85 * 2 * 2.56


def test_commits_that_wait_together_share_a_flush_of_the_log() -> None:
    costs = replace(FREE, flush_seconds=0.01)
    alone, together = drain(costs, workers=1), drain(costs, workers=8, tasks=8 * 2560)
    assert (
        together < 2.1 * alone
    )  # eight times the work; a commit that comes during a flush waits for the next one, too


def test_without_a_backlog_there_is_always_work_and_slots_bound_it() -> None:
    plan = Plan(5, 4, shared=False, slots=10, task_seconds=0.5)
    outcome = simulate(replace(FREE, database_task=1e-6), plan, seed=3, seconds=20)
    assert outcome.rate == pytest.approx(5 * 10 / 0.5, rel=0.05)
    assert outcome.batch < 10


def test_workers_without_work_cost_the_database_and_leases_are_renewed() -> None:
    idle = replace(FREE, database_idle_worker=0.01)
    plan = Plan(20, 4, shared=False, slots=10, task_seconds=1000)
    assert simulate(idle, plan, seed=1, seconds=10).database == pytest.approx(0.2, rel=0.15)
    renewing = replace(FREE, database_renewal=0.001)
    assert simulate(renewing, plan, seed=1, seconds=20).database == pytest.approx(20 * 10 * 0.001 / 10, rel=0.15)


def test_what_breaks_first_is_what_is_nearest_to_its_limit() -> None:
    few = tables.cell(replace(FREE, database_task=1e-4), 10, seed=1)
    assert few.breaks_first == "sessions"
    heavy = tables.cell(replace(FREE, database_task=0.1), 10, seed=1)
    assert heavy.breaks_first == "cores"
    assert heavy.share("cores") == pytest.approx(1.0, rel=0.05)
    written = tables.cell(replace(FREE, log_bytes=1e6), 10, seed=1)
    assert written.breaks_first == "log"


def test_a_cell_listens_where_it_has_no_broker_and_has_a_broker_where_it_does_not_listen() -> None:
    costs = replace(FREE, database_notification=0.01, broker_task=1e-6)
    with_broker, without = (tables.cell(costs, 10, seed=1, broker=broker) for broker in ("amqp", "postgres"))
    assert with_broker.breaks_first == "sessions"
    assert without.breaks_first == "LISTEN"
    assert (with_broker.used.keys() ^ without.used.keys()) == {"broker", "LISTEN"}
    assert without.used["cores"] == pytest.approx(with_broker.used["cores"] + without.used["LISTEN"])


def test_a_cell_of_many_is_as_large_as_an_installation_of_so_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_WORKERS", (10, 20))
    monkeypatch.setattr(tables, "_CELLS", (1, 2, 50))
    costs = replace(FREE, database_task=1e-4, log_bytes=1000)
    rows = [[field.strip() for field in line.split("|")[1:-1]] for line in tables.cells(costs, seed=1)[2:]]
    by_size = {(row[0], row[1]): row for row in rows}
    assert by_size["20", "2"][3:] == by_size["10", "1"][3:]
    assert ("10", "50") not in by_size
