"""What the probes of one process share: the result of one run, but never an error that has passed."""

from __future__ import annotations

import asyncio

import pytest

from leasehold.api.fleet.health import _SharedRun

LONG = 1000.0


async def test_requests_share_one_run_while_it_lasts_and_its_result_afterwards() -> None:
    runs = 0

    async def run() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0)
        return runs

    shared = _SharedRun(run, LONG)
    assert list(await asyncio.gather(shared.result(), shared.result())) == [1, 1]
    assert await shared.result() == 1


async def test_a_result_is_not_shared_for_longer_than_it_may_be() -> None:
    runs = iter((1, 2))

    async def run() -> int:
        return next(runs)

    shared = _SharedRun(run, -1.0)
    assert [await shared.result(), await shared.result()] == [1, 2]


@pytest.mark.parametrize("error", [ValueError("unforeseen"), asyncio.CancelledError()])
async def test_after_an_error_the_next_request_runs_it_again(error: BaseException) -> None:
    errors = iter((error, None))

    async def run() -> str:
        if (failure := next(errors)) is not None:
            raise failure
        return "well"

    shared = _SharedRun(run, LONG)
    with pytest.raises(type(error)):
        await shared.result()
    assert await shared.result() == "well"
