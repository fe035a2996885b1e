"""Runs `leasehold doctor --reconcile`, and prints what it will do, and then what it has done."""

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
    """Run the command. Returns its exit status: 1 if objects are missing, or if orphaned objects are left."""
    if apply and not as_json:
        with quiet():
            _show(run_or_exit(reconcile(settings, apply=False)))
    with quiet():
        result = run_or_exit(reconcile(settings, apply=apply, even_so=even_so))
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    elif apply:
        print_line(f"Deleted {result.deleted} objects.")
    else:
        _show(result)
    return int(bool(result.missing.count or result.orphaned.count > result.deleted))


def _show(result: Reconciliation) -> None:
    print_line(f"{result.rows} rows name an object; {result.objects} objects are in the store.")
    _list("rows without their object", result.missing, "stay as they are: restore the objects, or delete the jobs")
    _list("objects without a row", result.orphaned, "--apply deletes them")
    if result.young:
        print_line(f"{result.young} objects without a row are less than an hour old, and stay.")


def _list(what: str, finding: Finding, remedy: str) -> None:
    print_line(f"{finding.count} {what} ({finding.bytes} bytes){f': {remedy}' if finding.count else ''}")
    for key in finding.examples:
        print_line(f"  {key}")
    if finding.count > len(finding.examples):
        print_line(f"  and {finding.count - len(finding.examples)} more")
