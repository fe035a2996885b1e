"""Code that changes under runs that are under way: it must call what the journal has, or say that it is new."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold import App, Context
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start


async def _first(ctx: Context) -> str:
    await ctx.run(shop.double, 1)
    await ctx.sleep(0.01)
    await ctx.wait_for("go")
    return "old"


async def _another(ctx: Context) -> str:
    await ctx.run(shop.double, 1)
    await ctx.run(shop.large, 3)
    await ctx.wait_for("go")
    return "new"


async def _shorter(ctx: Context) -> str:
    await ctx.run(shop.double, 1)
    return "new"


async def _patched(ctx: Context) -> str:
    await ctx.run(shop.double, 1)
    if ctx.patched("large"):
        await ctx.run(shop.large, 3)
    else:
        await ctx.sleep(0.01)
    await ctx.wait_for("go")
    return "new" if ctx.patched("large") else f"old {ctx.version}"


async def _changed_under(runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch, code: Any) -> tuple[str, Any]:
    """How a run ends that began with `_first`, and goes on with `code`."""
    code_of = shop.changes.pipeline.handlers["run"].__self__  # type: ignore[attr-defined]  # the workflow's handling
    monkeypatch.setattr(code_of, "_function", _first)
    await worker_of(workflow_memory=0)
    run = await runs.submit(shop.changes)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    monkeypatch.setattr(code_of, "_function", code)
    await runs.signal(run, "go", None)
    return await runs.ended(run)


async def test_another_call_than_the_journals_fails_the_run_and_names_both(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, error = await _changed_under(runs, worker_of, monkeypatch, _another)
    assert (status, error["code"]) == ("failed", "workflow_changed")
    for words in ("has sleep sleep as call 2", "the code calls run large", "agreed: run double as call 1"):
        assert words in error["message"]


async def test_code_that_ends_before_its_journal_does_is_refused(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, error = await _changed_under(runs, worker_of, monkeypatch, _shorter)
    assert (status, error["code"]) == ("failed", "workflow_changed")
    assert "the end of the function" in error["message"]


async def test_a_patch_lets_old_runs_end_in_the_old_way_and_new_ones_in_the_new(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _changed_under(runs, worker_of, monkeypatch, _patched) == ("succeeded", "old 1")
    new = await runs.submit(shop.changes)
    await runs.signal(new, "go", None)
    assert await runs.ended(new) == ("succeeded", "new")
    assert [row[2:4] for row in await runs.journal(new)] == [
        ("run", "double"), ("patch", "large"), ("run", "large"), ("signal", "go"),
    ]  # fmt: skip


async def _by_version(ctx: Context) -> str:
    await ctx.wait_for("go")
    return f"version {ctx.version}"


async def test_a_run_keeps_the_version_that_it_was_submitted_with(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`@app.workflow(version=2)`: code chooses by `ctx.version` what an older run has begun."""
    app = App("versions")
    old, new = app.workflow(name="w", version=1)(_by_version), App("newer").workflow(name="w", version=2)(_by_version)
    assert (old.pipeline.version, new.pipeline.version) == (1, 2)
    code_of = shop.changes.pipeline.handlers["run"].__self__  # type: ignore[attr-defined]  # the workflow's handling
    monkeypatch.setattr(code_of, "_function", _by_version)
    await worker_of(workflow_memory=0)
    run = await runs.submit(shop.changes)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    monkeypatch.setattr(shop.changes.pipeline, "version", 2)
    newer = await runs.submit(shop.changes)
    for each in (run, newer):
        await runs.signal(each, "go", None)
    assert [await runs.ended(each) for each in (run, newer)] == [("succeeded", "version 1"), ("succeeded", "version 2")]
