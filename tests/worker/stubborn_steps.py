"""A pipeline whose handler catches its CancelledError and goes on, as a bare `except` in a loop does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.domain.registry import Pipelines

stubborn = Pipeline(
    "stubborn",
    module="tests.worker.stubborn_steps",
    steps=[Step("first", retry_ladder=(timedelta(milliseconds=1),))],
    terms=RunTerms(grace=timedelta(0)),
)
#: The attempts whose handlers run, with the tasks that run them.
begun: list[tuple[Attempt, asyncio.Task[Any]]] = []
#: The processes of PostgreSQL for the connections of the worker's pool that they have got.
connected: list[int] = []


def pipelines() -> Pipelines:
    return Pipelines(stubborn)


@stubborn.handles("first")
async def first(attempt: Attempt) -> None:
    task = asyncio.current_task()
    assert task is not None
    begun.append((attempt, task))
    attempt.log.warning("the stubborn handler has begun")
    async with attempt.connection() as connection:
        connected.append(connection.get_server_pid())
        while begun:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


def let_go() -> None:
    """Let the handlers end."""
    tasks = [task for _, task in begun]
    begun.clear()
    connected.clear()
    for task in tasks:
        task.cancel()
