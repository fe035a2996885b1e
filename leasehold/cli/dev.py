"""`leasehold dev` runs the whole platform on this machine until Ctrl-C, and prints how to use it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from rich.console import Console

from leasehold.app.dev_file import dev_file
from leasehold.app.task import Task
from leasehold.celery.task import CeleryTask
from leasehold.cli.installation import Installation
from leasehold.cli.reloading import reload_on_change
from leasehold.domain.registry import Pipelines
from leasehold.embedded.process import event_of_stop_signals
from leasehold.runtime.gather import cancel_and_wait
from leasehold.settings import Settings


async def run(source: str | None, **options: Any) -> None:
    """Run an Installation until a signal stops it. `source`: the app that the Installation serves; None: it serves the
    shipped pipelines. `options`: the other arguments of Installation.

    Raises EmbeddedError if a part does not start, and any error of `reload_on_change`. Before it raises, all parts are
    stopped.
    """
    console = Console()
    stop_task = asyncio.create_task(event_of_stop_signals().wait())
    with console.status("starting"):
        # A user who edits an app needs a quick start, and RabbitMQ takes about 8 s. So with `source` the start does not
        # wait for RabbitMQ (`patient`).
        installation = await _start_unless_stopped(Installation(**options, patient=source is None), stop_task)
    if installation is None:
        return
    try:
        with dev_file(variables_of(installation)):
            welcome_text = _welcome_text(installation) if source is None else _app_welcome_text(installation)
            console.print(welcome_text, highlight=False, soft_wrap=True, markup=False)
            reload_task = asyncio.create_task(reload_on_change(installation, console))
            await asyncio.wait((stop_task, reload_task), return_when=asyncio.FIRST_COMPLETED)
            if reload_task.done():  # it has raised an error, because `reload_on_change` ends in no other way
                await reload_task
            await cancel_and_wait(reload_task)
        console.print("stopping: running steps finish or are released")
    finally:
        stop_task.cancel()
        await installation.__aexit__(None, None, None)


async def _start_unless_stopped(installation: Installation, stop_task: asyncio.Task[Any]) -> Installation | None:
    """Start the installation. If `stop_task` ends first, stop what has started, and return None."""
    start_task = asyncio.create_task(_start(installation))
    await asyncio.wait((start_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
    if stop_task.done() and not start_task.done():
        start_task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start_task
    return None if start_task.cancelled() else start_task.result()


async def _start(installation: Installation) -> Installation:
    return await installation.__aenter__()


def variables_of(installation: Installation) -> dict[str, str]:
    """The environment variables that `dev_file` writes into a file: for programs in the current folder that submit
    jobs, and for commands that call the API. The programs get the broker `postgres`, because RabbitMQ may not be ready
    yet. A worker that uses RabbitMQ then gets no hints (messages that a task is due) of their jobs. Only its polls find
    these jobs. By default the worker polls ten times a second if RabbitMQ starts late, and twice a second otherwise.
    """
    return installation.environment | {
        "LEASEHOLD_BROKER": "postgres",
        "LEASEHOLD_URL": installation.api_url,
        "LEASEHOLD_API_KEY": installation.api_key,
    }


def _app_welcome_text(installation: Installation) -> str:
    source = installation.environment["LEASEHOLD_PIPELINES"]
    module = source.partition(":")[0]
    registry = Pipelines.from_source(source)
    # Leave out the pipelines that do the platform's own work (`unlimited` marks them).
    names = [pipeline.name for pipeline in registry if not pipeline.terms.unlimited]
    program = program_that_submits(module)
    logs = ", ".join(str(path) for path in installation.logs.values())
    return (
        f"serves   {', '.join(names) or 'nothing yet'}\n"
        f"{_console_line(installation)}"
        f"API      {installation.api_url}   (key {installation.api_key})\n"
        f"broker   {installation.broker}\n"
        f"logs     {logs}\n\n"
        f"Edit {module.replace('.', '/')}.py: it is loaded again when you save it."
        + ("\n\n" if program is None else f" Submit from this folder:\n  python -c '{program}'\n\n")
        + "Ctrl-C stops everything."
    )


def program_that_submits(module: str) -> str | None:
    """A Python program that submits a run of a task of the loaded module. Returns None if the module has no task."""
    for name, value in vars(sys.modules[module]).items():
        if isinstance(value, Task):
            arguments = "..." if value.arguments.names else ""
            return f"from {module} import {name}; print({name}.submit({arguments}).result())"
        if isinstance(value, CeleryTask):
            return f"from {module} import {name}; print({name}.delay(...).get())"
    return None


def _console_line(installation: Installation) -> str:
    """The line with the console's address; "" with LEASEHOLD_CONSOLE=off."""
    url = installation.console_url()
    return "" if url is None else f"console  {url}\n"


def _metrics_line(installation: Installation) -> str:
    """The line with the addresses of the metrics; "" with LEASEHOLD_METRICS=false."""
    return f"metrics  {', '.join(installation.metrics.values())}\n" if Settings().metrics else ""


def _welcome_text(installation: Installation) -> str:
    logs = ", ".join(str(path) for path in installation.logs.values())
    return (
        f"{_console_line(installation)}"
        f"API      {installation.api_url}   (what it can do: {installation.api_url}/openapi.json)\n"
        f"key      {installation.api_key}\n"
        f"broker   {installation.broker}\n"
        f"database {installation.environment['LEASEHOLD_DATABASE_URL']}\n"
        f"fences   {installation.fences}\n"
        f"logs     {logs}\n"
        f"{_metrics_line(installation)}\n"
        f"{_first_request(installation)}\n\n"
        "Ctrl-C stops everything."
    )


def _first_request(installation: Installation) -> str:
    from leasehold.pipelines import has_extra_media  # noqa: PLC0415 - `leasehold dev APP` loads no shipped kinds

    if not has_extra_media():
        return "Pictures are not processed: that needs pip install 'leasehold[media]'."
    return (
        f"curl -s {installation.api_url}/upload-url -H 'Authorization: Bearer {installation.api_key}' \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        '  -d \'{"content_type": "image/jpeg", "file_name": "a.jpg", "content_length": 48213}\''
    )
