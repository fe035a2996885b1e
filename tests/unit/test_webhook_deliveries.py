"""A delivery goes to one destination, is tried for days, and leaves places for other tenants and other hosts."""

from __future__ import annotations

import random
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from leasehold.domain.attempt import Attempt
from leasehold.pipelines.webhooks import steps
from leasehold.pipelines.webhooks.limits import DeliveryLimits
from leasehold.pipelines.webhooks.pipeline import Delivery, webhooks


def test_a_tenant_and_a_host_hold_their_places_only_while_a_delivery_runs() -> None:
    limits = DeliveryLimits(per_tenant=2, per_host=3)

    def has_place(tenant: str, host: str) -> bool:
        with limits.try_acquire(tenant=tenant, host=host) as acquired:
            return acquired

    with limits.try_acquire(tenant="acme", host="a.example"):
        for _ in range(3):  # each delivery that ends gives back one place, and not that of another
            with limits.try_acquire(tenant="acme", host="b.example") as acquired:
                assert acquired
                assert not has_place("acme", "c.example"), "the tenant has two places"
            assert has_place("acme", "c.example")
        with limits.try_acquire(tenant="rival", host="a.example"), limits.try_acquire(tenant="rival", host="a.example"):
            assert not has_place("third", "a.example"), "the host has three places"
            assert has_place("third", "c.example")
            with limits.try_acquire(tenant="acme", host="c.example"):
                assert not has_place("acme", "d.example"), "the tenant's first delivery still runs"


def test_a_delivery_that_has_ended_holds_its_places_until_the_last_of_its_lookups_has_ended() -> None:
    """A lookup that runs on holds a thread that the deliveries of all tenants use."""
    limits = DeliveryLimits(per_tenant=1, per_host=1)
    lookups: list[Future[Any]] = []

    def has_place(tenant: str, host: str) -> bool:
        with limits.try_acquire(tenant=tenant, host=host) as acquired:
            return acquired

    with limits.try_acquire(tenant="acme", host="a.example", lookups=lookups):
        lookups += [Future(), Future()]
    for lookup in reversed(lookups):
        assert not has_place("acme", "b.example")
        assert not has_place("rival", "a.example")
        assert has_place("rival", "b.example")
        lookup.set_result(None)
    assert has_place("acme", "a.example")


def test_a_refused_delivery_is_tried_ten_times_in_three_days() -> None:
    """The delays of the Standard Webhooks specification."""
    (step,) = webhooks.steps
    delays = [delay.total_seconds() for delay in step.retry_ladder]
    assert delays == [5, 5 * 60, 30 * 60, *(hours * 3600 for hours in (2, 5, 10, 14, 20, 24))]
    assert step.max_attempts == 10


async def test_a_delivery_without_a_place_pauses_each_time_for_longer_up_to_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)  # no jitter
    note: dict[str, Any] = {}

    async def noted() -> dict[str, Any]:
        return note

    attempt = cast("Attempt", SimpleNamespace(note=noted))
    pauses = []
    for _ in range(8):
        snooze = await steps._snooze(attempt)
        pauses.append(snooze.until)
        note = dict(snooze.note or {})
    assert pauses == [timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 15, 30, 30, 30)]


def test_clients_start_no_deliveries_and_no_limit_makes_one_wait() -> None:
    assert (webhooks.terms.offered, webhooks.terms.unlimited) == (False, True)


def test_a_delivery_has_one_destination() -> None:
    for destinations in ({}, {"webhook_id": uuid4(), "url": "https://a.example"}):
        with pytest.raises(ValueError, match="to a webhook or to a URL"):
            Delivery.model_validate({"event": {}} | destinations)
