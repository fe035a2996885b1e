"""`leasehold`: run the parts, keep the keys, and see it all on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli import remote
from leasehold.errors import LeaseholdError
from leasehold.settings import Settings

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A durable job platform.", rich_markup_mode=None)
keys = typer.Typer(no_args_is_help=True, help="API keys.")
app.add_typer(keys, name="keys")
remote.add_to(app)
console = Console()

_DatabaseUrl = Annotated[str | None, typer.Option(help="Use this PostgreSQL instead of an embedded one.")]
_AmqpUrl = Annotated[str | None, typer.Option(help="Use this RabbitMQ instead of an embedded one.")]
_S3Endpoint = Annotated[
    str | None,
    typer.Option(help="Use this S3 service (keys and bucket from LEASEHOLD_S3_*) instead of an embedded one."),
]


@app.command()
def migrate(revision: Annotated[str, typer.Argument(help="Alembic revision.")] = "head") -> None:
    """Bring the database's schema up to date; safe to run from several places at once."""
    from cli.migrate import upgrade  # noqa: PLC0415 - each command loads only what it needs

    _told(upgrade(_settings(), revision))
    console.print("The schema is up to date.")


@app.command()
def api() -> None:
    """Serve the HTTP API."""
    os.execv(sys.executable, [sys.executable, "-m", "api"])  # noqa: S606 - our own module, and no shell


@app.command()
def worker() -> None:
    """Run one worker; SIGTERM drains it."""
    os.execv(sys.executable, [sys.executable, "-m", "worker"])  # noqa: S606 - our own module, and no shell


@app.command()
def doctor(as_json: remote.AsJson = False) -> None:
    """Look at the database, the broker and the store: what they can promise. Exits with 1 when something is wrong."""
    from cli.doctor import examine, show  # noqa: PLC0415 - each command loads only what it needs

    found = asyncio.run(examine(_settings()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found]))
    if not (all(finding.ok for finding in found) if as_json else show(console, found)):
        raise typer.Exit(1)


@app.command()
def settings() -> None:
    """Every variable, its default and its meaning."""
    table = Table("variable", "default", "meaning")
    for name, field in Settings.model_fields.items():
        table.add_row(f"LEASEHOLD_{name.upper()}", str(field.default), field.description or "")
    console.print(table)


@app.command()
def dev(
    data: Annotated[Path | None, typer.Option(help="Keep the data here; without it the data goes at the end.")] = None,
    port: Annotated[int, typer.Option(help="Port of the API; 0 takes a free one.")] = 8000,
    database_url: _DatabaseUrl = None,
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
) -> None:
    """Run everything on this machine until Ctrl-C: real servers, the API and a worker."""
    from cli.dev import run  # noqa: PLC0415 - the embedded servers are an extra

    _told(run(data=data, port=port, database_url=database_url, amqp_url=amqp_url, s3=_s3(s3_endpoint)))


@app.command()
def demo(
    pictures: Annotated[list[Path] | None, typer.Argument(help="Pictures to send; without one, a shipped one.")] = None,
    out: Annotated[Path, typer.Option(help="Where the results are saved.")] = Path("demo-output"),
    amqp_url: _AmqpUrl = None,
    s3_endpoint: _S3Endpoint = None,
    database_url: _DatabaseUrl = None,
) -> None:
    """Start everything, send pictures through the HTTP API as a client would, and leave nothing running."""
    from cli.demo import run  # noqa: PLC0415 - the embedded servers are an extra

    _told(run(pictures or [], out=out, database_url=database_url, amqp_url=amqp_url, s3=_s3(s3_endpoint)))


@app.command("signing-key")
def signing_key() -> None:
    """Make a pair: `private` is LEASEHOLD_CONVERSION_SIGNING_KEY of workers, `public` is for who reads packages."""
    from cli.keys import make_signing_key  # noqa: PLC0415 - each command loads only what it needs

    typer.echo(json.dumps(make_signing_key()))


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Option(help="Whose objects the key may see.")],
    client: Annotated[str, typer.Option(help="Who uses it; for logs.")],
    scope: Annotated[list[str], typer.Option(help="For example media:read; may be given several times.")],
    as_json: remote.AsJson = False,
) -> None:
    """Make a key. It is shown once: only a hash of it is kept."""
    from cli.keys import create_one  # noqa: PLC0415 - each command loads only what it needs

    key = asyncio.run(create_one(_settings(), tenant, client, scope))
    if as_json:
        typer.echo(json.dumps({"key": key, "tenant": tenant, "client": client, "scopes": scope}))
    else:
        console.print(key, highlight=False)


@keys.command("revoke")
def revoke(prefix: Annotated[str, typer.Argument(help="The part between lh_ and the second underscore.")]) -> None:
    """End a key; API processes stop taking it within LEASEHOLD_API_KEY_CACHE_SECONDS."""
    from cli.keys import revoke_one  # noqa: PLC0415 - each command loads only what it needs

    _told(revoke_one(_settings(), prefix))
    console.print(f"Revoked {prefix}.")


def _settings() -> Settings:
    """The environment's; what cannot be used is refused in a sentence."""
    from leasehold.urls import refuse_bad_urls  # noqa: PLC0415 - each command loads only what it needs

    settings = Settings()
    refuse_bad_urls(settings)
    return settings


def _s3(endpoint: str | None) -> dict[str, str] | None:
    if endpoint is None:
        return None
    chosen = {name: value for name, value in os.environ.items() if name.startswith("LEASEHOLD_S3_")}
    return chosen | {"LEASEHOLD_S3_ENDPOINT": endpoint}


def _told(work: Any) -> None:
    """Run it; an error of ours is a sentence, not a traceback."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (LeaseholdError, ExceptionGroup) as error:
        Console(stderr=True).print(f"leasehold: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
