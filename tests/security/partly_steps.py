"""Handlers that have nothing to do."""

from __future__ import annotations

from leasehold.attempt import Attempt
from leasehold.verdicts import Done
from leasehold.work import Work
from tests.security.partly import inline, isolated


@inline.handles("act")
async def act_inline(attempt: Attempt) -> Done:
    return Done()


@isolated.handles("act")
def act_isolated(work: Work) -> Done:
    return Done()
