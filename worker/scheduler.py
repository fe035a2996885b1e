"""The scheduler: every worker runs one; the rows' locks see to it that each firing makes one run, and each ended run
one delivery to each webhook.
"""

from __future__ import annotations

import asyncio

import structlog

from leasehold.announcer import Announcer
from leasehold.database import TRY_AGAIN, Pool
from leasehold.pipeline import Pipeline
from leasehold.telemetry.jobs import jobs_ended
from leasehold.templates import Templates
from leasehold.transitions import gates, schedules, webhooks

log = structlog.get_logger(__name__)

_EVERY_SECONDS = 0.5


async def schedule(
    pool: Pool, templates: Templates, announcer: Announcer, keep_seconds: int, deliveries: Pipeline | None
) -> None:
    """`deliveries`: the pipeline that delivers webhooks, where this installation has it.

    For ever; what fails now is still due at the next turn.
    """
    while True:
        try:
            async with pool.acquire() as connection:
                for made in await schedules.fire_due(connection, templates, keep_seconds):
                    jobs_ended(made.ended)
                    announcer.announce(made.hints)
                    announcer.announce(await gates.admit(connection, made.gates, made.left))
                if deliveries is not None:
                    announcer.announce(await webhooks.dispatch(connection, deliveries, keep_seconds))
        except TRY_AGAIN as error:
            log.warning("schedules are looked at again", error=type(error).__name__)
        await asyncio.sleep(_EVERY_SECONDS)
