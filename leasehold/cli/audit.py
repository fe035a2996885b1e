"""`leasehold audit` lists and exports the audit over the API, and verifies its hashes in the database or in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import orjson
import typer

from leasehold.cli.answers import AsJson, Cursor, api_client, print_fields, print_next_page, show
from leasehold.cli.running import environment_or_dev, failure_printed, run_or_exit
from leasehold.domain.audit import BrokenRow, Chain

app = typer.Typer(no_args_is_help=True, help="List, export and verify the audit, which records who did what.")
_Tenant = Annotated[
    str | None, typer.Option(help="Read the chain of this tenant, or with `*` all chains. Only operators may.")
]


@app.command("list")
def list_rows(
    tenant: _Tenant = None,
    actor: Annotated[str | None, typer.Option(help="Show only acts of this client or person.")] = None,
    action: Annotated[str | None, typer.Option(help="Show only acts of this kind, such as job.cancelled.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Show only acts on this job, key, queue or other thing: its id.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Show only acts at or after this time, such as 2026-11-22T18:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Show only acts before this time.")] = None,
    limit: Annotated[int, typer.Option(help="At most 100.")] = 20,
    cursor: Cursor = None,
    as_json: AsJson = False,
) -> None:
    """List acts, the latest first."""
    filters = {"tenant": tenant, "actor": actor, "action": action, "target": target, "since": since, "until": until}
    with api_client() as client:
        answer = client.get("/v1/audit", limit=limit, cursor=cursor, **filters)

    def print_rows() -> None:
        print_fields(answer["rows"], "at", "tenant_id", "actor", "action", "target", "source_ip", "details")
        print_next_page(answer)

    show(answer, as_json, print_rows)


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The file to write. Each row becomes a line of JSON.")],
    tenant: _Tenant = None,
) -> None:
    """Write chains into a file that `leasehold audit verify FILE` checks. A failure leaves no file."""
    part_file = file.with_name(f"{file.name}.{uuid4().hex}.part")  # a name that no other file and no other export has
    try:
        with api_client() as client, part_file.open("xb") as out:
            for piece in client.download("/v1/audit/export", tenant=tenant):
                out.write(piece)
        part_file.replace(file)
    except OSError as error:
        raise failure_printed(f"{file} cannot be written: {error.strerror}") from None
    finally:
        part_file.unlink(missing_ok=True)


@app.command("verify")
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, readable=True, help="Check this export. Without it, check the database."
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Check only the chain of this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every hash. Print the first broken row of each chain. Exit with 1 if a chain has a broken
    row, or if no chain was checked.

    Keep the printed heads of the chains elsewhere. Only a comparison with them shows that the end of a chain was cut
    off.
    """
    if file is None:
        from leasehold.cli.audit_database import verify_chains  # noqa: PLC0415 - each command loads only what it needs

        chains = [_result_of(*chain) for chain in run_or_exit(verify_chains(environment_or_dev(), tenant))]
    else:
        chains = [chain for chain in _check_file(file) if tenant in (None, chain["tenant_id"])]

    def print_chains() -> None:
        rows = [{**chain, "ends with": chain["hash"][:16]} for chain in chains]
        print_fields(rows, "tenant_id", "seq", "ends with", "broken")

    show({"chains": chains}, as_json, print_chains)
    if not chains:
        raise failure_printed("nothing was checked: there is no chain" + ("" if tenant is None else f" of {tenant}"))
    if any(chain["broken"] for chain in chains):
        raise typer.Exit(1)


def _result_of(head: dict[str, Any], broken: BrokenRow | None) -> dict[str, Any]:
    """A chain (the audit rows of a tenant, linked by their hashes) as the command prints it. `head`: the number and the
    hash of its last row.
    """
    sentence = None if broken is None else f"row {broken.seq}: {broken.why}"
    return {"tenant_id": head["tenant_id"], "seq": head["seq"], "hash": head["hash"], "broken": sentence}


def _check_file(file: Path) -> Iterator[dict[str, Any]]:
    """Check the chains of an export. The first line of each chain has its head, and the next lines are its rows. Yields
    each chain as the command prints it.
    """
    chain: _ExportedChain | None = None
    for number, line in _lines(file):
        if "head" in line:
            if chain is not None:
                yield chain.result()
            with _naming_line(number, "the head of a chain"):
                chain = _ExportedChain(line["head"])
        elif chain is None:
            raise failure_printed("the file does not begin with the head of a chain")
        else:
            with _naming_line(number, "a row of the audit"):
                chain.check(line)
    if chain is not None:
        yield chain.result()


class _ExportedChain:
    """Checks one chain of an export, row by row. The rows after the first broken row are not checked."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = {**head, "seq": int(head["seq"]), "hash": str(head["hash"])}
        self._chain = Chain.from_head(self._head)
        self._broken: BrokenRow | None = None

    def check(self, line: dict[str, Any]) -> None:
        if self._broken is None:
            self._broken = self._chain.check(_row(line))

    def result(self) -> dict[str, Any]:
        return _result_of(self._head, self._broken or self._chain.check_end(self._head))


@contextmanager
def _naming_line(number: int, what: str) -> Iterator[None]:
    """Use this around code that reads a line of the file. If the line lacks a field, or has a field of a wrong type,
    print an error and end the command. `number`: the number of the line. `what`: what the line should be.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise failure_printed(f"line {number} of the file is not {what}: {reason}") from None


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of the file with their numbers."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                raise failure_printed(f"line {number} is not JSON: the export was cut off") from None
            if not isinstance(value, dict):
                raise failure_printed(f"line {number} of the file is not a JSON object")
            yield number, value


def _row(line: dict[str, Any]) -> dict[str, Any]:
    from leasehold.db.audit import details_text  # noqa: PLC0415 - each command loads only what it needs

    return {**line, "at": datetime.fromisoformat(line["at"]), "details": details_text(line["details"])}
