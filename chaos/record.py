"""The record of runs: one line for each run in docs/explanation/chaos.jsonl, and the tables of
docs/explanation/chaos.md.

Nobody edits the lines. Each line names the commit of its run: so the table can add up runs of many commits, and shows
which results are old.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.catalogue import CATALOGUE
from chaos.checker import INVARIANTS
from chaos.plan import Plan, make_plan
from chaos.report import commit
from chaos.run import Report
from chaos.spans import Span, pairs

_DOCS = Path(__file__).parents[1] / "docs" / "explanation"
RECORD = _DOCS / "chaos.jsonl"
PAGE = _DOCS / "chaos.md"
_BEGIN, _END = "<!-- begin: scripts/chaos --record -->", "<!-- end -->"
#: The goals of the record: runs, observations of each invariant, firings of each fault, pairs of faults.
GOAL = {"runs": 100, "observations": 1000, "firings": 10, "pairs": 60}

#: The size of a recorded run: with it, GOAL["runs"] runs reach the other goals (docs/explanation/chaos.md).
SECONDS, FAULTS, FAILPOINTS, API_KILLS = 20.0, 13, 3, 3
FIRST_SEED = 30_000
Line = dict[str, Any]


def seeds(lines: Iterable[Line], at: str, *, first: int = FIRST_SEED, runs: int = GOAL["runs"]) -> list[int]:
    """The seeds that were not run at the commit `at`, among `runs` seeds from `first` on."""
    done = {line["seed"] for line in lines if line["commit"] == at}
    return [seed for seed in range(first, first + runs) if seed not in done]


def plan_of(seed: int, abilities: Collection[str]) -> Plan:
    return make_plan(
        seed, seconds=SECONDS, faults=FAULTS, failpoints=FAILPOINTS, api_kills=API_KILLS, abilities=abilities
    )


def append(result: Report, file: Path = RECORD) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(_line(result), separators=(",", ":")) + "\n")


def _line(result: Report) -> Line:
    return {
        "commit": commit(),
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "seed": result.plan.seed,
        "load": result.plan.seconds,
        "seconds": round(result.seconds),
        "rest": round(result.rest_seconds, 1),
        "jobs": sum(result.jobs.values()),
        "observed": {verdict.number: sum(verdict.observed.values()) for verdict in result.verdicts if verdict.observed},
        "spans": [(span.fault, round(span.since, 1), round(span.until, 1)) for span in result.spans],
        "red": result.reasons,
    }


def read(file: Path = RECORD) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_page(lines: Sequence[Line], page: Path = PAGE) -> None:
    """Write the tables of `lines` between the two marks of the page. Raises ValueError if the page lacks a mark."""
    text = page.read_text()
    before, after = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    page.write_text(f"{text[:before]}\n\n{table(lines)}\n\n{text[after:]}")


def table(lines: Sequence[Line]) -> str:
    if not lines:
        return "No runs are recorded."
    return "\n".join([
        *_sums(lines), "", *_invariants(lines), "", *_faults(lines), "", *_pairs(lines), "", *_red(lines),
    ])  # fmt: skip


def _sums(lines: Sequence[Line]) -> Iterable[str]:
    jobs, firings = sum(line["jobs"] for line in lines), sum(len(line["spans"]) for line in lines)
    red = sum(bool(line["red"]) for line in lines)
    pair_count = len(_pairs_of(lines))
    return [
        (
            f"{len(lines)} runs from {lines[0]['at']} to {lines[-1]['at']}: {jobs:,} jobs, {firings:,} faults fired,"
            f" {pair_count:,} pairs of faults overlapped, {red} runs were red."
        ),
        "",
        "| commit | runs | of them red |",
        "|---|---|---|",
        *(f"| {name} | {runs} | {red_runs} |" for name, runs, red_runs in _by_commit(lines)),
    ]


def _by_commit(lines: Sequence[Line]) -> Iterable[tuple[str, int, int]]:
    runs = Counter(line["commit"] for line in lines)
    red_runs = Counter(line["commit"] for line in lines if line["red"])
    return [(name, count, red_runs[name]) for name, count in runs.items()]


def _invariants(lines: Sequence[Line]) -> Iterable[str]:
    newest = lines[-1]["commit"]
    yield f"| invariant | says | observed | at {newest} | last observed at | runs that violated it |"
    yield "|---|---|---|---|---|---|"
    for number, check in INVARIANTS.items():
        sentence = (check.__doc__ or "").partition("\n")[0]
        observing = [line for line in lines if line["observed"].get(number)]
        total = sum(line["observed"][number] for line in observing)
        now = sum(line["observed"][number] for line in observing if line["commit"] == newest)
        last = observing[-1]["commit"] if observing else "never"
        missed_goal = _missed_goal(total, "observations")
        violated = sum(any(reason.startswith(f"{number} violated") for reason in line["red"]) for line in lines)
        yield f"| {number} | {sentence} | {total:,}{missed_goal} | {now:,} | {last} | {violated} |"


def _faults(lines: Sequence[Line]) -> Iterable[str]:
    fired = Counter(span[0] for line in lines for span in line["spans"])
    last = {span[0]: line["commit"] for line in lines for span in line["spans"]}
    met: Counter[str] = Counter(name for pair in _pairs_of(lines) for name in pair)
    yield "| fault | fired | last at | other faults that it met |"
    yield "|---|---|---|---|"
    for kind in CATALOGUE:
        times = fired[kind.name]
        missed_goal = _missed_goal(times, "firings")
        yield f"| {kind.name} | {times}{missed_goal} | {last.get(kind.name, 'never')} | {met[kind.name]} |"


def _pairs_of(lines: Sequence[Line]) -> Counter[tuple[str, str]]:
    return Counter(pair for line in lines for pair in pairs(Span(*span) for span in line["spans"]))


def _pairs(lines: Sequence[Line]) -> Iterable[str]:
    """The table of the pairs of faults that overlapped, by the number of runs in which they did."""
    by_count: dict[int, list[str]] = {}
    for (one, other), times in sorted(_pairs_of(lines).items()):
        by_count.setdefault(times, []).append(f"{one} + {other}")
    yield "| runs in which they overlapped | pairs of faults | which |"
    yield "|---|---|---|"
    for times, names in sorted(by_count.items(), reverse=True):
        which = "; ".join(names) if times > 1 else "see docs/explanation/chaos.jsonl"
        yield f"| {times} | {len(names)} | {which} |"


def _red(lines: Sequence[Line]) -> Iterable[str]:
    red = [line for line in lines if line["red"]]
    if not red:
        return ["No run was red."]
    return [
        "| red: seed | commit | load | why |",
        "|---|---|---|---|",
        *(f"| {line['seed']} | {line['commit']} | {line['load']:g} s | {'; '.join(line['red'])} |" for line in red),
    ]


def _missed_goal(number: int, name: str) -> str:
    return "" if number >= GOAL[name] else f" (goal: {GOAL[name]:,})"
