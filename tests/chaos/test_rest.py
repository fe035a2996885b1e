"""When a run is called at rest: it waits for as long as less and less is unfinished, and no longer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import collect, run
from chaos.history import History

POLLS = run._SETTLED_POLLS


class Idle:
    """An installation without processes. `unfinished`: what each poll finds; a poll takes `seconds`."""

    def __init__(self, unfinished: Iterator[int], seconds: float) -> None:
        self.slots: dict[str, Any] = {}
        self.unfinished = unfinished
        self.seconds = seconds
        self.now = 0.0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        yield None

    async def count_unfinished(self, _connection: None) -> dict[str, int]:
        return {"jobs": next(self.unfinished), "outbox": 0}

    async def overdue(self, _connection: None, _patience: float) -> list[str]:
        return []

    async def sleep(self, _seconds: float) -> None:
        self.now += self.seconds


async def rest(monkeypatch: pytest.MonkeyPatch, installation: Idle) -> History:
    monkeypatch.setattr(collect, "count_unfinished", installation.count_unfinished)
    monkeypatch.setattr(collect, "overdue", installation.overdue)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: installation.now))
    monkeypatch.setattr(run, "asyncio", SimpleNamespace(sleep=installation.sleep))
    history = History(collect.terms())
    await run._rest(installation, history)  # type: ignore[arg-type]  # all that it needs
    return history


async def test_a_slow_machine_that_finishes_less_and_less_comes_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = run._REST_SECONDS / 4
    history = await rest(monkeypatch, Idle(chain(range(9, 0, -1), repeat(0)), seconds))
    assert history.rested
    assert history.rest_seconds == (9 + POLLS) * seconds


async def test_what_is_never_finished_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = run._REST_SECONDS / 4
    history = await rest(monkeypatch, Idle(chain((5, 3), repeat(3)), seconds))
    assert not history.rested
    assert history.rest_seconds == 5 * seconds


async def test_work_that_comes_and_goes_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    history = await rest(monkeypatch, Idle(chain.from_iterable(repeat((3, 4, 5))), run._REST_SECONDS / 4))
    assert not history.rested
