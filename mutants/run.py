"""Judges many mutants, several at a time. A place is a copy of the checkout with servers of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mutants.choosing import Choosing
from mutants.judge import Judgement, judge
from mutants.mutant import Mutant
from mutants.servers import servers

#: To judge so many mutants takes less time than to load all tests.
_FEW = 20


async def run(
    mutants: Sequence[Mutant],
    choosing: Choosing,
    on_judged: Callable[[Judgement], None],
    places: int,
    addresses_given: Mapping[str, str] | None = None,
) -> None:
    """Judge each mutant, and pass its judgement to `on_judged`. `places`: how many mutants at a time.
    `addresses_given`: use these servers, in one place, instead of new ones.
    """
    files = choosing.files() if len(mutants) > _FEW else []
    queue = asyncio.Queue[Mutant]()
    for mutant in mutants:
        queue.put_nowait(mutant)
    with _progress() as progress:
        bar = progress.add_task("mutants", total=len(mutants), state="starting servers")
        survived = 0

        async def work() -> None:
            nonlocal survived
            async with AsyncExitStack() as opened:
                addresses = await opened.enter_async_context(servers()) if addresses_given is None else addresses_given
                own_judge = await opened.enter_async_context(judge(addresses, files))
                while not queue.empty():
                    mutant = queue.get_nowait()
                    judgement = await own_judge.judge_surely(mutant, choosing.tests_for(mutant))
                    survived += judgement.verdict == "survived"
                    if judgement.verdict == "killed":
                        choosing.learn(mutant, judgement.by)
                    on_judged(judgement)
                    progress.update(bar, advance=1, state=f"{survived} survived; {mutant.path}")

        async with asyncio.TaskGroup() as group:
            for _ in range(1 if addresses_given else min(places, len(mutants))):
                group.create_task(work())


def _progress() -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    return Progress(*columns, console=Console(stderr=True))
