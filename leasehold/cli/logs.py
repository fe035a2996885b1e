"""`leasehold logs`: what a job logs, over the API. `--json` prints one line of JSON for each line of the log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from leasehold.cli.answers import AsJson, api_client, console
from leasehold.cli.api_client import ApiClient, Interrupted

_PAGE = 1000
#: The pause after a stream that broke, in seconds.
_PAUSE_SECONDS = 1.0
_STYLES = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}


def logs(
    job: Annotated[str, typer.Argument(help="The id of a job of any kind, also of a run.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    step: Annotated[str | None, typer.Option(help="Only lines of this step.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Only lines of the attempt with this number.", min=1)] = None,
    after: Annotated[int, typer.Option(help="Only lines with a greater number.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Print what a job has logged, with the tracebacks of its failures."""
    with api_client() as client:
        lines = _followed(client, job, after, step, attempt) if follow else _pages(client, job, after, step, attempt)
        for line in lines:
            _print(line, as_json=as_json)


def _pages(
    client: ApiClient, job: str, after: int | None, step: str | None, attempt: int | None
) -> Iterator[dict[str, Any]]:
    while after is not None:
        page = client.get(f"/v1/jobs/{job}/logs", after=after, step=step, attempt=attempt, limit=_PAGE)
        yield from page["lines"]
        after = page["next_after"]


def _followed(
    client: ApiClient, job: str, after: int, step: str | None, attempt: int | None
) -> Iterator[dict[str, Any]]:
    """The lines until the job's end. A stream that breaks, or that the API ends to see the key again, is resumed."""
    client.get(f"/v1/jobs/{job}")  # an API that does not answer from the start is no interruption
    while True:
        last = after
        try:
            for event in client.stream(f"/v1/jobs/{job}/logs", last_event_id=str(after), step=step, attempt=attempt):
                yield event.data
                after = event.data["n"]
        except Interrupted:
            time.sleep(_PAUSE_SECONDS)
            continue
        if last == after and client.get(f"/v1/jobs/{job}")["finished_at"] is not None:
            return


def _print(line: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(line))
        return
    text = Text()
    text.append(f"{line['at'][11:23]} ", style="dim")
    text.append(f"{line['step']}#{line['attempt']} ", style="cyan")
    text.append(f"{line['level']:7} ", style=_STYLES.get(line["level"], ""))
    text.append(f"{line['logger']}: {line['message']}")
    for name, value in line.get("fields", {}).items():
        text.append(f" {name}={value}", style="dim")
    if "traceback" in line:
        text.append(f"\n{line['traceback'].rstrip()}", style=_STYLES["error"])
    console.print(text, soft_wrap=True, highlight=False)
