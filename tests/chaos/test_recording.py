"""A record that is stopped goes on where it was, and an error in one run ends no other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from chaos import __main__ as program
from chaos import record
from chaos.catalogue import EVERYTHING
from chaos.plan import Plan
from chaos.run import Report

Run = Callable[[Plan], Awaitable[Report]]


class NoServers:
    """Counts how often servers were started."""

    started = 0
    abilities = EVERYTHING

    def __init__(self, **_options: Any) -> None:
        NoServers.started += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def good(plan: Plan) -> Report:
    return Report(plan, "", rested=True, fired=Counter(fault.name for fault in plan.faults))


@pytest.fixture
def carry_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Report]]:
    monkeypatch.setattr(program, "Servers", NoServers)
    monkeypatch.setattr(NoServers, "started", 0)

    def carry_out(*arguments: str, run: Run = good) -> list[Report]:
        async def ran(_servers: NoServers, plan: Plan, **_options: Any) -> Report:
            return await run(plan)

        monkeypatch.setattr(program, "run", ran)
        reports: list[Report] = []
        options = program.parse([*arguments])
        asyncio.run(program.until_stopped(options, Console(quiet=True), reports))
        return reports

    return carry_out


def lines(file: Path) -> list[tuple[int, bool]]:
    """Of each recorded run: the seed, and whether it was red."""
    return [(line["seed"], bool(line["red"])) for line in record.read(file)]


def test_what_its_commit_has_is_not_run_again(carry_out: Callable[..., list[Report]], tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for runs, new in (("2", 2), ("2", 0), ("5", 3)):
        assert len(carry_out("--record", str(file), "--runs", runs)) == new
    assert lines(file) == [(record.FIRST_SEED + nth, False) for nth in range(5)]
    assert carry_out("--record", str(file), "--runs", "1", "--seed", "7")[0].plan == record.plan_of(7, EVERYTHING)


def test_an_error_makes_a_run_red_and_the_next_one_gets_new_servers(
    carry_out: Callable[..., list[Report]], tmp_path: Path
) -> None:
    async def second_fails(plan: Plan) -> Report:
        if plan.seed == record.FIRST_SEED + 1:
            raise TimeoutError("nobody came")
        return await good(plan)

    file = tmp_path / "runs.jsonl"
    reports = carry_out("--record", str(file), "--runs", "3", run=second_fails)
    assert [report.reasons for report in reports] == [[], ["TimeoutError: nobody came"], []]
    assert [red for _, red in lines(file)] == [False, True, False]
    assert NoServers.started == 2


def test_without_a_record_an_error_is_raised(carry_out: Callable[..., list[Report]]) -> None:
    async def fails(_plan: Plan) -> Report:
        raise TimeoutError("nobody came")

    with pytest.raises(TimeoutError):
        carry_out("--seed", "1", run=fails)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_keeps_what_has_run(
    carry_out: Callable[..., list[Report]], tmp_path: Path, number: signal.Signals
) -> None:
    async def second_is_stopped(plan: Plan) -> Report:
        if plan.seed == record.FIRST_SEED + 1:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        return await good(plan)

    file = tmp_path / "runs.jsonl"
    assert len(carry_out("--record", str(file), "--runs", "3", run=second_is_stopped)) == 1
    assert lines(file) == [(record.FIRST_SEED, False)]
    assert len(carry_out("--record", str(file), "--runs", "3")) == 2


@pytest.mark.parametrize(("is_stopped", "status"), [(False, 0), (True, 1)])
def test_runs_that_a_signal_has_prevented_are_no_success(
    carry_out: Callable[..., list[Report]], monkeypatch: pytest.MonkeyPatch, is_stopped: bool, status: int
) -> None:
    async def ran(_servers: NoServers, plan: Plan, **_options: Any) -> Report:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return await good(plan)

    carry_out("--seed", "1")  # leaves its servers in place
    monkeypatch.setattr(program, "run", ran)
    assert program.main(["--seed", "1", "--runs", "2"]) == status
