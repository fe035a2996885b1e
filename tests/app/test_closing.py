"""A wait for a run ends when the app's connections are closed, and when the query for ends cannot be made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from leasehold import App
from leasehold.app.endings import Endings
from leasehold.app.portal import Portal, PortalClosed
from leasehold.domain.ids import new_id
from tests.app.test_submitting import app, wait_long

SECONDS = 20.0


async def test_a_thread_and_a_coroutine_that_wait_for_a_run_end_when_the_app_is_closed(
    using: Callable[..., App],
) -> None:
    using(app)
    run = await wait_long.asubmit()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            run.wait()
        except Exception as error:  # noqa: BLE001 - the test names its kind
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waiting = asyncio.create_task(run.awaited())
    await asyncio.sleep(0.3)
    await asyncio.to_thread(app.close)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(PortalClosed, match="were closed"):
            await waiting
    await asyncio.to_thread(thread.join, SECONDS)
    assert [type(error) for error in errors] == [PortalClosed]
    assert await run.astatus() in ("pending", "queued")  # the next use opens the connections again


def test_a_call_after_the_close_is_refused_and_not_left_to_wait() -> None:
    portal = Portal("tests")
    portal.close()

    async def work() -> None: ...

    with pytest.raises(PortalClosed):
        portal.call(work())


async def test_a_query_that_can_never_be_made_ends_the_waits() -> None:
    class Broken:
        def acquire(self) -> Any:
            raise LookupError("no such thing")

    endings: Any = Endings(Broken())  # type: ignore[arg-type]  # that is the test
    async with asyncio.timeout(SECONDS):
        with pytest.raises(LookupError, match="no such thing"):
            await endings.wait(new_id(), None)
