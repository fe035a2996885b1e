"""An answer that several pages share: nobody waits less, or sees more, because of who asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any

import pytest

from leasehold.api.console.shared import Shared
from leasehold.api.process import deadline, replica_reads
from leasehold.api.process.replica_reads import Reading, reading_as
from leasehold.api.process.tenant_pool import current_tenant, set_tenant

SECONDS = 60.0


class Making:
    """Makes an answer as the database would, once `may_end` is set: within the deadline, and from the standby if the
    request reads there.
    """

    def __init__(self, *errors: BaseException | None) -> None:
        self.may_end = asyncio.Event()
        self._errors = list(errors)
        self.tenants: list[str] = []  # for which tenant each answer was made

    async def __call__(self) -> str:
        self.tenants.append(current_tenant())
        reading = replica_reads.current()
        async with deadline.current().waiting(), nullcontext() if reading is None else reading.waiting():
            await self.may_end.wait()
        if reading is not None:
            reading._include(monotonic() - SECONDS)
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            if reading is not None:
                reading.has_failed = True  # as `lend` does
            raise error
        return f"of {self.tenants[-1]}"


def asking(
    shared: Shared[str], make: Callable[[], Awaitable[str]], *, tenant: str = "a", seconds: float = SECONDS
) -> asyncio.Task[str]:
    """A request of this tenant, which may wait for so many seconds."""

    async def ask() -> str:
        set_tenant(tenant)
        deadline.begin(seconds)
        return await shared.get("page", make)

    return asyncio.create_task(ask())


async def turns() -> None:
    """Let all tasks go on to where they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_deadline_of_who_asked_first_fails_nobody_else() -> None:
    shared, make = Shared[str](SECONDS), Making()
    first, second = asking(shared, make, seconds=0.0), asking(shared, make)
    with pytest.raises(TimeoutError):
        await first
    assert not second.done()
    make.may_end.set()
    assert await second == "of a"
    assert len(make.tenants) == 1


async def test_who_asks_later_waits_until_its_own_deadline() -> None:
    shared, make = Shared[str](SECONDS), Making()
    first, second = asking(shared, make), asking(shared, make, seconds=0.0)
    with pytest.raises(TimeoutError):
        await second
    make.may_end.set()
    assert await first == "of a"
    assert len(make.tenants) == 1


async def test_who_goes_away_takes_the_answer_from_nobody() -> None:
    shared, make = Shared[str](SECONDS), Making()
    first, second = asking(shared, make), asking(shared, make)
    await turns()
    first.cancel()
    await asyncio.wait({first})
    make.may_end.set()
    assert await second == "of a"
    assert first.cancelled()


async def test_what_began_before_a_request_and_failed_is_asked_for_once_more() -> None:
    """A statement of the first request may have waited on a broken connection for all of its time."""
    shared, make = Shared[str](SECONDS), Making(TimeoutError("the first"))
    first, *others = [asking(shared, make) for _ in range(3)]
    await turns()
    make.may_end.set()
    with pytest.raises(TimeoutError, match="the first"):
        await first
    assert [await other for other in others] == ["of a", "of a"]
    assert len(make.tenants) == 2, "the others share what was asked for once more"


async def test_while_the_database_is_away_it_is_asked_twice_and_not_by_each() -> None:
    shared, make = Shared[str](SECONDS), Making(*[OSError(f"{number}") for number in range(9)])
    requests = [asking(shared, make) for _ in range(5)]
    await turns()
    make.may_end.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(error) for error in errors] == ["0", "1", "1", "1", "1"]


async def test_an_error_that_would_come_again_is_shared() -> None:
    shared, make = Shared[str](SECONDS), Making(ValueError("always"))
    requests = [asking(shared, make) for _ in range(3)]
    await turns()
    make.may_end.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(error) for error in errors] == ["always"] * 3
    assert len(make.tenants) == 1


async def test_tenants_share_no_answer_even_under_one_key() -> None:
    """Whatever a page names as its key: the answer waits for a tenant's turn at the database."""
    shared, make = Shared[str](SECONDS), Making()
    requests = [asking(shared, make, tenant=tenant) for tenant in ("a", "b", "a")]
    make.may_end.set()
    assert [await request for request in requests] == ["of a", "of b", "of a"]
    assert make.tenants == ["a", "b"]


def at_standby(seconds: float) -> Reading:
    nothing: Any = None
    return Reading(nothing, nothing, seconds)


async def test_at_the_standby_neither_the_time_of_the_first_counts_nor_is_the_age_of_its_rows_hidden() -> None:
    shared, make = Shared[str](SECONDS), Making()
    readings = [at_standby(0.0), at_standby(SECONDS), at_standby(SECONDS)]

    def asking_at(reading: Reading) -> asyncio.Task[str]:
        block: AbstractContextManager[None] = reading_as(reading)
        with block:
            return asking(shared, make)

    first, *others = [asking_at(reading) for reading in readings]
    with pytest.raises(TimeoutError):
        await first
    assert readings[0].is_over
    make.may_end.set()
    assert [await other for other in others] == ["of a", "of a"]
    assert len(make.tenants) == 1
    assert all((reading.lag or 0.0) >= SECONDS for reading in readings[1:])


async def test_what_failed_at_the_standby_is_left_to_the_primary() -> None:
    shared, make = Shared[str](SECONDS), Making(OSError("away"))
    readings = [at_standby(SECONDS) for _ in range(2)]
    requests = []
    for reading in readings:
        with reading_as(reading):
            requests.append(asking(shared, make))
    await turns()
    make.may_end.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert [str(error) for error in errors] == ["away", "away"]
    assert len(make.tenants) == 1
    assert all(reading.has_failed for reading in readings), "each request reports that the standby fails"
