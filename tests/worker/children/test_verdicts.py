"""What a handler says reaches the worker as it was said, and nothing else does."""

from __future__ import annotations

from datetime import timedelta

import pytest
import structlog

from leasehold.domain.errors import Permanent, Retryable
from tests.scripted_steps import nested
from tests.worker.children.conftest import LIMITS, Pool


async def test_files_and_value_of_a_step_come_back(one: Pool) -> None:
    source = one.work_dir / "input.txt"
    source.write_bytes(b"hello")
    directory = one.directory()
    done = await one.act("copy", directory=directory, files={"input": source})
    made = done.files["copy.txt"]
    assert (made.path, made.content_type) == (directory / "out" / "copy.txt", "text/plain")
    assert made.path.read_bytes() == b"hello"
    assert done.value == {"bytes": 5}


async def test_a_step_without_value_answers_none(one: Pool) -> None:
    done = await one.act("ok")
    assert (dict(done.files), done.value) == ({}, None)


async def test_a_permanent_error_keeps_its_code_and_sentence(one: Pool) -> None:
    with pytest.raises(Permanent) as raised:
        await one.act("fail", error="permanent", code="corrupt_image")
    assert (raised.value.code, raised.value.message) == ("corrupt_image", "told to fail for good")


async def test_a_retryable_error_keeps_its_delay(one: Pool) -> None:
    with pytest.raises(Retryable) as raised:
        await one.act("fail", error="retryable", code="busy", after=90.5)
    assert (raised.value.code, raised.value.after) == ("busy", timedelta(seconds=90.5))


async def test_a_full_disk_is_no_fault_of_the_handler(one: Pool) -> None:
    with pytest.raises(Retryable) as raised:
        await one.act("fail", error="no room")
    assert raised.value.code == "disk_full"


async def test_any_other_exception_is_retryable_and_its_traceback_stays_in_the_log(one: Pool) -> None:
    with structlog.testing.capture_logs() as logs, pytest.raises(Retryable) as raised:
        await one.act("fail", error="something odd")
    assert (raised.value.code, raised.value.message) == ("handler_error", "ValueError: something odd")
    assert "Traceback" not in str(raised.value)
    assert any("scripted_steps.py" in str(entry.get("traceback")) for entry in logs)


async def test_an_error_with_an_endless_or_unprintable_text_is_cut_and_told(one: Pool) -> None:
    with pytest.raises(Retryable) as raised:
        await one.act("fail", error="é\ud800"[:1] + "x" * 100_000)
    assert len(raised.value.message) <= 2000


async def test_a_handler_that_exits_the_interpreter_is_an_error_not_a_crash(one: Pool) -> None:
    with pytest.raises(Retryable, match="SystemExit: 3"):
        await one.act("fail", error="exit")


async def test_an_answer_that_is_no_verdict_is_an_error(one: Pool) -> None:
    with pytest.raises(Retryable, match="the handler returned a str, not Done"):
        await one.act("answers", what="text")


async def test_parameters_that_the_model_refuses_cannot_succeed(one: Pool) -> None:
    with pytest.raises(Permanent) as raised:
        await one.children.run(
            pipeline="scripted", step="act", params={"unknown": 1}, files={}, directory=one.directory(),
            timeout=30, limits=LIMITS,
        )  # fmt: skip
    assert raised.value.code == "bad_params"


async def test_parameters_too_large_to_hand_over_cannot_succeed(one: Pool) -> None:
    with pytest.raises(Permanent) as raised:
        await one.act("ok", text="x" * 2_000_000)
    assert raised.value.code == "bad_params"
    assert (await one.act("ok")).value is None


async def test_parameters_that_are_nested_too_deep_cannot_succeed(one: Pool) -> None:
    with pytest.raises(Permanent) as raised:
        await one.act("ok", text=nested(250))
    assert raised.value.code == "bad_params"


@pytest.mark.parametrize(("reported", "written"), [("nan", 0.0), ("-inf", 0.0), ("inf", 100.0), ("50", 50.0)])
async def test_progress_that_is_no_percentage_harms_no_step(one: Pool, reported: str, written: float) -> None:
    reports: list[float] = []
    await one.act("reports", percent=reported, on_progress=lambda percent, _summary: reports.append(percent))
    assert reports == [written]


async def test_a_step_has_its_own_directory_as_current_and_temporary_folder(one: Pool) -> None:
    for _ in range(2):
        directory = one.directory()
        value = await one.value("whoami", directory=directory)
        assert (value["cwd"], value["tmp"]) == (str(directory), str(directory))


async def test_a_step_may_use_threads(one: Pool) -> None:
    assert await one.value("threads", count=20) == {"ran": 20}


async def test_no_two_runs_share_a_process(one: Pool) -> None:
    assert len({await one.pid() for _ in range(20)}) == 20
