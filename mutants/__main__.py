"""`python -m mutants`: see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence

from mutants import state
from mutants.choosing import Choosing
from mutants.equivalents import equivalents
from mutants.judge import Judgement
from mutants.measure import measure
from mutants.mutant import Mutant
from mutants.places import ROOT, mutants
from mutants.run import run

_BUDGET_SECONDS = 30.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description="Change each guard once, and see whether a test notices: docs/explanation/mutants.md."
        " A run that was stopped goes on where it was; at a later commit, with survivors and changed files anew.",
    )
    parser.add_argument("--measure", nargs="*", metavar="FOLDER", help="measure which tests run which line, no more")
    parser.add_argument("--only", default="", metavar="PATH", help="only mutants of files that begin so, or of this id")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, chosen by --seed")
    parser.add_argument("--seed", default="", help="a text, like the hash of the commit")
    parser.add_argument("--list", action="store_true", help="list them, and judge none")
    parser.add_argument("--survivors", action="store_true", help="print those that survived at this commit, with diffs")
    parser.add_argument("--again", metavar="VERDICT", help="judge again those that were judged so at this commit")
    parser.add_argument("--places", type=int, default=2, help="how many at a time, each beside servers of its own")
    parser.add_argument(
        "--budget", type=float, default=_BUDGET_SECONDS, help="seconds of tests for each; 0: all that run its line"
    )
    parser.add_argument("--record", action="store_true", help="keep who noticed what in mutants/killers.json, for CI")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    if asked.measure is not None:
        measure(asked.measure, state.coverage_file())
        return 0
    found = [mutant for mutant in mutants() if mutant.path.startswith(asked.only) or mutant.id == asked.only]
    if asked.sample is not None:
        found = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))  # noqa: S311 - no secret
    if asked.list:
        for mutant in found:
            print(mutant.title)  # noqa: T201 - its output
        return 0
    kept = state.State(state.commit(), found)
    if not asked.survivors:
        waiting = [one for one in found if _waits(kept.judgements.get(one.id), asked.again)]
        choosing = Choosing(state.covering(), state.killers(), asked.budget)
        asyncio.run(run(waiting, choosing, kept.add, asked.places))
    if asked.record:
        noticed = {one.id: one.by for one in kept.judgements.values() if one.verdict == "killed" and "::" in one.by}
        ids = {mutant.id for mutant in mutants()}
        state.record({one: test for one, test in (state.killers() | noticed).items() if one in ids})
    return report(found, kept.judgements)


def _waits(judgement: Judgement | None, again: str | None) -> bool:
    return judgement is None or judgement.verdict == again


def report(found: Sequence[Mutant], judgements: dict[str, Judgement]) -> int:
    """Print the survivors and the counts, without those that change nothing. The exit code: 1 where one survived."""
    known = equivalents()
    judged = [(mutant, judgements[mutant.id]) for mutant in found if mutant.id in judgements and mutant.id not in known]
    survived = [(mutant, judgement) for mutant, judgement in judged if judgement.verdict in ("survived", "untested")]
    for mutant, judgement in survived:
        print(f"{judgement.verdict}: {mutant.title} ({judgement.ran} of {judgement.of} tests)")  # noqa: T201 - its output
        print(mutant.diff((ROOT / mutant.path).read_text()))  # noqa: T201 - as above
    counts = Counter(judgement.verdict for _, judgement in judged)
    valid = len(judged) - counts["invalid"]
    killed = counts["killed"] + counts["timed out"]
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    share = f"; {killed / valid:.1%} of the valid ones killed" if valid else ""
    print(f"{len(found)} mutants, {len(judged)} judged: {said}{share}")  # noqa: T201 - as above
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
