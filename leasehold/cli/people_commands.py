"""`leasehold people` lists and changes the people who sign in to the console. The command works directly in the
database. So an operator can disable a person, or make a person an admin, even if nobody can sign in.
"""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

import typer

from leasehold.cli.answers import AsJson
from leasehold.cli.running import environment_or_dev, run_or_exit
from leasehold.cli.terminal import print_answer, print_json, print_table, to_the_minute

people = typer.Typer(no_args_is_help=True, help="List, disable and enable people, set their roles, end their sessions.")
PersonId = Annotated[UUID, typer.Argument(help="The id of the person, as `people list` shows it.")]


@people.command("list")
def list_people(
    tenant: Annotated[str | None, typer.Option(help="List only people of this tenant.")] = None,
    text: Annotated[str | None, typer.Option(help="List only people whose login or name contains this text.")] = None,
    limit: Annotated[int, typer.Option(help="List at most this number of people.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """List people, the latest sign-ins first."""
    from leasehold.cli.people import list_some  # noqa: PLC0415 - each command loads only what it needs

    rows = run_or_exit(list_some(environment_or_dev(), tenant, text, limit))
    if as_json:
        print_json(rows)
        return
    print_table(
        ("id", "tenant", "login", "name", "role", "last sign-in", "disabled"),
        [
            (
                *(str(row["id"]), row["tenant_id"], row["login"], row["name"], row["role"]),
                *(to_the_minute(row[name]) for name in ("seen_at", "disabled_at")),
            )
            for row in rows
        ],
    )


@people.command("disable")
def disable(person: PersonId, as_json: AsJson = False) -> None:
    """Disable a person, and end all sessions of the person. The change holds from the person's next request on."""
    _change(person, disabled=True)
    print_answer({"id": str(person), "disabled": True}, f"{person} is disabled.", as_json)


@people.command("enable")
def enable(person: PersonId, as_json: AsJson = False) -> None:
    """Enable a disabled person, who may then sign in again."""
    _change(person, disabled=False)
    print_answer({"id": str(person), "disabled": False}, f"{person} is enabled.", as_json)


@people.command("set-role")
def set_role(
    person: PersonId,
    role: Annotated[
        Literal["viewer", "operator", "admin", "provider"],
        typer.Argument(help="The role. With `provider` the groups of the OpenID provider decide again."),
    ],
    as_json: AsJson = False,
) -> None:
    """Set the role of a person in place of the role that the provider's groups give."""
    _change(person, role=role)
    print_answer({"id": str(person), "set_role": None if role == "provider" else role}, f"{person}: {role}", as_json)


@people.command("end-sessions")
def end_sessions(person: PersonId, as_json: AsJson = False) -> None:
    """End all sessions of a person, who may sign in again."""
    from leasehold.cli.people import end_sessions_of  # noqa: PLC0415 - each command loads only what it needs

    run_or_exit(end_sessions_of(environment_or_dev(), person))
    print_answer({"id": str(person), "sessions_ended": True}, f"All sessions of {person} have ended.", as_json)


def _change(
    person: UUID,
    *,
    role: Literal["viewer", "operator", "admin", "provider"] | None = None,
    disabled: bool | None = None,
) -> None:
    """Change the person. An argument that is None changes nothing."""
    from leasehold.cli.people import change_one  # noqa: PLC0415 - each command loads only what it needs
    from leasehold.limits.people import Change  # noqa: PLC0415 - as above

    run_or_exit(change_one(environment_or_dev(), person, Change(role, disabled)))
