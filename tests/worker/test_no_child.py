"""An attempt at an isolated step that gets no child process is put off, and charged with nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY as METRICS

from leasehold.domain.errors import DeclarationError
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.attempts import isolated
from leasehold.worker.attempts import runner as runner_module
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.sandbox import children as children_module
from leasehold.worker.sandbox.children import NoChild, NoneForked
from leasehold.worker.sandbox.spares import SPARE_CHILDREN
from leasehold.worker.sandbox.zygote_process import Recipe, Zygote
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker.children.conftest import pool
from tests.worker.conftest import SECONDS, end_of
from tests.worker.isolated_steps import halves, pipelines

PUT_OFF = "SELECT count(*) FROM task WHERE job_id = $1 AND status = 'waiting'"
FAILURES = "SELECT count(*) FROM failure WHERE task_id IN (SELECT id FROM task WHERE job_id = $1)"
COUNTED, OF_HALVES = "leasehold_attempts_without_child_total", {"pipeline": "halves"}
CHARGED = "SELECT sum(errors + crashes + losses) FROM task WHERE job_id = $1"


def test_an_attempt_is_put_off_before_it_counts_as_overdue() -> None:
    """For so long its lease is renewed beyond the limit of the step."""
    waits = isolated._WARM_UP_SECONDS + children_module._CHILD_SECONDS
    assert waits < runner_module._AFTER_LIMIT_SECONDS


async def test_a_step_whose_zygote_does_not_start_again_is_put_off_and_charged_with_nothing(
    settings: Settings, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Zygote.start
    broken = asyncio.Event()

    async def fails(_recipe: Recipe) -> Zygote:
        broken.set()
        raise DeclarationError("its packages are being replaced")

    changes: dict[str, Any] = {
        "poll_seconds": 0.1, "work_dir": str(tmp_path), "worker_children": 1, "lease_seconds": 3, "renew_seconds": 0.5,
        "trust_margin_seconds": 1, "pipelines": "tests.worker.isolated_steps:pipelines",
    }  # fmt: skip
    async with Worker(settings.model_copy(update=changes), pipelines()) as worker:
        await asyncio.wait_for(worker.complete.wait(), SECONDS)
        spares = worker.parts.children._spares["halves"]
        assert spares._zygote is not None
        assert METRICS.get_sample_value(COUNTED, OF_HALVES) is not None, "the first one counts, too"
        counted = METRICS.get_sample_value(COUNTED, OF_HALVES) or 0.0
        with monkeypatch.context() as patched:
            patched.setattr(Zygote, "start", fails)
            patched.setattr(children_module, "_CHILD_SECONDS", 0.5)
            patched.setattr(children_module, "_CHILD_SECONDS_WHILE_FAILING", 0.5)
            # Without a child, an attempt is overdue 3 s after its claim.
            patched.setattr(runner_module, "_AFTER_LIMIT_SECONDS", 3.0 - halves.steps[0].timeout.total_seconds())
            os.kill(spares._zygote.pid, signal.SIGKILL)
            await asyncio.wait_for(broken.wait(), SECONDS)
            new = jobs.NewJob(halves, "t", params={})
            await jobs.submit(rows.connection, [new])
            async with asyncio.timeout(SECONDS):
                while not await rows.connection.fetchval(PUT_OFF, new.id):
                    assert await rows.connection.fetchval(CHARGED, new.id) == 0
                    await asyncio.sleep(0.05)
            assert (METRICS.get_sample_value(COUNTED, OF_HALVES) or 0.0) > counted, "else nobody learns of it"
        assert Zygote.start == start
        job = await end_of(rows, new.id)
        assert job["status"] == "succeeded"
        assert await rows.connection.fetchval(CHARGED, new.id) == 0
        assert await rows.connection.fetchval(FAILURES, new.id) == 0


async def test_a_run_that_gets_no_slot_in_time_leaves_it_to_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await pool(tmp_path)
    running = asyncio.create_task(made.act("hang"))
    async with asyncio.timeout(SECONDS):
        while made.children.free_slots:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(children_module, "_CHILD_SECONDS", 0.05)
            with pytest.raises(NoChild) as put_off:
                await made.act("ok")
            assert not isinstance(put_off.value, NoneForked), "the zygote is well"
        running.cancel()
        await asyncio.wait([running])
        assert (await made.act("ok")).value is None
    await made.children.close()


async def test_a_run_does_not_wait_a_minute_for_a_zygote_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker can take its task soon."""
    made = await pool(tmp_path)
    (name,) = made.children.pipelines
    assert not made.children.failing(name)
    assert not made.children.failing("unknown")
    assert children_module._CHILD_SECONDS_WHILE_FAILING < 10 < children_module._CHILD_SECONDS

    async def fails(_recipe: Recipe) -> Zygote:
        raise DeclarationError("its packages are being replaced")

    zygote = made.children._spares[name]._zygote
    assert zygote is not None
    async with asyncio.timeout(SECONDS / 2):
        with monkeypatch.context() as patched:
            patched.setattr(Zygote, "start", fails)
            patched.setattr(children_module, "_CHILD_SECONDS_WHILE_FAILING", 0.05)
            os.kill(zygote.pid, signal.SIGKILL)
            while not made.children.failing(name):
                await asyncio.sleep(0.01)
            with pytest.raises(NoneForked, match=r"within 0\.05 s"):
                await made.act("ok")
        while made.children.failing(name):
            await asyncio.sleep(0.01)
        assert (await made.act("ok")).value is None
    await made.children.close()


async def test_a_run_does_not_wait_a_minute_for_a_zygote_that_cannot_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await pool(tmp_path)
    (name,) = made.children.pipelines

    async def fails(_zygote: Zygote) -> None:
        raise BlockingIOError

    async with asyncio.timeout(SECONDS / 2):
        while len(made.children._spares[name]._idle) < SPARE_CHILDREN:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(Zygote, "fork", fails)
            for _ in range(SPARE_CHILDREN):
                assert not made.children.failing(name), "there are spare children"
                await made.act("ok")
            while not made.children.failing(name):
                await asyncio.sleep(0.01)
        while made.children.failing(name):
            await asyncio.sleep(0.01)
    await made.children.close()


async def test_an_attempt_waits_for_the_warm_up_no_longer_than_its_lease_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolated, "_WARM_UP_SECONDS", 0.01)
    unused: Any = None
    warming: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())
    attempts = IsolatedAttempts(
        store=unused, pool=unused, children=unused, warming=warming, reporter=unused, directories=unused,
        settings=unused,
    )  # fmt: skip
    try:
        with pytest.raises(NoChild):
            await asyncio.wait_for(attempts.may_perform(halves), SECONDS)
        assert not warming.cancelled(), "the worker goes on warming up"
    finally:
        warming.cancel()
