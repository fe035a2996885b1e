"""What a client asks of a picture in every state: alone, two at once, and beside the worker and the housekeeping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from uuid import UUID

import httpx2

from leasehold.db.database import Connection
from leasehold.transitions import sweeps
from tests.api.driver import claim_step, fail_step, finish_all, finish_step
from tests.api.media_api import JPEG, PNG, MediaApi, Ticket, put
from tests.crossings.expectations import PICTURED, table
from tests.crossings.stage import Stage, Tenant, side_by_side
from tests.factories import assert_histories

EXPECTED = table(PICTURED)
STATES = tuple(EXPECTED["get"])


@dataclass
class Picture:
    media_api: MediaApi
    ticket: Ticket

    async def get(self) -> httpx2.Response:
        return await self.media_api.look(self.ticket)

    async def take(self) -> httpx2.Response:
        return await self.media_api.complete(self.ticket)

    async def delete(self) -> httpx2.Response:
        return await self.media_api.client.delete(f"/media/{self.ticket.media_id}")


VERBS: dict[str, Callable[[Picture], Awaitable[httpx2.Response]]] = {
    "get": Picture.get,
    "take": Picture.take,
    "delete": Picture.delete,
}


async def put_into(stage: Stage, tenant: Tenant, state: str) -> Picture:
    media_api = MediaApi(tenant.http)
    ticket = await media_api.ticket()
    picture = Picture(media_api, ticket)
    if state == "asked":
        return picture
    await put(ticket.upload_url, PNG if state == "refused" else JPEG, "image/jpeg")
    if state not in ("sent", "deleted"):
        await picture.take()
    if state == "deleted":
        await picture.delete()
    async with stage.pool.acquire() as c:
        if state == "running":
            await claim_step(c, ticket.media_id)
        if state == "ready":
            await finish_all(c, ticket.media_id)
        if state == "failed":
            await fail_step(c, await claim_step(c, ticket.media_id), "broken", retryable=False)
    return picture


async def state_of(stage: Stage, picture: Picture) -> str:
    async with stage.pool.acquire() as c:
        row = await c.fetchrow(
            "SELECT m.status, m.deleted_at IS NOT NULL AS deleted, j.status AS job FROM media m"
            " LEFT JOIN job j ON j.id = m.job_id WHERE m.id = $1",
            UUID(picture.ticket.media_id),
        )
    if row is None or row["deleted"]:
        return "deleted"
    if row["job"] is None:
        return "refused" if row["status"] == "FAILED" else "unsent"
    names = {"pending": "waiting", "queued": "waiting", "running": "running", "succeeded": "ready", "failed": "failed"}
    return names[row["job"]]


def expected(verb: str, state: str) -> tuple[int, str]:
    status, _, after = EXPECTED[verb][state].partition(">")
    after = after or state
    return int(status), "unsent" if after in ("asked", "sent") else after


async def test_each_is_answered_in_each_state_as_the_table_says(stage: Stage) -> None:
    async def judge(of: tuple[str, str]) -> object | None:
        verb, state = of
        async with stage.tenant() as tenant:
            picture = await put_into(stage, tenant, state)
            answer = await VERBS[verb](picture)
            came = (answer.status_code, await state_of(stage, picture))
        return None if came == expected(verb, state) else (of, came, expected(verb, state), answer.text)

    assert await side_by_side([(verb, state) for verb in VERBS for state in STATES], judge) == []


async def test_two_at_once_are_answered_as_in_one_order_or_the_other(stage: Stage) -> None:
    async def judge(of: tuple[str, tuple[str, str]]) -> object | None:
        state, (first, second) = of
        async with stage.tenant() as tenant:
            picture = await put_into(stage, tenant, state)
            answers = await asyncio.gather(VERBS[first](picture), VERBS[second](picture))
            came = (*(answer.status_code for answer in answers), await state_of(stage, picture))

        def in_order(one: str, other: str) -> tuple[int, int, str]:
            answer, between = expected(one, state)
            between = state if between == "unsent" else between
            return answer, *expected(other, between)

        other = in_order(second, first)
        allowed = [in_order(first, second), (other[1], other[0], other[2])]
        return None if came in allowed else (of, came, allowed, [answer.text for answer in answers])

    pairs = combinations_with_replacement(VERBS, 2)
    assert await side_by_side([(state, pair) for pair in pairs for state in STATES], judge) == []


async def _claim(c: Connection, picture: Picture) -> None:
    """A worker takes the step that may run, if there still is one."""
    try:
        await claim_step(c, picture.ticket.media_id)
    except (ValueError, TypeError):
        return


async def _forget(c: Connection, _picture: Picture) -> None:
    """The housekeeping: what has ended and expired goes."""
    jobs = [one.job_id for one in await sweeps.forgettable_jobs(c)]
    await sweeps.forget_jobs(c, jobs)


async def _swept(connection: Connection, picture: Picture, tenant_id: str) -> int:
    """Sweep until nothing is left of the tenant's. Another case's sweep may have the job, uncommitted, at first."""
    left = 1
    for _ in range(600):
        await sweeps.end_cancels(connection, [], 5)
        await _forget(connection, picture)
        left = await connection.fetchval("SELECT count(*) FROM job WHERE tenant_id = $1", tenant_id)
        if left == 0:
            break
        await asyncio.sleep(0.1)
    return left


async def test_a_picture_that_is_deleted_while_others_are_at_it_is_gone(stage: Stage) -> None:
    """A worker that claims or completes a step, and the housekeeping, at the same time with the deletion."""

    async def judge(of: tuple[str, str]) -> object | None:
        state, beside = of
        async with stage.tenant() as tenant:
            picture = await put_into(stage, tenant, "waiting" if state == "running" else state)

            async def other() -> None:
                async with stage.pool.acquire() as c:
                    if beside == "forget":
                        await _forget(c, picture)
                    elif beside == "claim":
                        await _claim(c, picture)
                    elif claimed is not None:
                        await finish_step(c, claimed, "resize.jpg")

            claimed = None
            if state == "running":
                async with stage.pool.acquire() as c:
                    claimed = await claim_step(c, picture.ticket.media_id)
            answer, _ = await asyncio.gather(picture.delete(), other())
            after = [await VERBS[verb](picture) for verb in VERBS]
            async with stage.pool.acquire() as c:
                await c.execute(
                    "UPDATE job SET cancel_by = clock_timestamp() - interval '1 s'"
                    " WHERE tenant_id = $1 AND cancel_by IS NOT NULL AND finished_at IS NULL",
                    tenant.name,
                )
                left = await _swept(c, picture, tenant.name)
        came = (answer.status_code, [one.status_code for one in after], left)
        return None if came == (204, [404, 404, 404], 0) else (of, came)

    cases = [
        (state, beside)
        for state in ("waiting", "running", "ready", "failed")
        for beside in ("claim", "finish", "forget")
    ]
    assert await side_by_side([case for case in cases for _ in range(4)], judge) == []
    async with stage.pool.acquire() as c:
        await assert_histories(c)
