"""Ends a process even if asyncio tasks do not end. `asyncio.run` would wait for such tasks forever."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


async def end_other_tasks(seconds: float) -> bool:
    """Cancel all asyncio tasks except the caller's, and wait until they have ended, for at most `seconds`. Returns
    whether all have ended. A task that catches its CancelledError may run on.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return not others or not (await asyncio.wait(others, timeout=seconds))[1]


def leave(status: int) -> NoReturn:
    """Flush the logs and the output of this process, and end the process without a wait for its threads and tasks."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream is closed
            stream.flush()
    os._exit(status)
