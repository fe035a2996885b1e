"""Ends a process although tasks of its event loop run on. Asyncio would wait for these tasks without end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


async def end_other_tasks(seconds: float) -> bool:
    """Cancel all other tasks of the event loop, and wait until they have ended, for at most `seconds`. Returns whether
    all have ended. A task that catches its CancelledError may run on.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return not others or not (await asyncio.wait(others, timeout=seconds))[1]


def leave(status: int) -> NoReturn:
    """Flush the logs and the output of this process, and end it now, without a wait for anything that still runs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream is closed
            stream.flush()
    os._exit(status)
