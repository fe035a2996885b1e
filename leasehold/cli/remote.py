"""Commands that call the API: for runs, schedules, dead letters, queues and workers.

`--json` prints the API's answer. jobs.py, operations.py, logs.py and audit.py have the other commands that call the
API.
"""

from __future__ import annotations

import json
import time
from time import monotonic
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from leasehold.cli import jobs, operations
from leasehold.cli.answers import (
    AsJson,
    Cursor,
    IdempotencyKey,
    api_and_key,
    api_client,
    id_of,
    json_argument,
    print_fields,
    print_next_page,
    show,
)
from leasehold.cli.api_client import ApiClient
from leasehold.cli.jobs import show_explanation
from leasehold.cli.logs import logs
from leasehold.cli.running import FAILED, WRONG_USE, failure_printed
from leasehold.cli.terminal import console, harmless, print_line
from leasehold.client.calls import path_part
from leasehold.client.errors import ClientError
from leasehold.client.models import ENDED

schedules = typer.Typer(no_args_is_help=True, help="List, create, pause, resume and delete schedules.")
queues = typer.Typer(no_args_is_help=True, help="List, pause and resume queues.")
workers = typer.Typer(no_args_is_help=True, help="List and drain workers.")
dead_letters = typer.Typer(no_args_is_help=True, help="List and replay steps that failed for good.")

RunId = Annotated[str, typer.Argument(help="The run's id.", callback=id_of("a run"))]
ScheduleId = Annotated[
    str, typer.Argument(help="The schedule's id, as `schedules list` shows it.", callback=id_of("a schedule"))
]
WorkerId = Annotated[
    str, typer.Argument(help="The worker's id, as `workers list` shows it.", callback=id_of("a worker"))
]
_LONG_POLL_SECONDS = 10  # for how long the API may wait for a change of the run before it answers
_PAUSE_SECONDS = 0.5  # the pause of `watch` between two requests; with `--json`, only after an early answer


