"""`leasehold jobs` finds, shows and changes jobs of every kind over the API. `--json` prints the API's answer."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from leasehold.cli.answers import (
    AsJson,
    Cursor,
    IdempotencyKey,
    api_client,
    id_of,
    json_argument,
    print_fields,
    print_next_page,
    show,
)
from leasehold.cli.api_client import without_none
from leasehold.cli.running import WRONG_USE, failure_printed
from leasehold.cli.terminal import print_line
from leasehold.client.calls import path_part
from leasehold.domain.job_filter import InvalidFilter, parse
from leasehold.domain.sentences import counted, to_the_second

app = typer.Typer(no_args_is_help=True, help="Find, show, explain, retry, cancel and delete jobs of every kind.")
#: The fields of a job that `get` shows.
_SHOWN_FIELDS = ("id", "kind", "template", "status", "created_at", "started_at", "finished_at", "tags", "parameters")
JobId = Annotated[str, typer.Argument(help="The job's id.", callback=id_of("a job"))]


def _checked_filter(words: list[str] | None) -> str:
    """Join the command's arguments to one filter. If the filter is invalid, print it with a mark under the invalid
    character, and end the command.
    """
    text = " ".join(words or ())
    try:
        parse(text, datetime.now(UTC))
    except InvalidFilter as error:
        stderr = Console(stderr=True)
        print_line(text, to=stderr)
        print_line(" " * (error.position - 1) + "^", to=stderr)
        raise failure_printed(error.sentence, WRONG_USE) from None
    return text


def _number_of_jobs(count: dict[str, Any], one: str, many: str) -> str:
    """A phrase with the number of jobs. `count`: the API's count, with the members `n` and `exact`. If it is not exact,
    the phrase begins with "about". `one`, `many`: the words after the number 1, and after any other number.
    """
    return ("" if count["exact"] else "about ") + counted(count["n"], one, many)


@app.command("list")
def list_jobs(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILTER", help="For example: kind:media status:failed created:<1h")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most 100.")] = 20,
    cursor: Cursor = None,
    count: Annotated[bool, typer.Option(help="Also count the jobs that match.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    query = _checked_filter(words)
    with api_client() as client:
        answer = client.get("/v1/jobs", q=query, limit=limit, cursor=cursor, count="true" if count else None)

    def print_summary() -> None:
        print_fields(answer["jobs"], "id", "kind", "template", "status", "created_at", "finished_at", "error")
        count_of_all = answer.get("count")
        if count_of_all is not None:
            print_line(_number_of_jobs(count_of_all, "job matches", "jobs match"))
        if answer.get("searched_back_to") is not None:
            instant = to_the_second(datetime.fromisoformat(answer["searched_back_to"]))
            print_line(f"Searched back to {instant}: older jobs may match")
        print_next_page(answer)

    show(answer, as_json, print_summary)


@app.command("get")
def get_job(job: JobId, as_json: AsJson = False) -> None:
    """Show a job with its steps, outputs and results."""
    with api_client() as client:
        answer = client.get(f"/v1/jobs/{path_part(job)}")

    def print_summary() -> None:
        for name in _SHOWN_FIELDS:
            if answer.get(name):
                print_line(f"{name:12}{answer[name]}")
        print_fields(answer["steps"], "id", "state", "attempt", "queue", "started_at", "finished_at", "worker")
        for step in answer["steps"]:
            for attempt in step["attempts"]:
                print_line(f"{step['id']}: {attempt['code']}: {attempt['message']}", "red")
        if answer["outputs"]:
            print_fields(answer["outputs"], "step", "name", "size", "content_type")

    show(answer, as_json, print_summary)


@app.command("explain")
def explain_job(job: JobId, as_json: AsJson = False) -> None:
    """Show why a job is in its state, and what happened in each of its leases."""
    with api_client() as client:
        show_explanation(client.get(f"/v1/jobs/{path_part(job)}/explain"), as_json=as_json)


def show_explanation(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print why a job is in its state, and its ledger (what the workers did with the job). `answer`: the API's answer
    about this job.
    """

    def print_summary() -> None:
        for reason in answer["reasons"]:
            print_line(f"{reason['code']}: {reason['message']}")
        print_fields(answer["ledger"], "seq", "at", "kind", "step", "epoch", "worker")

    show(answer, as_json, print_summary)


