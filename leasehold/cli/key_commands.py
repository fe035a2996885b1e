"""`leasehold keys`: create, list, rotate, expire and revoke API keys."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from leasehold.cli.answers import AsJson
from leasehold.cli.running import environment, run_or_exit
from leasehold.security.roles import NAMES

keys = typer.Typer(no_args_is_help=True, help="API keys.")
console = Console()

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST = timedelta(days=36_500)
_Prefix = Annotated[str, typer.Argument(help="The part between lh_ and the second underscore.")]


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    length = timedelta(seconds=int(match[1]) * _SECONDS[match[2]]) if match else None
    if length is None or length > _LONGEST:
        raise typer.BadParameter("a number and s, m, h or d, for example 90d; at most 36500d")
    return length


def _print(value: Any) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_UTC_Z, default=str).decode())


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Option(help="Whose objects the key may see.")],
    client: Annotated[str, typer.Option(help="Who uses it; for logs.")],
    expires_in: Annotated[
        timedelta | None,
        typer.Option(parser=_duration, metavar="DURATION", help="For example 90d; else it never ends."),
    ] = None,
    scope: Annotated[list[str] | None, typer.Option(help="For example media:read; may be given several times.")] = None,
    role: Annotated[
        str | None, typer.Option(help="viewer, operator or admin: a named set of scopes.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key with a role, scopes, or both. It is shown once: only a hash of it is kept."""
    scopes = [*(scope or ()), *([f"role:{role}"] if role is not None else [])]
    if not scopes or role not in (None, *NAMES):
        raise typer.BadParameter("give --role viewer, operator or admin, or --scope")
    from leasehold.cli.keys import create_one  # noqa: PLC0415 - each command loads only what it needs

    key = run_or_exit(create_one(environment(), tenant, client, scopes, expires_in))
    if as_json:
        _print({"key": key.text, "prefix": key.prefix, "tenant": tenant, "client": client, "scopes": scopes})
    else:
        console.print(key.text, highlight=False)


@keys.command("list")
def list_all(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    ended: Annotated[bool, typer.Option("--all", help="Also those that were revoked or have expired.")] = False,
    as_json: AsJson = False,
) -> None:
    """See keys, without their secrets."""
    from leasehold.cli.keys import list_some  # noqa: PLC0415 - each command loads only what it needs

    rows = run_or_exit(list_some(environment(), tenant, ended=ended))
    if as_json:
        _print(rows)
        return
    table = Table("prefix", "tenant", "client", "scopes", "created", "expires", "last used", "state")
    table.columns[0].no_wrap = True  # rotate and revoke need the whole prefix, so a narrow terminal must not cut it
    table.columns[0].min_width = 12
    for row in rows:
        times = [_shown(row[name]) for name in ("created_at", "expires_at", "last_used_at")]
        table.add_row(row["prefix"], row["tenant_id"], row["client_id"], " ".join(row["scopes"]), *times, row["state"])
    console.print(table)


def _shown(instant: datetime | None) -> str:
    return "-" if instant is None else f"{instant:%Y-%m-%d %H:%M}"


@keys.command("rotate")
def rotate(
    prefix: _Prefix,
    overlap: Annotated[
        timedelta, typer.Option(parser=_duration, metavar="DURATION", help="How long the old key still works.")
    ] = "24h",  # type: ignore[assignment]  # typer parses the default, too
    as_json: AsJson = False,
) -> None:
    """Make the key's successor: the same owner, scopes, quotas and end. The old one stops after the overlap."""
    from leasehold.cli.keys import rotate_one  # noqa: PLC0415 - each command loads only what it needs

    key = run_or_exit(rotate_one(environment(), prefix, overlap))
    if as_json:
        _print({"key": key.text, "prefix": key.prefix})
    else:
        console.print(key.text, highlight=False)


@keys.command("expire")
def expire(
    prefix: _Prefix,
    after: Annotated[timedelta, typer.Option("--in", parser=_duration, metavar="DURATION", help="When it ends.")],
    as_json: AsJson = False,
) -> None:
    """Set when a key ends. A key that would end earlier is not changed."""
    from leasehold.cli.keys import expire_one  # noqa: PLC0415 - each command loads only what it needs

    ends = run_or_exit(expire_one(environment(), prefix, after))
    if as_json:
        _print({"prefix": prefix, "expires_at": ends})
    else:
        console.print(f"{prefix} ends at {ends:%Y-%m-%d %H:%M:%S} UTC.", highlight=False)


@keys.command("revoke")
def revoke(prefix: _Prefix, as_json: AsJson = False) -> None:
    """End a key. API processes stop accepting it within LEASEHOLD_API_KEY_CACHE_SECONDS."""
    from leasehold.cli.keys import revoke_one  # noqa: PLC0415 - each command loads only what it needs

    run_or_exit(revoke_one(environment(), prefix))
    if as_json:
        _print({"prefix": prefix, "revoked": True})
    else:
        console.print(f"Revoked {prefix}.")
