"""`leasehold doctor --reconcile`: compares PostgreSQL's rows with the store's objects (reconcile.py), and prints the
result. With `--apply`, the command first prints what it will delete, and then how much it has deleted. With `--apply
--json`, it prints only the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from leasehold.cli.quiet import quiet
from leasehold.cli.reconcile import Finding, Reconciliation, reconcile
from leasehold.cli.running import run_or_exit
from leasehold.cli.terminal import print_line
from leasehold.domain.sentences import counted
from leasehold.settings import Settings


def run(settings: Settings, *, apply: bool, even_so: bool, as_json: bool) -> int:
    """Compare, and print the result. `apply`: also delete the orphaned objects (objects without a row). `even_so`:
    delete them even if another installation seems to use the bucket. Returns the exit status of the command: 1 if
    objects are missing, or if orphaned objects are left.
    """
    if apply and not as_json:
        with quiet():
            _print_result(run_or_exit(reconcile(settings, apply=False)))
    with quiet():
        result = run_or_exit(reconcile(settings, apply=apply, even_so=even_so))
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    elif apply:
        print_line(f"Deleted {counted(result.deleted, 'object', 'objects')}.")
    else:
        _print_result(result)
    return int(bool(result.missing.count or result.orphaned.count > result.deleted))


def _print_result(result: Reconciliation) -> None:
    rows = counted(result.rows, "row names", "rows name")
    print_line(f"{rows} an object; {counted(result.objects, 'object is', 'objects are')} in the store.")
    missing = counted(result.missing.count, "row without its object", "rows without their object")
    _print_finding(missing, result.missing, "not changed: restore the objects, or delete the jobs")
    orphaned = counted(result.orphaned.count, "object without a row", "objects without a row")
    _print_finding(orphaned, result.orphaned, "--apply deletes them")
    if result.young:
        if result.young == 1:
            print_line("1 object without a row is less than an hour old, and stays.")
        else:
            print_line(f"{result.young:,} objects without a row are less than an hour old, and stay.")


def _print_finding(title: str, finding: Finding, remedy: str) -> None:
    print_line(f"{title} ({finding.bytes} bytes){f': {remedy}' if finding.count else ''}")
    for key in finding.examples:
        print_line(f"  {key}")
    if finding.count > len(finding.examples):
        print_line(f"  and {finding.count - len(finding.examples)} more")
