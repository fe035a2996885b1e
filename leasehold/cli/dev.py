"""`leasehold dev`: runs the whole platform on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from rich.console import Console

from leasehold.cli.installation import Installation


async def run(**options: Any) -> None:
    """Run an Installation until SIGINT or SIGTERM. Raises EmbeddedError when a part does not start; then all are
    stopped.
    """
    console = Console()
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    with console.status("starting"):
        starting = asyncio.create_task(_enter(Installation(**options)))
        stopping = asyncio.create_task(stop_requested.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop_requested.is_set() and not starting.done():
            starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
    if starting.cancelled():
        return
    installation = starting.result()
    try:
        console.print(_card(installation), highlight=False, soft_wrap=True)
        await stop_requested.wait()
        console.print("stopping: running steps finish or are released")
    finally:
        stopping.cancel()
        await installation.__aexit__(None, None, None)


async def _enter(installation: Installation) -> Installation:
    return await installation.__aenter__()


def _card(installation: Installation) -> str:
    logs = ", ".join(str(path) for path in installation.logs.values())
    return (
        f"API      {installation.api_url}   (what it can do: {installation.api_url}/openapi.json)\n"
        f"key      {installation.api_key}\n"
        f"broker   {installation.broker}\n"
        f"database {installation.environment['LEASEHOLD_DATABASE_URL']}\n"
        f"fences   {installation.fences}\n"
        f"logs     {logs}\n"
        f"metrics  {', '.join(installation.metrics.values())}\n\n"
        f"curl -s {installation.api_url}/upload-url -H 'Authorization: Bearer {installation.api_key}' \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        '  -d \'{"content_type": "image/jpeg", "file_name": "a.jpg", "content_length": 48213}\'\n\n'
        "Ctrl-C stops everything."
    )
