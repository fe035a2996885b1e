"""`leasehold keys` creates, lists, rotates, expires and revokes API keys, directly in the database."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console

from leasehold.cli.answers import AsJson
from leasehold.cli.running import environment_or_dev, run_or_exit
from leasehold.cli.terminal import print_answer, print_json, print_line, print_table, to_the_minute
from leasehold.security.roles import NAMES

keys = typer.Typer(no_args_is_help=True, help="Create, list, rotate, expire and revoke API keys.")
#: The seconds of each unit of a duration, such as `90d`.
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
#: The longest duration: a hundred years.
_LONGEST = timedelta(days=36_500)
_Prefix = Annotated[str, typer.Argument(help="The 12 characters of the key before its secret.")]


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    length = timedelta(seconds=int(match[1]) * _SECONDS[match[2]]) if match else None
    if length is None or length > _LONGEST:
        raise typer.BadParameter("write a number and s, m, h or d, such as 90d; at most 36500d")
    return length


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Option(help="The key reads and writes objects of this tenant.")],
    client: Annotated[str, typer.Option(help="Who uses the key. Logs and the audit name it.")],
    expires_in: Annotated[
        timedelta | None,
        typer.Option(
            parser=_duration,
            metavar="DURATION",
            help="End the key after this time, such as 90d. Without it the key never ends.",
        ),
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="Let the key do this, such as media:read. May be given several times.")
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(help="Give the key the scopes of a role: viewer, operator or admin.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key with a role, with scopes, or with both. The key is shown only once, because the database keeps only
    its hash.
    """
    scopes = [*(scope or ())] if role is None else [*(scope or ()), f"role:{role}"]
    if not scopes or role not in (None, *NAMES):
        raise typer.BadParameter("give --role viewer, operator or admin, or --scope")
    from leasehold.cli.keys import create_one  # noqa: PLC0415 - each command loads only what it needs

    key = run_or_exit(create_one(environment_or_dev(), tenant, client, scopes, expires_in))
    print_answer(
        {"key": key.text, "prefix": key.prefix, "tenant": tenant, "client": client, "scopes": scopes}, key.text, as_json
    )


@keys.command("list")
def list_all(
    tenant: Annotated[str | None, typer.Option(help="List only keys of this tenant.")] = None,
    ended: Annotated[bool, typer.Option("--all", help="Also list revoked and expired keys.")] = False,
    as_json: AsJson = False,
) -> None:
    """List keys, without their secrets."""
    from leasehold.cli.keys import list_some  # noqa: PLC0415 - each command loads only what it needs

    rows = run_or_exit(list_some(environment_or_dev(), tenant, ended=ended))
    if as_json:
        print_json(rows)
        return
    print_table(
        ("prefix", "tenant", "client", "scopes", "created", "expires", "last used", "state"),
        [
            (
                *(row["prefix"], row["tenant_id"], row["client_id"], " ".join(row["scopes"])),
                *(to_the_minute(row[name]) for name in ("created_at", "expires_at", "last_used_at")),
                row["state"],
            )
            for row in rows
        ],
    )


@keys.command("rotate")
def rotate(
    prefix: _Prefix,
    overlap: Annotated[
        timedelta, typer.Option(parser=_duration, metavar="DURATION", help="Let the old key work for this time.")
    ] = "24h",  # type: ignore[assignment]  # typer parses the default, too
    as_json: AsJson = False,
) -> None:
    """Create a successor with the key's owner, scopes, quotas and expiry. The old key expires after the overlap. A key
    that was rotated before already has an expiry. A second rotation does not postpone this expiry. The second successor
    gets the same expiry, which the command prints.
    """
    from leasehold.cli.keys import rotate_one  # noqa: PLC0415 - each command loads only what it needs

    key = run_or_exit(rotate_one(environment_or_dev(), prefix, overlap))
    print_answer({"key": key.text, "prefix": key.prefix, "expires_at": key.expires_at}, key.text, as_json)
    if key.expires_at is not None and not as_json:  # to stderr, because a script takes the key from stdout
        print_line(f"The new key ends at {key.expires_at:%Y-%m-%d %H:%M:%S} UTC.", to=Console(stderr=True))


@keys.command("expire")
def expire(
    prefix: _Prefix,
    after: Annotated[
        timedelta,
        typer.Option("--in", parser=_duration, metavar="DURATION", help="End the key after this time, such as 2h."),
    ],
    as_json: AsJson = False,
) -> None:
    """Set when a key expires. A key that expires earlier keeps its expiry."""
    from leasehold.cli.keys import expire_one  # noqa: PLC0415 - each command loads only what it needs

    expires_at = run_or_exit(expire_one(environment_or_dev(), prefix, after))
    print_answer(
        {"prefix": prefix, "expires_at": expires_at}, f"{prefix} ends at {expires_at:%Y-%m-%d %H:%M:%S} UTC.", as_json
    )


@keys.command("revoke")
def revoke(prefix: _Prefix, as_json: AsJson = False) -> None:
    """Revoke a key. API processes stop accepting it within LEASEHOLD_API_KEY_CACHE_SECONDS."""
    from leasehold.cli.keys import revoke_one  # noqa: PLC0415 - each command loads only what it needs

    run_or_exit(revoke_one(environment_or_dev(), prefix))
    print_answer({"prefix": prefix, "revoked": True}, f"Revoked {prefix}.", as_json)