def submit(
    template: Annotated[str, typer.Argument(help="The template's name: the `type` in its definition.")],
    payload: Annotated[str, typer.Argument(help="The payload, as JSON.")] = "{}",
    scope: Annotated[str, typer.Option(help="The kind of thing that the run is for, such as user.")] = "tenant",
    scope_id: Annotated[str, typer.Option(help="The id of the thing that the run is for.")] = "",
    priority: Annotated[str, typer.Option(help="high, normal or low.")] = "normal",
    tag: Annotated[list[str] | None, typer.Option(help="Add a tag, NAME=VALUE. May be given several times.")] = None,
    follow: Annotated[bool, typer.Option("--watch", help="Follow the run to its end.")] = False,
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Start a run."""
    body = {
        "template": template,
        "payload": json_argument(payload),
        "scope": scope,
        "scope_id": scope_id,
        "priority": priority,
        "tags": dict(_name_and_value(text) for text in tag or ()),
    }
    with api_client() as client:
        created = client.post_once("/v1/runs", body, key=idempotency_key)
    if not (as_json and follow):  # `--json` must print one document, and `watch` prints the whole run
        show(created, as_json, lambda: print_line(created["id"]))
    if follow:
        with api_client() as client:
            # Wait until the API answers. An error here would look as if no run had been started.
            answer = client.get_patiently(f"/v1/runs/{path_part(created['id'])}")
            _watch(client, created["id"], answer, as_json)


def _name_and_value(text: str) -> tuple[str, str]:
    """The name and the value of a tag that was written as NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign:
        raise failure_printed(f"write a tag as NAME=VALUE, not {text}", WRONG_USE)
    return name, value


def watch(run: RunId, as_json: AsJson = False) -> None:
    """Follow a run to its end, with a bar for each step. Exit with 1 unless the run succeeds."""
    with api_client() as client:
        # The first request raises an error if the API does not answer. Later requests report an outage, and wait until
        # the API answers.
        _watch(client, run, client.get(f"/v1/runs/{path_part(run)}"), as_json)


def _watch(client: ApiClient, run: str, answer: dict[str, Any], as_json: bool) -> None:
    """Follow the run to its end, even if the API does not answer for a while. `answer`: the API's first answer."""
    path = f"/v1/runs/{path_part(run)}"
    if as_json:
        while answer["status"] not in ENDED:
            began_at = monotonic()
            answer = client.get_patiently(path, wait=_LONG_POLL_SECONDS)
            if answer["status"] not in ENDED and monotonic() - began_at < _PAUSE_SECONDS:
                # The answer came early. Either the run has changed, or the answer is from a proxy, or from an API
                # process that is stopping.
                time.sleep(_PAUSE_SECONDS)
        typer.echo(json.dumps(answer))
    else:
        answer = _show_bars(client, path, answer)
    if answer["status"] != "succeeded":
        raise typer.Exit(FAILED)


def _show_bars(client: ApiClient, path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Show the bars of the steps until the run has ended. `path`: the run's path in the API. Returns the API's last
    answer.
    """
    name = TextColumn("{task.description}", markup=False)
    note = TextColumn("{task.fields[note]}", markup=False)
    with Progress(name, BarColumn(), TaskProgressColumn(), note, console=console) as progress:
        bars: dict[str, TaskID] = {}
        _update_bars(progress, bars, answer)
        while answer["status"] not in ENDED:
            time.sleep(_PAUSE_SECONDS)
            answer = client.get_patiently(path)
            _update_bars(progress, bars, answer)
    print_line(f"{answer['id']} {answer['status']}")
    if answer.get("error"):
        print_line(f"{answer['error']['code']}: {answer['error']['message']}", "red")
    return answer


def _update_bars(progress: Progress, bars: dict[str, TaskID], answer: dict[str, Any]) -> None:
    """Set the bar of each step. `bars`: the id of a step -> its bar. This function adds a bar for a new step."""
    for step in answer["progress"]["steps"]:
        if step["id"] not in bars:
            bars[step["id"]] = progress.add_task(step["id"], total=100, note="")
        percent = 100 if step["status"] in ("succeeded", "skipped") else step.get("percent", 0)
        # `status` is `pending` for every state in which a step waits; `state` distinguishes these states.
        note = harmless(f"{step['state']} {step.get('summary') or ''}")
        progress.update(bars[step["id"]], completed=percent, note=note)


def runs(
    template: Annotated[str | None, typer.Option(help="List only runs of this template.")] = None,
    status: Annotated[str | None, typer.Option(help="List only runs in this state.")] = None,
    limit: Annotated[int, typer.Option(help="At most 100.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    with api_client() as client:
        answer = client.get("/v1/runs", template=template, status=status, limit=limit, cursor=cursor)

    def print_rows() -> None:
        print_fields(answer["runs"], "id", "template", "status", "scope_id", "created_at", "finished_at", "error")
        print_next_page(answer)

    show(answer, as_json, print_rows)


def cancel(
    run: RunId,
    reason: Annotated[str, typer.Option(help="Store this reason in the run's history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Request the cancel of a run."""
    with api_client() as client:
        answer = client.post(f"/v1/runs/{path_part(run)}/cancel", {"reason": reason})
    show(answer, as_json, lambda: print_line(answer["status"]))


def retry(run: RunId, as_json: AsJson = False) -> None:
    """Run a failed run again from the step that failed."""
    with api_client() as client:
        answer = client.post(f"/v1/runs/{path_part(run)}/retry")
    show(answer, as_json, lambda: print_line(answer["status"]))


def explain(run: RunId, as_json: AsJson = False) -> None:
    """Show why a run is in its state, and what happened in each of its leases."""
    with api_client() as client:
        show_explanation(client.get(f"/v1/runs/{path_part(run)}/explain"), as_json=as_json)


@schedules.command("list")
def list_schedules(
    limit: Annotated[int, typer.Option(help="At most 100.")] = 50, cursor: Cursor = None, as_json: AsJson = False
) -> None:
    """List schedules, the newest first."""
    with api_client() as client:
        answer = client.get("/v1/schedules", limit=limit, cursor=cursor)

    def print_rows() -> None:
        columns = ("id", "template", "cron", "timezone", "enabled", "next_run_at", "last_run_at", "last_error")
        print_fields(answer["schedules"], *columns)
        print_next_page(answer)

    show(answer, as_json, print_rows)


@schedules.command("create")
def create_schedule(
    template: Annotated[str, typer.Argument(help="The template's name: the `type` in its definition.")],
    cron: Annotated[
        str, typer.Argument(help="A cron expression of five fields, or @hourly, @daily, @weekly, @monthly, @yearly.")
    ],
    timezone: Annotated[str, typer.Option(help="Read the cron expression in this IANA time zone.")] = "UTC",
    payload: Annotated[str, typer.Option(help="The payload, as JSON.")] = "{}",
    overlap: Annotated[
        str,
        typer.Option(
            help="What to do while the run before is unfinished: skip, buffer_one, cancel_other or allow_all."
        ),
    ] = "skip",
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a schedule, which starts runs of a template by the clock."""
    body = {
        "template": template,
        "cron": cron,
        "timezone": timezone,
        "payload_template": json_argument(payload),
        "overlap": overlap,
    }
    with api_client() as client:
        created = client.post_once("/v1/schedules", body, key=idempotency_key)
    show(created, as_json, lambda: print_line(f"{created['id']} {_sentence_of_next_run(created)}"))


@schedules.command("pause")
def pause_schedule(schedule: ScheduleId, as_json: AsJson = False) -> None:
    """Pause a schedule. It then fires no more."""
    _set_enabled(schedule, as_json, enabled=False)


@schedules.command("resume")
def resume_schedule(schedule: ScheduleId, as_json: AsJson = False) -> None:
    """Resume a schedule. It fires again from now on."""
    _set_enabled(schedule, as_json, enabled=True)


def _set_enabled(schedule: str, as_json: bool, *, enabled: bool) -> None:
    with api_client() as client:
        answer = client.patch(f"/v1/schedules/{path_part(schedule)}", {"enabled": enabled})
    show(answer, as_json, lambda: print_line(_sentence_of_next_run(answer)))


def _sentence_of_next_run(schedule: dict[str, Any]) -> str:
    if not schedule["enabled"]:
        return "is paused"
    at = schedule["next_run_at"]
    return "fires no more" if at is None else f"next at {at}"


@schedules.command("run-now")
def run_schedule_now(schedule: ScheduleId, idempotency_key: IdempotencyKey = None, as_json: AsJson = False) -> None:
    """Start a run of a schedule now."""
    with api_client() as client:
        answer = client.post_once(f"/v1/schedules/{path_part(schedule)}/run-now", key=idempotency_key)
    show(answer, as_json, lambda: print_line(answer["id"]))


@schedules.command("delete")
def delete_schedule(schedule: ScheduleId, as_json: AsJson = False) -> None:
    """Delete a schedule. Its runs stay."""
    with api_client() as client:
        answer = client.delete(f"/v1/schedules/{path_part(schedule)}")
    show(answer, as_json, lambda: print_line(f"{schedule} is deleted"))


@dead_letters.command("list")
def list_dead_letters(
    kind: Annotated[
        str | None, typer.Option(help="List only those of jobs of this kind: media, conversion, generation or run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters of jobs of every kind, grouped by their cause."""
    with api_client() as client:
        answer = client.get("/v1/dead-letters/groups", kind=kind)
    columns = ("fingerprint", "n", "kind", "template", "step", "code", "message", "last_at")
    show(answer, as_json, lambda: print_fields(answer["groups"], *columns))


@dead_letters.command("replay")
def replay_dead_letters(
    fingerprint: Annotated[str, typer.Argument(help="The fingerprint of the group, as `dead-letters list` shows it.")],
    canary: Annotated[bool, typer.Option(help="Replay only the latest, to see whether it succeeds now.")] = False,
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Run the steps of a group of dead letters again."""
    body = {"fingerprint": fingerprint, "canary": canary}
    with api_client() as client:
        answer = client.post_once("/v1/dead-letters/replay", body, key=idempotency_key)

    def print_summary() -> None:
        print_line(f"replayed {len(answer['replayed'])}")
        if (left := answer.get("left")) is not None:
            print_line(f"left {left['jobs']}: {left['detail']}")
        if answer["refused"]:
            print_fields(answer["refused"], "job_id", "code", "detail")

    show(answer, as_json, print_summary)


@queues.command("list")
def list_queues(
    limit: Annotated[int, typer.Option(help="At most 1000.")] = 1000, cursor: Cursor = None, as_json: AsJson = False
) -> None:
    """List queues with their depth, starts within the last minute, workers and pauses. The queues of
    external workers come last.
    """
    with api_client() as client:
        answer = client.get("/v1/queues", limit=limit, cursor=cursor)

    def print_rows() -> None:
        columns = ("queue", "runnable", "oldest", "starts_per_minute", "workers", "paused_because")
        print_fields(answer["queues"], *columns)
        print_next_page(answer)

    show(answer, as_json, print_rows)


@queues.command("pause")
def pause_queue(
    queue: str,
    reason: Annotated[str, typer.Option(help="Show this reason in `queues list`.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a queue. Workers then start no more of its tasks."""
    with api_client() as client:
        answer = client.post(f"/v1/queues/{path_part(queue)}/pause", {"reason": reason})
    show(answer, as_json, lambda: print_line(f"{queue} is paused"))


@queues.command("resume")
def resume_queue(queue: str, as_json: AsJson = False) -> None:
    """Resume a queue."""
    with api_client() as client:
        answer = client.post(f"/v1/queues/{path_part(queue)}/resume")
    show(answer, as_json, lambda: print_line(f"{queue} is resumed"))


@workers.command("list")
def list_workers(
    limit: Annotated[int, typer.Option(help="At most 1000.")] = 1000, cursor: Cursor = None, as_json: AsJson = False
) -> None:
    """List workers with their queues and leases, the oldest first."""
    with api_client() as client:
        answer = client.get("/v1/workers", limit=limit, cursor=cursor)

    def print_rows() -> None:
        columns = ("id", "host", "pid", "pool", "version", "queues", "leases", "draining", "silent", "seen_at")
        print_fields(answer["workers"], *columns)
        print_next_page(answer)

    show(answer, as_json, print_rows)


@workers.command("drain")
def drain_worker(worker: WorkerId, as_json: AsJson = False) -> None:
    """Let a worker finish its tasks and then exit."""
    with api_client() as client:
        answer = client.post(f"/v1/workers/{path_part(worker)}/drain")
    show(answer, as_json, lambda: print_line(f"{worker} drains"))


def mcp(
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Also offer the tools that submit, retry, replay and cancel.")
    ] = False,
) -> None:
    """Serve the API as tools of a Model Context Protocol client, over stdin and stdout. Needs the extra `mcp`. Without
    LEASEHOLD_URL and LEASEHOLD_API_KEY it serves the `leasehold dev` of the current folder.
    """
    try:
        from leasehold.cli.mcp_server import serve  # noqa: PLC0415 - it is an extra
    except ModuleNotFoundError as error:
        raise failure_printed(f"`leasehold mcp` needs leasehold[mcp]: {error}", WRONG_USE) from None
    try:
        serve(*api_and_key(), allow_writes=allow_writes)
    except ClientError as error:
        raise failure_printed(str(error), WRONG_USE) from None


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module, and of the other modules that call the API, to `app`."""
    for command in (submit, watch, runs, cancel, retry, explain, logs, mcp):
        app.command()(command)
    app.add_typer(jobs.app, name="jobs")
    app.add_typer(operations.app, name="operations")
    app.add_typer(schedules, name="schedules")
    app.add_typer(dead_letters, name="dead-letters")
    app.add_typer(queues, name="queues")
    app.add_typer(workers, name="workers")
