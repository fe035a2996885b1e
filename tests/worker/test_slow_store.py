"""The time limit of an isolated attempt is that of its handler: what the object store takes does not count."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from leasehold.domain.errors import StoreUnavailable
from leasehold.domain.verdicts import Done
from leasehold.worker.attempts import isolated
from leasehold.worker.attempts.failures import as_step_error
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.leases import held_lease
from leasehold.worker.leases.held_lease import MAX_BEYOND_LIMIT_SECONDS, HeldLease
from tests.worker.isolated_steps import halves
from tests.worker.test_runner import claimed

#: Seconds that each of the slow functions takes, and seconds for which the lease is held at first.
SLOW, LIMIT = 200.0, 150.0


class Stage:
    """An attempt whose handler and whose requests to the store note how many seconds of the limit are left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = monotonic()
        self.left: list[tuple[str, float]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(held_lease, "monotonic", lambda: self.now)
        of = claimed()
        self.claimed = replace(of, lease=replace(of.lease, epoch=2))
        self.held = HeldLease(self.claimed.lease, self.now + LIMIT)
        monkeypatch.setattr(isolated, "sources_of", AsyncMock(return_value=[]))
        for name, result in (("fetch", {}), ("find_published", None), ("publish_outputs", SimpleNamespace(outputs=[]))):
            monkeypatch.setattr(isolated, name, self._slow(name, result))
        children: Any = SimpleNamespace(run=self._slow("run", Done(), 1.0))
        directories: Any = Mock(remove=AsyncMock(), path_of=Mock(return_value=Path()), make=Mock(return_value=Path()))
        unused: Any = Mock()
        self._attempts = IsolatedAttempts(
            store=unused, pool=unused, children=children, warming=unused, reporter=unused, directories=directories,
            settings=unused,
        )  # fmt: skip

    def _slow(self, name: str, result: object, seconds: float = SLOW) -> Any:
        async def slow(*_arguments: object, **_named: object) -> object:
            self.left.append((name, self.held.renew_until - self.now))
            self.now += seconds
            if self.error is not None:
                raise self.error
            return result

        return slow

    async def perform(self) -> None:
        step = replace(halves.steps[0], isolated=True)
        pipeline: Any = SimpleNamespace(name="halves", steps=[step], finishers={})
        await self._attempts.perform(self.claimed, pipeline, step, self.held, 30.0, lambda: False)


async def test_the_time_of_the_store_does_not_count_for_the_limit_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt whose inputs came slowly had no time left for its handler, or was charged with a timeout before."""
    stage = Stage(monkeypatch)
    await stage.perform()
    beyond = LIMIT + MAX_BEYOND_LIMIT_SECONDS
    assert [name for name, _ in stage.left] == ["fetch", "find_published", "run", "publish_outputs"]
    assert [left for _, left in stage.left] == pytest.approx([beyond, beyond, LIMIT, beyond - 1])
    assert stage.held.renew_until - stage.now == pytest.approx(LIMIT - 1)


async def test_a_store_that_is_away_for_longer_than_the_limit_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.error = StoreUnavailable("it did not answer")
    with pytest.raises(StoreUnavailable) as away:
        await stage.perform()
    assert as_step_error(away.value).code == "store_unavailable"
    assert stage.held.renew_until - stage.now == pytest.approx(LIMIT), "the lease is still held for the settlement"


async def test_a_worker_whose_main_loop_hangs_does_not_keep_a_lease_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    with stage.held.beyond_limit():
        await asyncio.sleep(0)
        assert stage.held.renew_until - stage.now == pytest.approx(LIMIT + MAX_BEYOND_LIMIT_SECONDS)
    assert MAX_BEYOND_LIMIT_SECONDS <= 3600
