"""`leasehold dev` goes on when changed code does not start, and loads the next change."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leasehold.cli import reloading
from leasehold.embedded.process import EmbeddedError


class Installation:
    """Its first restart fails, as with a lifespan that raises."""

    environment = {"LEASEHOLD_PIPELINES": "shop:app"}  # noqa: RUF012 - nobody changes it

    def __init__(self) -> None:
        self.restarts = 0
        self.ended: list[Any] = []

    async def restart(self) -> None:
        self.restarts += 1
        if self.restarts == 1:
            raise EmbeddedError("worker did not start; the end of its log: [x]")


async def test_code_that_does_not_start_is_reported_and_the_next_change_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loads(_environment: object) -> None:
        return None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reloading, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(reloading, "_problem", loads)
    looks: list[Path] = []
    times_of = reloading.times_of

    def look(folder: Path) -> Any:
        times = times_of(folder)
        looks.append(folder)
        return times

    monkeypatch.setattr(reloading, "times_of", look)
    out = io.StringIO()
    installation: Any = Installation()
    (tmp_path / "shop.py").write_text("")
    watching = asyncio.create_task(reloading.reload_on_change(installation, Console(file=out, width=200)))
    async with asyncio.timeout(60):
        while not looks:
            await asyncio.sleep(0.02)
        for restarts in (1, 2):
            os.utime(tmp_path / "shop.py", (restarts, restarts))
            while installation.restarts < restarts:
                await asyncio.sleep(0.02)
        while out.getvalue().count("\n") < 2:
            await asyncio.sleep(0.02)
    assert not watching.done()
    watching.cancel()
    first, second = out.getvalue().splitlines()
    assert first == "shop.py changed, and does not start: worker did not start; the end of its log: [x]"
    assert second == "shop.py changed: loaded again"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import os\nfrom leasehold import App\napp = App(os.environ['ONLY_FOR_WORKERS'])\n", None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "the process that loads it: killed by SIGKILL"),
        ("import os\nos._exit(3)\n", "the process that loads it: exit status 3"),
    ],
)
async def test_changed_code_is_loaded_with_the_environment_of_the_workers_and_a_silent_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(code)
    environment = {"LEASEHOLD_PIPELINES": "shop:app", "ONLY_FOR_WORKERS": "shop", "PYTHONPATH": str(tmp_path)}
    assert await reloading._problem(environment) == problem


class Keeps:
    """An installation whose worker has ended by itself. It starts again unless `fails`."""

    def __init__(self) -> None:
        self.ended: list[Any] = [self]
        self.starts = 0
        self.fails = False

    def failure(self, event: str) -> EmbeddedError:
        return EmbeddedError(f"worker {event}; the end of its log:\n  [x]")

    async def restart_ended(self) -> None:
        self.starts += 1
        if self.fails:
            raise EmbeddedError("worker did not start; the end of its log: [y]")


async def test_a_process_that_ends_again_and_again_is_started_after_growing_pauses_until_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(reloading, "monotonic", lambda: now)
    out = io.StringIO()
    keeps: Any = Keeps()
    keeper = reloading._Keeper(keeps, Console(file=out, width=200))
    started_after = []
    for _ in range(8):
        began, before = now, keeps.starts
        await keeper.check()
        while keeps.starts == before:
            now += 0.5
            await keeper.check()
        started_after.append(now - began)
    assert started_after == [1, 2, 4, 8, 16, 32, 60, 60]
    assert out.getvalue().startswith("worker has ended, and starts again in 1 s; the end of its log:\n  [x]\n")
    assert out.getvalue().count("has ended") == 8
    keeps.fails = True
    await keeper.check()
    now += 60
    await keeper.check()
    assert out.getvalue().endswith(
        "did not start; the end of its log: [y]\nThe next change of a file starts it again.\n"
    )
    now += 600
    await keeper.check()
    assert (keeps.starts, out.getvalue().count("has ended")) == (9, 9)
    keeps.ended, keeps.fails = [], False
    quiet = reloading._Keeper(keeps, Console(file=out, width=200))
    await quiet.check()
    now += 600
    await quiet.check()
    assert keeps.starts == 9