@app.command("events")
def list_events(
    job: JobId,
    after: Annotated[int, typer.Option(help="List only events with a greater number.")] = 0,
    limit: Annotated[int, typer.Option(help="At most 500.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the events of a job, the oldest first."""
    with api_client() as client:
        answer = client.get(f"/v1/jobs/{path_part(job)}/events", after=after, limit=limit)
    columns = ("seq", "at", "kind", "status", "step", "step_status", "message")
    show(answer, as_json, lambda: print_fields(answer["events"], *columns))


OptionalJobId = Annotated[
    str | None,
    typer.Argument(help="The job's id. Leave it out to act on all jobs that --filter finds.", callback=id_of("a job")),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", help="Act on every job that this filter finds, as a bulk operation."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; count the jobs and show some.")]
Canary = Annotated[
    int | None, typer.Option(help="Try this number of jobs first; stop if one of them fails.", show_default=False)
]
Rate = Annotated[
    int | None,
    typer.Option(
        help="Act on at most this number of jobs a second. Without it, a retry takes LEASEHOLD_OPERATION_RETRY_RATE."
    ),
]


@app.command("retry")
def retry_job(
    job: OptionalJobId = None,
    from_step: Annotated[
        str | None, typer.Option(help="Also rerun this step and every step that depends on it.")
    ] = None,
    payload: Annotated[str | None, typer.Option(help="Use this payload, as JSON. Only a run has one.")] = None,
    filter_: Filter = None,
    dry_run: DryRun = False,
    canary: Canary = None,
    rate: Rate = None,
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Run a failed job again from the step that failed, or every failed job that a filter finds."""
    _check_target(
        job, filter_, single_only=(from_step, payload), bulk_only=(dry_run or None, canary, rate, idempotency_key)
    )
    if filter_ is not None:
        options = {"dry_run": dry_run, "canary": canary, "rate": rate}
        submit_operation("retry", filter_, options, idempotency_key, as_json=as_json)
        return
    body = {} if from_step is None else {"from_step": from_step}
    if payload is not None:
        body["payload"] = json_argument(payload)
    with api_client() as client:
        answer = client.post(f"/v1/jobs/{path_part(job)}/retry", body)
    show(answer, as_json, lambda: print_line(answer["status"]))


@app.command("cancel")
def cancel_job(
    job: OptionalJobId = None,
    reason: Annotated[str, typer.Option(help="Store this reason in the job's history.")] = "",
    filter_: Filter = None,
    dry_run: DryRun = False,
    canary: Canary = None,
    rate: Rate = None,
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Request the cancel of a job, or of every unfinished job that a filter finds."""
    _check_target(job, filter_, bulk_only=(dry_run or None, canary, rate, idempotency_key))
    if filter_ is not None:
        options = {"reason": reason, "dry_run": dry_run, "canary": canary, "rate": rate}
        submit_operation("cancel", filter_, options, idempotency_key, as_json=as_json)
        return
    with api_client() as client:
        answer = client.post(f"/v1/jobs/{path_part(job)}/cancel", {"reason": reason})
    show(answer, as_json, lambda: print_line(answer["status"]))


@app.command("unsettled")
def list_unsettled(
    what: Annotated[
        str,
        typer.Option(
            help="List orders (of unknown outcome), approvals (workflows that wait for a signal), external (steps of "
            "silent workers), webhooks (disabled) or schedules (paused by the platform)."
        ),
    ] = "orders",
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List what only a person can settle, the newest first."""
    with api_client() as client:
        answer = client.get("/v1/unsettled", what=what, cursor=cursor)

    def print_items() -> None:
        columns = ("template", "system", "sent_at", "sent", "step", "queue", "because", "since")
        print_fields(answer["items"], "job_id", "webhook_id", "schedule_id", *columns)
        print_next_page(answer)

    show(answer, as_json, print_items)


@app.command("settle")
def settle_jobs(
    jobs: Annotated[list[str], typer.Argument(help="The ids of the jobs.", callback=id_of("a job"))],
    adopt: Annotated[
        str | None, typer.Option(help="The provider has the order under this id. Name a single job.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send the orders once more.")] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Leave the jobs failed.")] = False,
    reason: Annotated[str, typer.Option(help="Store this reason in the audit.")] = "",
    as_json: AsJson = False,
) -> None:
    """Settle orders of unknown outcome. Look at the provider first. Exit with 1 if a settlement was refused."""
    if (adopt is not None) + again + give_up != 1:
        raise failure_printed("choose one of --adopt REF, --again and --give-up", WRONG_USE)
    if adopt is not None and len(jobs) != 1:
        raise failure_printed("--adopt takes exactly one job", WRONG_USE)
    action = "adopt" if adopt is not None else "again" if again else "give_up"
    settlement = {"action": action, "reason": reason} | ({"ref": adopt} if adopt is not None else {})
    with api_client() as client:
        answer = client.post("/v1/unsettled/settle", {"settlements": [{"job_id": job} | settlement for job in jobs]})

    def print_outcome() -> None:
        for job in answer["settled"]:
            print_line(f"{job}: settled")
        for refusal in answer["refused"]:
            print_line(f"{refusal['job_id']}: {refusal['code']}: {refusal['detail']}")

    show(answer, as_json, print_outcome)
    if answer["refused"]:
        raise typer.Exit(1)


@app.command("delete")
def delete_job(
    job: OptionalJobId = None,
    filter_: Filter = None,
    dry_run: DryRun = False,
    canary: Canary = None,
    rate: Rate = None,
    idempotency_key: IdempotencyKey = None,
    as_json: AsJson = False,
) -> None:
    """Delete a job with its objects, or every job that a filter finds. An unfinished job is cancelled first."""
    _check_target(job, filter_, bulk_only=(dry_run or None, canary, rate, idempotency_key))
    if filter_ is not None:
        options = {"dry_run": dry_run, "canary": canary, "rate": rate}
        submit_operation("delete", filter_, options, idempotency_key, as_json=as_json)
        return
    with api_client() as client:
        answer = client.delete(f"/v1/jobs/{path_part(job)}")
    sentence = f"{answer.get('status')}: it is deleted when it has stopped" if answer else "deleted"
    show(answer, as_json, lambda: print_line(sentence))


def _check_target(
    job: str | None, filter_: str | None, *, single_only: Iterable[object] = (), bulk_only: Iterable[object]
) -> None:
    """End the command with an error in two cases: the user gave both a job and a filter, or neither of them; or the
    user gave an option that does not go with them. `single_only`: the options that go with a job only. `bulk_only`:
    the options that go with a filter only. An option that the user did not give is None.
    """
    if (job is None) == (filter_ is None):
        raise failure_printed("name one job, or write --filter", WRONG_USE)
    if filter_ is not None and any(option is not None for option in single_only):
        raise failure_printed("--from-step and --payload are for one job", WRONG_USE)
    if filter_ is None and any(option is not None for option in bulk_only):
        raise failure_printed("--dry-run, --canary, --rate and --idempotency-key go with --filter", WRONG_USE)


def submit_operation(
    action: str, filter_: str, options: dict[str, Any], idempotency_key: str | None, *, as_json: bool
) -> None:
    """Submit a bulk operation, or preview it. Options that are None keep the API's defaults."""
    body = {"action": action, "filter": _checked_filter([filter_])} | without_none(options)
    with api_client() as client:
        answer = client.post_once("/v1/operations", body, key=idempotency_key)

    def print_summary() -> None:
        if "dry_run" in answer:
            total = answer["total"]
            print_line(f"{_number_of_jobs(total, 'job', 'jobs')}, at most {answer['rate']} a second")
            print_fields(answer["examples"], "id", "kind", "template", "status", "created_at", "finished_at", "error")
        else:
            print_line(answer["id"])

    show(answer, as_json, print_summary)
