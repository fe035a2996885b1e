"""Visits every state that a model can reach, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass
class Explored(Generic[S]):
    """`states`: all that were reached. `trace`: the shortest way to the `broken` promise."""

    states: list[S]
    broken: str | None = None
    trace: list[str] = field(default_factory=list)


def explore(
    start: S, moves: Callable[[S], Iterable[tuple[str, S]]], violated: Callable[[S], str | None]
) -> Explored[S]:
    """`moves`: each move's name, with the state after it. `violated`: the promise that does not hold in a state."""
    came: dict[S, tuple[S, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        s = waiting.popleft()
        if (broken := violated(s)) is not None:
            names = []
            step = came[s]
            while step is not None:
                before, name = step
                names.append(name)
                step = came[before]
            return Explored(list(came), broken, names[::-1])
        for name, after in moves(s):
            if after not in came:
                came[after] = (s, name)
                waiting.append(after)
    return Explored(list(came))
