"""A step that dies ends its own attempt, by its own name, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from leasehold.domain.errors import ChildCrashed, Permanent, Retryable, StepTimeout
from leasehold.domain.pipeline import MIB, Limits
from tests.worker.children.conftest import LIMITS, Pool, resident


@pytest.mark.parametrize("by", ["SIGSEGV", "SIGKILL", "SIGABRT", "SIGTERM", "SIGBUS"])
async def test_death_by_a_signal_is_a_crash_that_names_it(one: Pool, by: str) -> None:
    with pytest.raises(ChildCrashed, match=by) as raised:
        await one.act("dies", by=by)
    assert raised.value.code == "child_crashed"
    assert (await one.act("ok")).value is None


async def test_a_segmentation_fault_is_a_crash_and_the_next_run_works(one: Pool) -> None:
    with pytest.raises(ChildCrashed, match="SIGSEGV"):
        await one.act("segfault")
    assert (await one.act("ok")).value is None


async def test_a_child_that_exits_is_a_crash_that_names_the_status(one: Pool) -> None:
    with pytest.raises(ChildCrashed, match="exit status 7"):
        await one.act("exits", status=7)
    assert (await one.act("ok")).value is None


async def test_a_step_that_hangs_is_killed_at_its_time_limit(one: Pool) -> None:
    with pytest.raises(StepTimeout) as raised:
        await one.act("hang", timeout=0.2)
    assert raised.value.code == "step_timeout"
    assert (await one.act("ok")).value is None


async def test_a_step_that_eats_memory_is_stopped_and_the_worker_does_not_grow(one: Pool) -> None:
    size = resident()
    with pytest.raises(ChildCrashed) as raised:
        await one.act("eat", mib=1024)
    assert raised.value.code == "out_of_memory"
    assert resident() - size < 64 * MIB


async def test_a_step_may_use_the_memory_that_its_limit_grants(one: Pool) -> None:
    assert (await one.value("eat", mib=200))["pid"]


async def test_the_memory_limit_is_each_runs_own(one: Pool) -> None:
    roomy = Limits(memory_bytes=600 * MIB)
    await one.act("eat", mib=500, limits=roomy)
    with pytest.raises(ChildCrashed, match="memory"):
        await one.act("eat", mib=500)
    await one.act("eat", mib=500, limits=roomy)


async def test_a_step_that_burns_cpu_is_stopped(one: Pool) -> None:
    with pytest.raises(ChildCrashed) as raised:
        await one.act("spin", limits=Limits(cpu_seconds=1))
    assert raised.value.code == "cpu_limit"
    assert (await one.act("ok")).value is None


async def test_a_file_beyond_the_size_limit_fails_for_good(one: Pool) -> None:
    with pytest.raises(Permanent) as raised:
        await one.act("writes", path="big", mib=9)
    assert raised.value.code == "file_limit"


async def test_open_files_are_limited(one: Pool) -> None:
    with pytest.raises(Retryable, match="Too many open files"):
        await one.act("opens", count=100)


async def test_a_step_sees_the_limits_of_its_run(one: Pool) -> None:
    value = await one.value("limits", limits=Limits(file_bytes=123 * MIB, open_files=99))
    assert (value["RLIMIT_FSIZE"], value["RLIMIT_NOFILE"], value["RLIMIT_CORE"]) == (123 * MIB, 99, 0)


async def test_code_that_ignores_the_signal_of_the_cpu_limit_is_killed_a_second_later(one: Pool) -> None:
    with pytest.raises(ChildCrashed, match="SIGKILL"):
        await one.act("spins_on", limits=Limits(cpu_seconds=1))


async def test_many_deaths_at_once_do_not_disturb_those_beside_them(one: Pool) -> None:
    acts = [one.act("segfault") if n % 3 == 0 else one.act("ok", n=n) for n in range(12)]
    results = await asyncio.gather(*acts, return_exceptions=True)
    for n, result in enumerate(results):
        if n % 3 == 0:
            assert isinstance(result, ChildCrashed)
        else:
            assert not isinstance(result, BaseException)
            assert result.value == {"n": n}


@pytest.mark.parametrize(
    "forged",
    [
        "ffffffff",  # a frame of 4 GiB
        "00000002" + b"{}".hex(),
        "00000003" + b"\xff\xfe\xfd".hex(),
        "00000010" + (b"[" * 16).hex(),
        "00000033" + b'{"kind":"finished","files":{},"value":null,"more":1}'[:51].hex(),
    ],
)
async def test_a_child_that_answers_with_nonsense_is_killed(one: Pool, forged: str) -> None:
    with pytest.raises(ChildCrashed, match="an invalid answer"):
        await one.act("forges", data=forged)
    assert (await one.act("ok")).value is None


def test_the_limits_of_these_tests_are_smaller_than_the_defaults() -> None:
    assert LIMITS.memory_bytes < Limits().memory_bytes
