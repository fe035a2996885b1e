"""The command `leasehold` and its local commands. The commands that call the API are in remote.py."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from leasehold.cli import audit, remote
from leasehold.cli.answers import AsJson
from leasehold.cli.completion import answer_shell, completion
from leasehold.cli.key_commands import keys
from leasehold.cli.quiet import quiet
from leasehold.cli.running import environment, run_or_exit, use_source
from leasehold.cli.sql import sql

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A durable job platform.", rich_markup_mode=None)
app.add_typer(keys, name="keys")
app.add_typer(audit.app, name="audit")
app.command()(sql)
app.command()(completion)
remote.add_to(app)
answer_shell()
console = Console()

_AppSource = Annotated[
    str | None,
    typer.Argument(
        metavar="[APP]", help="MODULE:NAME of an App, or of a callable that returns pipelines; of this folder, too."
    ),
]
_DatabaseUrl = Annotated[str | None, typer.Option(help="Use this PostgreSQL instead of an embedded one.")]
_AmqpUrl = Annotated[str | None, typer.Option(help="Use this RabbitMQ instead of an embedded one.")]
_S3Endpoint = Annotated[
    str | None,
    typer.Option(help="Use this S3 service (keys and bucket from LEASEHOLD_S3_*) instead of an embedded one."),
]


@app.command()
def migrate(
    revision: Annotated[str, typer.Argument(help="Alembic revision.")] = "head",
    plan: Annotated[
        bool, typer.Option("--plan", help="Change nothing; print each pending statement, its locks and who waits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database's schema up to date. Several processes may run this at once."""
    from leasehold.cli import migration_plan  # noqa: PLC0415 - each command loads only what it needs
    from leasehold.cli.migrate import planned, upgrade  # noqa: PLC0415 - as above

    settings = environment()
    if plan:
        pending = run_or_exit(planned(settings, revision))
        if as_json:
            typer.echo(json.dumps(migration_plan.as_json(pending, settings)))
        else:
            migration_plan.show(console, pending, settings)
        return
    run_or_exit(upgrade(settings, revision, lambda sentence: typer.echo(f"leasehold: {sentence}", err=True)))
    if as_json:
        typer.echo(json.dumps({"revision": revision, "migrated": True}))
    else:
        console.print("The schema is up to date.")


@app.command()
def api(source: _AppSource = None) -> None:
    """Serve the HTTP API."""
    use_source(source)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "leasehold.api"])  # noqa: S606 - our own module, and no shell


@app.command()
def worker(source: _AppSource = None) -> None:
    """Run one worker. SIGTERM drains it."""
    use_source(source)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "leasehold.worker"])  # noqa: S606 - our own module, and no shell


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check what the database, the broker and the store can promise. Exits with 1 if something is wrong."""
    from leasehold.cli.doctor import examine, show  # noqa: PLC0415 - each command loads only what it needs

    with quiet():
        findings = run_or_exit(examine(environment()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    if not (all(finding.ok for finding in findings) if as_json else show(console, findings)):
        raise typer.Exit(1)


@app.command()
def settings(as_json: AsJson = False) -> None:
    """List every variable with its default and its meaning."""
    from leasehold.cli.variables import variables  # noqa: PLC0415 - each command loads only what it needs

    rows = run_or_exit(variables())
    if as_json:
        typer.echo(json.dumps([dict(zip(("variable", "default", "meaning"), row, strict=True)) for row in rows]))
        return
    table = Table("variable", "default", "meaning")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
def dev(
    source: _AppSource = None,
    data: Annotated[
        Path | None, typer.Option(help="Keep the data here. Without this option the data is deleted at the end.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the API; 0 takes a free one.")] = 8000,
    database_url: _DatabaseUrl = None,
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
) -> None:
    """Run everything on this machine until Ctrl-C: real servers, the API and a worker. It reloads APP's files."""
    use_source(source)
    from leasehold.cli.dev import run  # noqa: PLC0415 - the embedded servers are an extra

    servers = {"data": data, "port": port, "database_url": database_url, "amqp_url": amqp_url, "s3": _s3(s3_endpoint)}
    run_or_exit(run(source, **servers))


@app.command()
def demo(
    pictures: Annotated[list[Path] | None, typer.Argument(help="Pictures to send; without one, a shipped one.")] = None,
    out: Annotated[Path, typer.Option(help="Where the results are saved.")] = Path("demo-output"),
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
    database_url: _DatabaseUrl = None,
    keep: Annotated[bool, typer.Option(help="Then keep all up until Ctrl-C, and print the job's page.")] = False,
) -> None:
    """Start everything, send pictures through the HTTP API as a client would, and leave nothing running."""
    from leasehold.cli.demo import run  # noqa: PLC0415 - the embedded servers are an extra

    where = {"database_url": database_url, "amqp_url": amqp_url, "s3": _s3(s3_endpoint)}
    run_or_exit(run(pictures or [], out=out, keep=keep, **where))


@app.command("signing-key")
def signing_key() -> None:
    """Make a pair: `private` is LEASEHOLD_CONVERSION_SIGNING_KEY of workers, `public` is for who reads packages."""
    from leasehold.cli.keys import make_signing_key  # noqa: PLC0415 - each command loads only what it needs

    typer.echo(json.dumps(make_signing_key()))


def _s3(endpoint: str | None) -> dict[str, str] | None:
    if endpoint is None:
        return None
    chosen = {name: value for name, value in os.environ.items() if name.startswith("LEASEHOLD_S3_")}
    return chosen | {"LEASEHOLD_S3_ENDPOINT": endpoint}


if __name__ == "__main__":
    app()
