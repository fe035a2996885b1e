"""Handlers that have nothing to do."""

from __future__ import annotations

from leasehold.domain.attempt import Attempt
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from tests.security.partly import inline, isolated


@inline.handles("act")
async def act_inline(attempt: Attempt) -> Done:
    return Done()


@isolated.handles("act")
def act_isolated(work: Work) -> Done:
    return Done()
