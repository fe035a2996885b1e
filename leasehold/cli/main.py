"""The command `leasehold`. The functions of this module are the subcommands that need no API: they run servers, or work
on the database, the store and the settings. Other modules have the other subcommands. For example, remote.py has most
of the subcommands that call the API.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leasehold.cli import audit, cells, remote
from leasehold.cli.answers import AsJson
from leasehold.cli.completion import answer_shell, completion
from leasehold.cli.key_commands import keys
from leasehold.cli.people_commands import people
from leasehold.cli.quiet import quiet
from leasehold.cli.running import environment, join_dev, run_or_exit, use_source
from leasehold.cli.sql import sql
from leasehold.cli.terminal import console, print_line, print_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A durable job platform.", rich_markup_mode=None)
app.add_typer(keys, name="keys")
app.add_typer(people, name="people")
app.add_typer(audit.app, name="audit")
app.add_typer(cells.app, name="cells")
app.command()(sql)
app.command()(completion)
remote.add_to(app)
answer_shell()  # if a shell runs this command to get completions, `app` prints them

_AppSource = Annotated[
    str | None,
    typer.Argument(
        metavar="[APP]",
        help="MODULE:NAME of an App, or of a function that returns pipelines. The module may lie in this folder.",
    ),
]
_DatabaseUrl = Annotated[
    str | None, typer.Option(help="Use this PostgreSQL, and no pooler or standby, instead of an embedded one.")
]
_AmqpUrl = Annotated[str | None, typer.Option(help="Use this RabbitMQ instead of an embedded one.")]
_S3Endpoint = Annotated[
    str | None,
    typer.Option(help="Use this S3 service instead of an embedded one. LEASEHOLD_S3_* name its keys and bucket."),
]


@app.command()
def migrate(
    revision: Annotated[str, typer.Argument(help="The Alembic revision to reach.")] = "head",
    plan: Annotated[
        bool, typer.Option("--plan", help="Change nothing; print each pending statement, its locks and who waits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database's schema up to date. Several processes may run this at once."""
    from leasehold.cli import migration_plan  # noqa: PLC0415 - each command loads only what it needs
    from leasehold.cli.migrate import plan_of_upgrade, upgrade  # noqa: PLC0415 - as above

    settings = environment()
    if plan:
        upgrade_plan = run_or_exit(plan_of_upgrade(settings, revision))
        if as_json:
            typer.echo(json.dumps(migration_plan.as_json(upgrade_plan, settings)))
        else:
            migration_plan.show(console, upgrade_plan, settings)
        return
    run_or_exit(upgrade(settings, revision, lambda sentence: typer.echo(f"leasehold: {sentence}", err=True)))
    if as_json:
        typer.echo(json.dumps({"revision": revision, "migrated": True}))
    else:
        print_line("The schema is up to date." if revision == "head" else f"The schema is at {revision}.")


@app.command()
def api(source: _AppSource = None) -> None:
    """Serve the HTTP API."""
    use_source(source)
    _become("leasehold.api")


@app.command("console")
def serve_console(source: _AppSource = None) -> None:
    """Serve the console alone, at the API's address and port. Clients get no endpoint of /v1 here."""
    use_source(source)
    os.environ["LEASEHOLD_CONSOLE_ONLY"] = "true"
    _become("leasehold.api")


@app.command()
def worker(source: _AppSource = None) -> None:
    """Run one worker. SIGTERM drains it. If nothing sets LEASEHOLD_DATABASE_URL, it joins a `leasehold dev` of the
    current folder.
    """
    join_dev()
    use_source(source)
    _become("leasehold.worker")


def _become(module: str) -> None:
    """Run the module in place of this process."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", module])  # noqa: S606 - our own module, and no shell


@app.command()
def doctor(
    source: _AppSource = None,
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="Compare the rows with the store's objects. Use it after a restore.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete the objects without rows. Without it, only list them.")
    ] = False,
    even_so: Annotated[
        bool,
        typer.Option(
            "--even-so", help="With --apply: delete them even if most objects have no row, or if this is a cell."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check what the database, the broker and the store can promise. Exit with 1 if something is wrong. Name the App of
    the workers, because its kinds of work may have schemas and objects of their own.
    """
    if not reconcile and (apply or even_so):
        raise typer.BadParameter("--apply and --even-so belong to --reconcile")
    join_dev()
    use_source(source)
    if reconcile:
        from leasehold.cli import reconcile_command  # noqa: PLC0415 - each command loads only what it needs

        raise typer.Exit(reconcile_command.run(environment(), apply=apply, even_so=even_so, as_json=as_json))
    from leasehold.cli.doctor import examine, show  # noqa: PLC0415 - each command loads only what it needs

    with quiet():
        findings = run_or_exit(examine(environment()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        show(console, findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def settings(as_json: AsJson = False) -> None:
    """List every variable with its default and its meaning."""
    from leasehold.cli.variables import variables  # noqa: PLC0415 - each command loads only what it needs

    rows = run_or_exit(variables())
    if as_json:
        typer.echo(json.dumps([dict(zip(("variable", "default", "meaning"), row, strict=True)) for row in rows]))
        return
    print_table(("variable", "default", "meaning"), rows)


@app.command()
def dev(
    source: _AppSource = None,
    data: Annotated[
        Path | None, typer.Option(help="Keep the data here. Without this option the data is deleted at the end.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve the API on this port; 0: any free port.", min=0, max=65535)] = 8000,
    database_url: _DatabaseUrl = None,
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
) -> None:
    """Run servers, the API and a worker on this machine until Ctrl-C. Changed files are loaded again."""
    use_source(source)
    from leasehold.cli.dev import run  # noqa: PLC0415 - the embedded servers are an extra

    servers = {
        "data": data,
        "port": port,
        "database_url": database_url,
        "amqp_url": amqp_url,
        "s3": _s3_variables(s3_endpoint),
    }
    run_or_exit(run(source, **servers))


@app.command()
def demo(
    pictures: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            readable=True,
            help="Send these pictures. Without one, send a picture of Leasehold's own.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Save the results in this folder.")] = Path("demo-output"),
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
    database_url: _DatabaseUrl = None,
    keep: Annotated[
        bool, typer.Option(help="Keep everything running until Ctrl-C, and print the address of the job's page.")
    ] = False,
) -> None:
    """Start everything, send pictures through the HTTP API as a client would, and leave nothing running."""
    from leasehold.cli.demo import run  # noqa: PLC0415 - the embedded servers are an extra

    servers = {"database_url": database_url, "amqp_url": amqp_url, "s3": _s3_variables(s3_endpoint)}
    run_or_exit(run(pictures or [], out=out, keep=keep, **servers))


@app.command("signing-key")
def signing_key() -> None:
    """Make a key pair for packages. Workers sign with `private` (LEASEHOLD_CONVERSION_SIGNING_KEY). Readers of packages
    verify with `public`.
    """
    from leasehold.cli.signing_key import make_signing_key  # noqa: PLC0415 - each command loads only what it needs

    typer.echo(json.dumps(make_signing_key()))


def _s3_variables(endpoint: str | None) -> dict[str, str] | None:
    """The environment's variables `LEASEHOLD_S3_*`, with this endpoint. Without an endpoint returns None, because the
    S3 service is then an embedded one.
    """
    if endpoint is None:
        return None
    from_environment = {name: value for name, value in os.environ.items() if name.startswith("LEASEHOLD_S3_")}
    return from_environment | {"LEASEHOLD_S3_ENDPOINT": endpoint}


if __name__ == "__main__":
    app()
