"""The worker's process: settings, logs, signals. SIGTERM or SIGINT drains; a second one stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import structlog
import uvloop

from leasehold.domain.errors import DeclarationError
from leasehold.runtime import failpoints
from leasehold.runtime.garbage import freeze_loaded
from leasehold.settings import Settings
from leasehold.telemetry.logs import configure_logs
from leasehold.telemetry.meters import expose
from leasehold.telemetry.traces import begin_traces
from leasehold.urls import refuse_bad_urls
from leasehold.worker.worker import Worker

log = structlog.get_logger(__name__)


async def serve(settings: Settings) -> None:
    """Run one worker until it is told to stop and has drained."""
    told = asyncio.Event()
    again = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: again.set() if told.is_set() else told.set())
    async with Worker(settings) as worker:
        freeze_loaded()
        await _first(told.wait(), worker.retired.wait(), worker.broken())
        await _first(worker.drain(), again.wait(), worker.broken())
    log.info("stopped")


async def _first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Wait for one of them, end the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    settings = Settings()
    configure_logs(settings)
    refuse_bad_urls(settings)
    failpoints.arm(settings.failpoints)
    expose(settings, "worker")
    if settings.traces:
        begin_traces("worker")
    try:
        uvloop.run(serve(settings))
    except DeclarationError as error:
        log.error("not started", reason=str(error))  # noqa: TRY400 - the reason is all that there is to say
        raise SystemExit(1) from error
