"""The commands that call the API: runs, schedules, dead letters, queues, workers. `--json` prints the API's answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table

from leasehold.cli.api_client import ApiClient, Refused

console = Console()
schedules = typer.Typer(no_args_is_help=True, help="Runs by the clock.")
queues = typer.Typer(no_args_is_help=True, help="Queues: see, pause, resume.")
workers = typer.Typer(no_args_is_help=True, help="Workers: see, drain.")
dead_letters = typer.Typer(no_args_is_help=True, help="Steps that failed for good: see, replay.")

AsJson = Annotated[bool, typer.Option("--json", help="Print what the API answered.")]
RunId = Annotated[str, typer.Argument(help="The run's id.")]
_ENDED = ("succeeded", "failed", "cancelled", "expired")
_FAILED = 1
_POLL_SECONDS = 10


@contextmanager
def _api_client() -> Iterator[ApiClient]:
    """A client for LEASEHOLD_URL with the key LEASEHOLD_API_KEY. A refusal ends the command with a sentence."""
    key = os.environ.get("LEASEHOLD_API_KEY")
    if not key:
        raise _failure("set LEASEHOLD_API_KEY to an API key (leasehold keys create)")
    try:
        with ApiClient(os.environ.get("LEASEHOLD_URL", "http://127.0.0.1:8000"), key) as api_client:
            yield api_client
    except Refused as error:
        raise _failure(str(error)) from None


def _failure(sentence: str) -> typer.Exit:
    Console(stderr=True).print(f"leasehold: {sentence}", style="red", highlight=False, markup=False)
    return typer.Exit(_FAILED)


def _parsed(payload: str) -> Any:
    """The payload of an argument. A payload that is not JSON is a failure."""
    try:
        return json.loads(payload)
    except ValueError as error:
        raise _failure(f"the payload is not JSON: {error}") from None


def _show(answer: Any, as_json: bool, otherwise: Callable[[], None]) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        otherwise()


def _table(rows: Sequence[dict[str, Any]], *columns: str) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return str(value.get("code") or json.dumps(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def submit(
    template: Annotated[str, typer.Argument(help="The template's type.")],
    payload: Annotated[str, typer.Argument(help="JSON.")] = "{}",
    scope: Annotated[str, typer.Option(help="What the run is for, such as user.")] = "tenant",
    scope_id: Annotated[str, typer.Option(help="Which of them.")] = "",
    priority: Annotated[str, typer.Option(help="high, normal or low.")] = "normal",
    follow: Annotated[bool, typer.Option("--watch", help="Wait for the end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run."""
    body = {
        "template": template,
        "payload": _parsed(payload),
        "scope": scope,
        "scope_id": scope_id,
        "priority": priority,
    }
    with _api_client() as api_client:
        created = api_client.post("/v1/runs", body)
    if not (as_json and follow):  # `watch` prints the whole run: `--json` must print one document only
        _show(created, as_json, lambda: console.print(created["id"], highlight=False))
    if follow:
        watch(created["id"], as_json)


def watch(run: RunId, as_json: AsJson = False) -> None:
    """Follow a run to its end, with a bar for each step. Exits with 1 unless it succeeds."""
    with _api_client() as api_client:
        answer = api_client.get(f"/v1/runs/{run}")
        if as_json:
            while answer["status"] not in _ENDED:
                answer = api_client.get(f"/v1/runs/{run}", wait=_POLL_SECONDS)
            typer.echo(json.dumps(answer))
        else:
            answer = _bars(api_client, run, answer)
    if answer["status"] != "succeeded":
        raise typer.Exit(_FAILED)


def _bars(api_client: ApiClient, run: str, answer: dict[str, Any]) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}
        while True:
            for step in answer["progress"]["steps"]:
                if step["id"] not in bars:
                    bars[step["id"]] = progress.add_task(step["id"], total=100, note="")
                done = 100 if step["status"] in ("succeeded", "skipped") else step.get("percent", 0)
                progress.update(bars[step["id"]], completed=done, note=f"{step['state']} {step.get('summary', '')}")
            if answer["status"] in _ENDED:
                break
            time.sleep(0.5)
            answer = api_client.get(f"/v1/runs/{run}")
    console.print(f"{answer['id']} {answer['status']}", highlight=False)
    if answer.get("error"):
        console.print(f"{answer['error']['code']}: {answer['error']['message']}", style="red", markup=False)
    return answer


