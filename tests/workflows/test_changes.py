"""Code that changes under runs that are under way: it must call what the journal has, or say that it is new."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from leasehold import App, Context
from tests.workflows import shop
from tests.workflows.conftest import SECONDS, Runs, Start
from tests.workflows.test_calls import Port, driven, entry, note


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


async def _changed_under(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch, code: Any, first: Any = _first
) -> tuple[str, Any]:
    """How a run ends that began with `first`, and goes on with `code`."""
    code_of = shop.changes.pipeline.handlers["run"].__self__  # type: ignore[attr-defined]  # the workflow's handling
    monkeypatch.setattr(code_of, "_function", first)
    await worker_of(workflow_memory=0)
    run = await runs.submit(shop.changes)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    monkeypatch.setattr(code_of, "_function", code)
    await runs.signal(run, "go", None)
    return await _ended_without_pauses(runs, run)


async def _ended_without_pauses(runs: Runs, run: UUID) -> tuple[str, Any]:
    async with asyncio.timeout(SECONDS):
        while not await runs.connection.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", run):
            await runs.connection.execute(
                "UPDATE task SET available_at = clock_timestamp() WHERE job_id = $1 AND status = 'retry'", run
            )
            await asyncio.sleep(0.05)
    return await runs.ended(run)


async def test_a_run_of_new_code_is_put_off_by_a_worker_that_still_has_the_old_code(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As during a deployment: the old code does not know the patch, and failed the run for good."""
    code_of = shop.changes.pipeline.handlers["run"].__self__  # type: ignore[attr-defined]  # the workflow's handling
    monkeypatch.setattr(code_of, "_function", _patched)
    await worker_of(workflow_memory=0)
    run = await runs.submit(shop.changes)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    monkeypatch.setattr(code_of, "_function", _first)
    await runs.signal(run, "go", None)
    await runs.until(run, "EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND t.status = 'retry')")
    before = await runs.journal(run)
    monkeypatch.setattr(code_of, "_function", _patched)
    assert await _ended_without_pauses(runs, run) == ("succeeded", "new")
    after = await runs.journal(run)
    assert after[:-1] == before[:-1], "the old code added no call"


async def test_another_call_than_the_journals_fails_the_run_in_the_end_and_names_both(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, error = await _changed_under(runs, worker_of, monkeypatch, _another)
    assert (status, error["code"]) == ("failed", "workflow_changed")
    assert await runs.connection.fetchval("SELECT errors FROM task WHERE NOT contained") == 5
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


async def _listens(ctx: Context) -> None:
    await ctx.wait_for("go")


def _gathering(what: str, *, patched: bool) -> Any:
    """Code whose second await is a gather that takes no number in the workflow's own branch, or not yet. `patched`: a
    patch inserts a step before it.
    """

    async def inner(ctx: Context) -> None:
        await gathers(ctx, "branches")

    async def gathers(ctx: Context, what: str) -> None:
        is_new = patched and ctx.patched("large")
        if is_new:
            await ctx.run(shop.large, 3)
        if what == "branches":
            await ctx.gather(_listens(ctx))
        elif what == "a gather of a gather":
            await ctx.gather(ctx.gather(_listens(ctx)))
        elif what == "a gather in a branch":
            await ctx.gather(inner(ctx))
        elif what == "branches after branches without calls":
            await ctx.gather(_calls_nothing())
            await ctx.gather(_listens(ctx))
        assert not is_new, "the run is old"

    async def code(ctx: Context) -> str:
        await ctx.run(shop.double, 1)
        await gathers(ctx, what)
        await ctx.run(shop.double, 2)
        return "old"

    return code


async def _calls_nothing() -> None:
    pass


@pytest.mark.parametrize(
    "what",
    ["branches", "a gather of a gather", "a gather in a branch", "branches after branches without calls"],
)
async def test_a_run_in_a_gather_takes_the_old_way_at_a_patch_before_the_gather(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The calls of the gather's branches have no place in the branch that awaits the gather."""
    old, new = (_gathering(what, patched=patched) for patched in (False, True))
    assert await _changed_under(runs, worker_of, monkeypatch, new, old) == ("succeeded", "old")


async def test_a_run_takes_the_old_way_at_a_patch_before_a_function_that_was_under_way_when_its_worker_died() -> None:
    """Such a function has no row, and what began beside it has one."""

    async def code(ctx: Context) -> bool:
        is_new = ctx.patched("p")
        await ctx.gather(ctx.call(note), ctx.sleep(5))
        return is_new

    assert await driven(Port(entry("sleep", "sleep", number=2, state="done")), code) is False


async def test_a_branch_that_comes_to_a_patch_first_takes_the_new_way_whatever_other_branches_have_called() -> None:
    async def asks(ctx: Context) -> bool:
        return ctx.patched("p")

    async def code(ctx: Context) -> bool:
        return (await ctx.gather(asks(ctx), ctx.sleep(5), _sleeps(ctx)))[0] is True

    sleeps = [entry("sleep", "sleep", state="done"), replace(entry("sleep", "sleep", state="done"), branch="1.2/")]
    assert await driven(Port(*sleeps), code) is True


async def _sleeps(ctx: Context) -> None:
    await ctx.sleep(5)


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
