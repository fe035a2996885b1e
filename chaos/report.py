"""Prints the verdicts of runs on the terminal, and writes all evidence into a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chaos.run import Report

_ROOT = Path(__file__).parents[1]


#: The files that a recorded run writes itself. A change in them is not a change of the code that runs.
_WRITTEN = (":!docs/explanation/chaos.jsonl", ":!docs/explanation/chaos.md")


def commit() -> str:
    """The commit of the code that runs; with a `+` if files differ from the commit, apart from _WRITTEN."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
    return (_git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def _git(*words: str) -> str:
    git = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip()


def show(result: Report, console: Console) -> None:
    what = f"mutant {result.mutate}" if result.mutate else f"seed {result.plan.seed}"
    console.print(f"\n{what}, commit {commit()}: {result.seconds:.0f} s, at rest after {result.rest_seconds:.1f} s")
    if result.until_claims:
        waits = ", ".join(f"{seconds:.2f}" for seconds in result.until_claims)
        console.print(f"  seconds from each promotion to the next claim: {waits}; {result.charges} losses charged")
    console.print(f"  for {result.starved_seconds:.0f} s some process waited for a processor")
    console.print(f"  {', '.join(f'{phase} {seconds:.0f} s' for phase, seconds in result.phases.items())}")
    if result.failure:
        console.print(f"  ENDED BY AN ERROR: {result.failure}", markup=False)
        return
    console.print(f"  jobs: {', '.join(f'{count} {name}' for name, count in sorted(result.jobs.items()))}")
    console.print(
        f"  fired: {', '.join(f'{name} x{count}' for name, count in sorted(result.fired.items())) or 'nothing'}"
    )
    if result.never_fired:
        console.print(f"  NEVER FIRED, although planned: {', '.join(result.never_fired)}")
    if result.refused:
        console.print(f"  REFUSED, although the request was right: {', '.join(result.refused)}")
    if not result.rested:
        console.print("  NEVER AT REST: work was left, or a process stood still")
    good = [f"{verdict.number} ({sum(verdict.observed.values())})" for verdict in result.verdicts if not verdict.why]
    console.print(f"  ok, with observations: {' '.join(good)}")
    for verdict in result.verdicts:
        if verdict.state == "not applicable":
            console.print(f"  not applicable: {verdict.number} ({verdict.why[0]})", markup=False)
    for verdict in result.red:
        times = f", {verdict.violations} times" if verdict.violations else ""
        console.print(f"  {verdict.state.upper()} {verdict.number}{times}: {verdict.says}", markup=False)
        for evidence in verdict.why:
            console.print(f"      {evidence}", markup=False)


def append(result: Report, file: Path) -> None:
    line = result.as_json() | {"commit": commit(), "load": round(os.getloadavg()[0], 1)}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


#: A violation of these is acknowledged work that is lost: an accepted job, or an event that a client saw.
_LOST = ("I1", "I20")
#: A violation of these is work that was done twice: a request, an epoch, a settlement, an order, a bulk operation.
_TWICE = ("I2", "I5", "I6", "I22", "I26")


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines that `append` wrote into the files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def table_by_fault(lines: Iterable[dict[str, Any]]) -> str:
    """A row of the page for each fault that runs had alone."""
    runs_of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        faults = {fault["name"] for fault in (*line["plan"]["armed"], *line["plan"]["blows"])}
        if len(faults) == 1 and not line["mutate"]:
            runs_of[faults.pop()].append(line)
    return "\n".join([
        "| fault | runs | red | jobs | next claim after the promotion: median, longest | lost | twice | charged |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(_row(fault, runs_of[fault]))} |" for fault in sorted(runs_of)),
    ])  # fmt: skip


def _row(fault: str, runs: Sequence[dict[str, Any]]) -> Iterable[str]:
    def violations(numbers: Iterable[str]) -> str:
        return str(
            sum(run["verdicts"].get(number, {"violations": 0})["violations"] for run in runs for number in numbers)
        )

    waits = [math.inf if seconds is None else seconds for run in runs for seconds in run["until_claims"]]
    claims = f"{statistics.median(waits):.2f} s, {max(waits):.2f} s" if waits else ""
    jobs = sum(count for run in runs for count in run["jobs"].values())
    charges = str(sum(run["charges"] for run in runs))
    red = sum(bool(run["reasons"]) for run in runs)
    return (
        fault, str(len(runs)), str(red), f"{jobs:,}", claims, violations(_LOST), violations(_TWICE),
        charges if waits else "",
    )  # fmt: skip


def sum_up(results: Sequence[Report], console: Console) -> None:
    fired: Counter[str] = sum((result.fired for result in results), Counter())
    red = [result for result in results if not result.mutate and not result.good]
    caught = [result.mutate for result in results if result.mutate and result.good]
    missed = [result.mutate for result in results if result.mutate and not result.good]
    console.print(f"\n{len(results)} runs, {sum(fired.values())} faults fired, {len(red)} red runs")
    if red:
        console.print(f"red with the seeds {', '.join(str(result.plan.seed) for result in red)}")
    if caught or missed:
        console.print(f"mutants caught: {', '.join(caught) or 'none'}; not caught: {', '.join(missed) or 'none'}")