def runs(
    template: Annotated[str | None, typer.Option(help="Only of this template.")] = None,
    status: Annotated[str | None, typer.Option(help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option(help="At most 100.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    with _api_client() as api_client:
        answer = api_client.get("/v1/runs", template=template, status=status, limit=limit)
    columns = ("id", "template", "status", "scope_id", "created_at", "finished_at", "error")
    _show(answer, as_json, lambda: _table(answer["runs"], *columns))


def cancel(
    run: RunId,
    reason: Annotated[str, typer.Option(help="Stored in the run's history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Request the cancel of a run."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/runs/{run}/cancel", {"reason": reason})
    _show(answer, as_json, lambda: console.print(answer["status"]))


def retry(run: RunId, as_json: AsJson = False) -> None:
    """Run a failed run again from the step that failed."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/runs/{run}/retry")
    _show(answer, as_json, lambda: console.print(answer["status"]))


def explain(run: RunId, as_json: AsJson = False) -> None:
    """Show why a run is in its state, and what each lease of it did."""
    with _api_client() as api_client:
        answer = api_client.get(f"/v1/runs/{run}/explain")

    def tell() -> None:
        for reason in answer["reasons"]:
            console.print(f"{reason['code']}: {reason['message']}", highlight=False, markup=False)
        _table(answer["ledger"], "seq", "at", "kind", "step", "epoch", "worker")

    _show(answer, as_json, tell)


@schedules.command("list")
def list_schedules(as_json: AsJson = False) -> None:
    """List schedules."""
    with _api_client() as api_client:
        answer = api_client.get("/v1/schedules")
    columns = ("id", "template", "cron", "timezone", "enabled", "next_run_at", "last_run_at", "last_error")
    _show(answer, as_json, lambda: _table(answer["schedules"], *columns))


@schedules.command("create")
def create_schedule(
    template: Annotated[str, typer.Argument(help="The template's type.")],
    cron: Annotated[str, typer.Argument(help="Five fields, or @hourly and its like.")],
    timezone: Annotated[str, typer.Option(help="An IANA zone.")] = "UTC",
    payload: Annotated[str, typer.Option(help="JSON.")] = "{}",
    overlap: Annotated[str, typer.Option(help="skip, buffer_one, cancel_other or allow_all.")] = "skip",
    as_json: AsJson = False,
) -> None:
    """Run a template by the clock."""
    body = {
        "template": template,
        "cron": cron,
        "timezone": timezone,
        "payload_template": _parsed(payload),
        "overlap": overlap,
    }
    with _api_client() as api_client:
        created = api_client.post("/v1/schedules", body)
    _show(created, as_json, lambda: console.print(f"{created['id']} next at {created['next_run_at']}", highlight=False))


@schedules.command("pause")
def pause_schedule(schedule: str, as_json: AsJson = False) -> None:
    """Pause a schedule: it fires no more."""
    _enable(schedule, as_json, enabled=False)


@schedules.command("resume")
def resume_schedule(schedule: str, as_json: AsJson = False) -> None:
    """Resume a schedule: it fires again from now on."""
    _enable(schedule, as_json, enabled=True)


def _enable(schedule: str, as_json: bool, *, enabled: bool) -> None:
    with _api_client() as api_client:
        answer = api_client.patch(f"/v1/schedules/{schedule}", {"enabled": enabled})
    _show(answer, as_json, lambda: console.print(f"next at {answer['next_run_at']}", highlight=False))


@schedules.command("run-now")
def run_schedule_now(schedule: str, as_json: AsJson = False) -> None:
    """Start a run of a schedule now."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/schedules/{schedule}/run-now")
    _show(answer, as_json, lambda: console.print(answer["id"], highlight=False))


@schedules.command("delete")
def delete_schedule(schedule: str) -> None:
    """Delete a schedule. Its runs stay."""
    with _api_client() as api_client:
        api_client.delete(f"/v1/schedules/{schedule}")


@dead_letters.command("list")
def list_dead_letters(as_json: AsJson = False) -> None:
    """List dead letters, grouped by their cause."""
    with _api_client() as api_client:
        answer = api_client.get("/v1/dead-letters/groups")
    columns = ("fingerprint", "n", "template", "step", "code", "message", "last_at")
    _show(answer, as_json, lambda: _table(answer["groups"], *columns))


@dead_letters.command("replay")
def replay_dead_letters(
    fingerprint: Annotated[str, typer.Argument(help="As `dead-letters list` shows it.")],
    canary: Annotated[bool, typer.Option(help="Replay only one, to see whether it succeeds now.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the steps of a group of dead letters again."""
    with _api_client() as api_client:
        answer = api_client.post("/v1/dead-letters/replay", {"fingerprint": fingerprint, "canary": canary})
    _show(answer, as_json, lambda: console.print(f"replayed {len(answer['replayed'])}", highlight=False))


@queues.command("list")
def list_queues(as_json: AsJson = False) -> None:
    """List queues with their depth, workers and pauses."""
    with _api_client() as api_client:
        answer = api_client.get("/v1/queues")
    _show(answer, as_json, lambda: _table(answer["queues"], "queue", "runnable", "oldest", "workers", "paused_because"))


@queues.command("pause")
def pause_queue(
    queue: str,
    reason: Annotated[str, typer.Option(help="Shown by `queues list`.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a queue: workers start no more of its tasks."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/queues/{queue}/pause", {"reason": reason})
    _show(answer, as_json, lambda: console.print(f"{queue} is paused"))


@queues.command("resume")
def resume_queue(queue: str, as_json: AsJson = False) -> None:
    """Resume a queue."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/queues/{queue}/resume")
    _show(answer, as_json, lambda: console.print(f"{queue} is resumed"))


@workers.command("list")
def list_workers(as_json: AsJson = False) -> None:
    """Who works, on what, with how many leases."""
    with _api_client() as api_client:
        answer = api_client.get("/v1/workers")
    _show(
        answer,
        as_json,
        lambda: _table(answer["workers"], "id", "host", "pid", "queues", "leases", "draining", "seen_at"),
    )


@workers.command("drain")
def drain_worker(worker: str, as_json: AsJson = False) -> None:
    """Let it finish what it has, and end."""
    with _api_client() as api_client:
        answer = api_client.post(f"/v1/workers/{worker}/drain")
    _show(answer, as_json, lambda: console.print(f"{worker} drains", highlight=False))


def add_to(app: typer.Typer) -> None:
    """All of the above, as commands of `app`."""
    for command in (submit, watch, runs, cancel, retry, explain):
        app.command()(command)
    app.add_typer(schedules, name="schedules")
    app.add_typer(dead_letters, name="dead-letters")
    app.add_typer(queues, name="queues")
    app.add_typer(workers, name="workers")
