"""`leasehold logs` prints the lines that a job logs. The command reads them over the API.

`--json` prints one line of JSON for each line of the log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from leasehold.cli.answers import AsJson, api_client, id_of
from leasehold.cli.api_client import ApiClient, Interrupted
from leasehold.cli.terminal import console, harmless
from leasehold.client.calls import path_part
from leasehold.client.models import ENDED

_PAGE_LINES = 1000  # the API returns at most this many lines at once
#: The pause after a stream that had no lines, in seconds.
_PAUSE_SECONDS = 1.0
#: The style of a line of each level, for Rich.
_STYLES = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}


def logs(
    job: Annotated[str, typer.Argument(help="The id of a job of any kind, such as a run.", callback=id_of("a job"))],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the job ends.")] = False,
    step: Annotated[str | None, typer.Option(help="Print only lines of this step.")] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Print only lines of the attempt with this number.", min=1)
    ] = None,
    after: Annotated[int, typer.Option(help="Print only lines with a greater number.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Print what a job has logged, with the tracebacks of its failures."""
    with api_client() as client:
        lines = _follow(client, job, after, step, attempt) if follow else _pages(client, job, after, step, attempt)
        for line in lines:
            _print(line, as_json=as_json)


def _pages(
    client: ApiClient, job: str, after: int | None, step: str | None, attempt: int | None
) -> Iterator[dict[str, Any]]:
    path = f"/v1/jobs/{path_part(job)}/logs"
    while after is not None:  # None: the last page has been read
        page = client.get(path, after=after, step=step, attempt=attempt, limit=_PAGE_LINES)
        yield from page["lines"]
        after = page["next_after"]


def _follow(client: ApiClient, job: str, after: int, step: str | None, attempt: int | None) -> Iterator[dict[str, Any]]:
    """Yield the lines until the job has ended. Open the stream again when it breaks or when the API ends it. From time
    to time the API ends a stream, in order to check the API key again. Return when a stream that began after the job's
    end has no lines, because then no further line can come.
    """
    path = f"/v1/jobs/{path_part(job)}"
    # Raise now if the API does not answer. Later, `pause_for` waits for the API, and says so.
    client.get(path)
    has_ended = False  # whether the job had already ended when this stream began
    while True:
        cursor_before = after
        try:
            for event in client.stream(f"{path}/logs", last_event_id=str(after), step=step, attempt=attempt):
                yield event.data
                after = event.data["n"]
            if cursor_before == after:  # the stream had no lines
                if has_ended:
                    return
                has_ended = client.get(path)["status"] in ENDED
                if not has_ended:
                    time.sleep(_PAUSE_SECONDS)  # a proxy may end each stream at once
        except Interrupted as error:
            client.pause_for(error)


def _print(line: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(line))
        return
    parts = [
        (f"{line['at'][11:23]} ", "dim"),
        (f"{line['step']}#{line['attempt']} ", "cyan"),
        (f"{line['level']:7} ", _STYLES.get(line["level"], "")),
        (f"{line['logger']}: {line['message']}", ""),
        *((f" {name}={value}", "dim") for name, value in line.get("fields", {}).items()),
    ]
    if "traceback" in line:
        parts.append((f"\n{line['traceback'].rstrip()}", _STYLES["error"]))
    text = Text.assemble(*((harmless(part), style) for part, style in parts))
    console.print(text, soft_wrap=True, highlight=False)
