"""The worker's process: it reads the settings, starts the log, and runs one worker until a signal ends it.

SIGTERM or SIGINT drains the worker: it claims nothing more, and ends when its attempts have ended. A second signal
stops it immediately. While the worker starts, the first signal stops it immediately. If a handler catches its
CancelledError and goes on, the process does not wait for that handler before it ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import structlog
import uvloop

from leasehold.domain.errors import BadSetting, CodeBroken, DeclarationError
from leasehold.runtime import failpoints
from leasehold.runtime.garbage import collect_rarely, freeze_loaded
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.leaving import end_other_tasks, leave
from leasehold.settings import Settings
from leasehold.starting import settings_or_exit
from leasehold.telemetry.listener import Health
from leasehold.telemetry.logs import configure_logs
from leasehold.telemetry.meters import expose
from leasehold.telemetry.traces import begin_traces
from leasehold.worker.worker import Worker

log = structlog.get_logger(__name__)

#: Seconds that the asyncio tasks of handlers have to end once the worker has closed.
_END_SECONDS = 2.0


async def serve(settings: Settings, health: Health | None = None) -> None:
    """Run one worker until a signal or an operator has stopped it and its attempts have ended. Raises the error that
    ended a part of the worker.
    """
    first_signal = asyncio.Event()
    second_signal = asyncio.Event()
    loop = asyncio.get_running_loop()
    start_task = asyncio.current_task()  # None once the worker has started

    def on_signal() -> None:
        if first_signal.is_set():
            second_signal.set()
            return
        first_signal.set()
        if start_task is not None:
            start_task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with Worker(settings, health=health) as worker:
            start_task = None
            freeze_loaded()
            await _first_of(first_signal.wait(), worker.retired.wait(), worker.failed())
            await _first_of(worker.drain(), second_signal.wait(), worker.failed())
    except asyncio.CancelledError:
        if start_task is None:
            raise
        start_task.uncancel()  # `on_signal` has cancelled the start, so the process ends without an error
    log.info("stopped")


async def _serve_and_leave(settings: Settings, health: Health) -> None:
    """Call `serve`. If the asyncio task of a handler still runs `_END_SECONDS` after `serve` has ended, end the process
    without waiting for this task.
    """
    try:
        await serve(settings, health)
    except BaseException:
        if not await end_other_tasks(_END_SECONDS):
            log.exception("a handler runs on: the process ends without it, after an error")
            leave(1)
        raise
    if not await end_other_tasks(_END_SECONDS):
        log.warning("a handler runs on: the process ends without it")
        leave(0)


async def _first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Wait until one coroutine ends, and cancel the others. Raises the error of the coroutine that ended, if any."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await cancel_and_wait(*tasks)


def main() -> None:
    collect_rarely()
    settings = settings_or_exit()
    configure_logs(settings)
    failpoints.arm(settings.failpoints)  # the places at which a test stops or kills this process
    health = Health()
    expose(settings, "worker", health)
    if settings.traces:
        begin_traces("worker")
    try:
        uvloop.run(_serve_and_leave(settings, health))
    except CodeBroken as error:
        log.error("not started", reason=str(error), exception=error.trace)  # noqa: TRY400 - only the user's frames
        raise SystemExit(error.exit_status) from error
    except (BadSetting, DeclarationError) as error:
        log.error("not started", reason=str(error))  # noqa: TRY400 - a traceback would hide the reason
        raise SystemExit(1) from error
