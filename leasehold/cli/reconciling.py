"""What `leasehold doctor --reconcile` prints: first what it will do, then what it has done."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from leasehold.cli.quiet import quiet
from leasehold.cli.reconcile import Finding, Reconciliation, reconcile
from leasehold.cli.running import run_or_exit
from leasehold.cli.terminal import print_line
from leasehold.settings import Settings


def command(settings: Settings, *, apply: bool, even_so: bool, as_json: bool) -> int:
    """Run the command. Returns its exit status: 1 if something is missing, or orphaned and still there."""
    if apply and not as_json:
        with quiet():
            _show(run_or_exit(reconcile(settings, apply=False)))
    with quiet():
        found = run_or_exit(reconcile(settings, apply=apply, even_so=even_so))
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    elif apply:
        print_line(f"Deleted {found.deleted} objects.")
    else:
        _show(found)
    return int(bool(found.missing.count or found.orphaned.count > found.deleted))


def _show(found: Reconciliation) -> None:
    print_line(f"{found.rows} rows name an object; {found.objects} objects are in the store.")
    _list("rows without their object", found.missing, "stay as they are: restore the objects, or delete the jobs")
    _list("objects without a row", found.orphaned, "--apply deletes them")
    if found.young:
        print_line(f"{found.young} objects without a row are less than an hour old, and stay.")


def _list(what: str, finding: Finding, deed: str) -> None:
    print_line(f"{finding.count} {what} ({finding.bytes} bytes){f': {deed}' if finding.count else ''}")
    for key in finding.examples:
        print_line(f"  {key}")
    if finding.count > len(finding.examples):
        print_line(f"  and {finding.count - len(finding.examples)} more")
