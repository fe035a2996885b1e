"""`leasehold operations` lists, shows and aborts the bulk operations that `leasehold jobs ... --filter` submits."""

from __future__ import annotations

from typing import Annotated

import typer

from leasehold.cli.answers import AsJson, Cursor, api_client, id_of, print_fields, print_next_page, show
from leasehold.cli.terminal import print_line
from leasehold.client.calls import path_part

app = typer.Typer(no_args_is_help=True, help="List, show and abort bulk operations.")
OperationId = Annotated[str, typer.Argument(help="The operation's id.", callback=id_of("an operation"))]
#: The fields that the command `leasehold operations show` prints.
_FIELDS = ("id", "action", "filter", "status", "by", "rate", "canary", "total", "acted", "refused", "percent", "error")


@app.command("list")
def list_operations(
    limit: Annotated[int, typer.Option(help="At most 100.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List bulk operations, the newest first."""
    with api_client() as client:
        answer = client.get("/v1/operations", limit=limit, cursor=cursor)

    def print_summary() -> None:
        columns = ("id", "action", "filter", "status", "acted", "refused", "percent", "created_at")
        print_fields(answer["operations"], *columns)
        print_next_page(answer)

    show(answer, as_json, print_summary)


@app.command("show")
def show_operation(operation: OperationId, as_json: AsJson = False) -> None:
    """Show how far an operation is, and the newest jobs that it could not act on."""
    with api_client() as client:
        path = f"/v1/operations/{path_part(operation)}"
        answer = client.get(path)
        refusals = client.get(f"{path}/refusals") if answer["refused"] else {"refusals": []}

    def print_summary() -> None:
        for name in _FIELDS:
            if answer.get(name) is not None:
                print_line(f"{name:10}{answer[name]}")
        if refusals["refusals"]:
            print_fields(refusals["refusals"], "job_id", "code", "detail", "at")

    show(answer | refusals, as_json, print_summary)


@app.command("abort")
def abort_operation(operation: OperationId, as_json: AsJson = False) -> None:
    """Stop an operation. What it did stays done."""
    with api_client() as client:
        # An operation is a job. This GET fails for the id of any other job, which must not be cancelled here.
        client.get(f"/v1/operations/{path_part(operation)}")
        answer = client.post(f"/v1/jobs/{path_part(operation)}/cancel")
    show(answer, as_json, lambda: print_line(answer["status"]))
