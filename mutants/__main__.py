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
from mutants.siblings import Siblings

_BUDGET_SECONDS = 30.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description="Change each guard once, and see whether a test notices: docs/explanation/mutants.md."
        " After a stop the next run goes on from there. At a later commit it judges survivors and changed files again.",
    )
    parser.add_argument("--measure", nargs="*", metavar="FOLDER", help="only measure which tests run which line")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATH",
        help="only mutants of paths that begin so, or this id",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, chosen by --seed")
    parser.add_argument("--seed", default="", help="a text, such as the hash of the commit")
    parser.add_argument("--list", action="store_true", help="list the mutants, and judge none")
    parser.add_argument(
        "--survivors", action="store_true", help="print the mutants that survived at this commit, with diffs"
    )
    parser.add_argument(
        "--again", metavar="VERDICT", help="judge again the mutants that have this verdict at this commit"
    )
    parser.add_argument(
        "--places", type=int, default=2, help="how many mutants at a time, each with servers of its own"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=_BUDGET_SECONDS,
        help="seconds of tests for each mutant; 0: all tests that run its line",
    )
    parser.add_argument(
        "--record", action="store_true", help="write the judgements into mutants/judged.json, for CI and other machines"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.measure is not None:
        measure(options.measure, state.coverage_file())
        return 0
    every = mutants()
    chosen = [mutant for mutant in every if mutant.path.startswith(options.only) or mutant.id == options.only]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))  # noqa: S311 - no secret
    if options.list:
        for mutant in chosen:
            print(mutant.title)  # noqa: T201 - its output
        return 0
    judged = state.State(state.commit(), every)
    if not options.survivors:
        unnoticeable = equivalents()
        unjudged = [
            mutant
            for mutant in chosen
            if mutant.id not in unnoticeable and _is_unjudged(judged.judgements.get(mutant.id), options.again)
        ]
        noticed = state.killers() | {one.id: one.by for one in judged.judgements.values() if one.verdict == "killed"}
        siblings = Siblings((mutant, noticed[mutant.id]) for mutant in every if mutant.id in noticed)
        choosing = Choosing(state.covering(), noticed, siblings, options.budget)
        asyncio.run(run(unjudged, choosing, judged.add, options.places))
    if options.record:
        state.record(judged.judgements, every)
    return report(chosen, judged.judgements)


def _is_unjudged(judgement: Judgement | None, again: str | None) -> bool:
    """Whether the mutant must be judged: it has no judgement, or the verdict `again`."""
    return judgement is None or judgement.verdict == again


def report(chosen: Sequence[Mutant], judgements: dict[str, Judgement]) -> int:
    """Print the survivors and the counts, without the mutants that no test can notice. Returns the exit code: 1 if a
    mutant survived.
    """
    unnoticeable = equivalents()
    judged = [
        (mutant, judgements[mutant.id])
        for mutant in chosen
        if mutant.id in judgements and mutant.id not in unnoticeable
    ]
    survived = [(mutant, judgement) for mutant, judgement in judged if judgement.verdict in ("survived", "untested")]
    for mutant, judgement in survived:
        print(f"{judgement.verdict}: {mutant.title} ({judgement.ran} of {judgement.of} tests)")  # noqa: T201 - its output
        print(mutant.diff((ROOT / mutant.path).read_text()))  # noqa: T201 - as above
    counts = Counter(judgement.verdict for _, judgement in judged)
    valid = len(judged) - counts["invalid"]
    killed = counts["killed"] + counts["timed out"]
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    share = f"; {killed / valid:.1%} of the valid ones killed" if valid else ""
    print(f"{len(chosen)} mutants, {len(judged)} judged: {verdicts}{share}")  # noqa: T201 - as above
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
