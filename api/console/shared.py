"""Answers that many open consoles share for some seconds, so that they cost the database as much as one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from time import monotonic
from typing import Any, Generic, TypeVar

from fastapi import Request

_Answer = TypeVar("_Answer")
_MAX_KEYS = 500


class Shared(Generic[_Answer]):
    """`seconds`: how long an answer is given again. Requests that come while it is being made wait for it. An answer
    that equals the one before is that very object: a page that is made of it is not made again (rendering.page).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._made: OrderedDict[Hashable, tuple[float, asyncio.Task[_Answer]]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """`key` must name the tenant and the scopes, where the answer depends on them."""
        made = self._made.get(key)
        if made is None or (made[1].done() and (monotonic() >= made[0] or _failed(made[1]))):
            before = None if made is None or _failed(made[1]) else made[1].result()
            made = monotonic() + self._seconds, asyncio.ensure_future(_made(make, before))
            self._made[key] = made
            self._made.move_to_end(key)
            if len(self._made) > _MAX_KEYS:
                self._made.popitem(last=False)
        return await asyncio.shield(made[1])

    def forget(self) -> None:
        """Make every answer anew: the caller has changed what they are about."""
        self._made.clear()


async def _made(make: Callable[[], Awaitable[_Answer]], before: _Answer | None) -> _Answer:
    answer = await make()
    return before if before is not None and answer == before else answer


def _failed(task: asyncio.Task[_Answer]) -> bool:
    return task.cancelled() or task.exception() is not None


def shared_of(request: Request, name: str, seconds: float) -> Shared[Any]:
    """The process's shared answers of this name."""
    state = request.app.state
    if not hasattr(state, "console"):
        state.console = {}
    answers: dict[str, Shared[Any]] = state.console
    return answers.setdefault(name, Shared(seconds))
