"""Judges many mutants, several at a time, each in a place with servers of its own."""

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


async def run(
    mutants: Sequence[Mutant],
    choosing: Choosing,
    done: Callable[[Judgement], None],
    places: int,
    given: Mapping[str, str] | None = None,
) -> None:
    """Judge each mutant, and pass its judgement to `done`. `places`: how many mutants at a time. `given`: use these
    servers, in one place, instead of new ones.
    """
    waiting = asyncio.Queue[Mutant]()
    for mutant in mutants:
        waiting.put_nowait(mutant)
    with _progress() as progress:
        bar = progress.add_task("mutants", total=len(mutants), state="starting servers")
        survived = 0

        async def work() -> None:
            nonlocal survived
            async with AsyncExitStack() as opened:
                addresses = await opened.enter_async_context(servers()) if given is None else given
                own_judge = await opened.enter_async_context(judge(addresses))
                while not waiting.empty():
                    mutant = waiting.get_nowait()
                    judgement = await own_judge.judge(mutant, choosing.of(mutant))
                    survived += judgement.verdict == "survived"
                    done(judgement)
                    progress.update(bar, advance=1, state=f"{survived} survived; {mutant.path}")

        async with asyncio.TaskGroup() as group:
            for _ in range(1 if given else min(places, len(mutants))):
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
