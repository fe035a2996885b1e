"""`leasehold sql` prints the statements that change jobs and tasks, as PostgreSQL receives them."""

from __future__ import annotations

from typing import Annotated

import typer


def sql(
    name: Annotated[str | None, typer.Argument(help="Print this statement. Without a name, list all names.")] = None,
) -> None:
    """Print a statement that changes jobs or tasks, with its guard."""
    from leasehold.transitions.statements import statements  # noqa: PLC0415 - each command loads only what it needs

    texts = statements()
    if name is None:
        typer.echo("\n".join(texts))
    elif name in texts:
        typer.echo(texts[name], nl=False)
    else:
        typer.echo(f"leasehold: there is no statement {name!r}; `leasehold sql` lists the names", err=True)
        raise typer.Exit(1)
