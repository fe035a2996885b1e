from __future__ import annotations

import pytest

from leasehold.worker.claiming.tenant_load import COUNTING_SHARE, OLDEST_SECONDS, TenantLoad
from tests.support.clock import Clock


@pytest.fixture
def tenant_load(clock: Clock) -> TenantLoad:
    return TenantLoad(clock)


def test_the_first_look_counts(tenant_load: TenantLoad) -> None:
    assert tenant_load.running() is None


def test_where_a_tenant_is_alone_each_look_may_count(tenant_load: TenantLoad, clock: Clock) -> None:
    """None does; the first that finds another tenant's work shall know whose turn it is."""
    asked_at = clock.now
    clock.now += 1
    tenant_load.polled(asked_at, None)
    assert tenant_load.running() is None


@pytest.mark.parametrize(("took", "pause"), [(0.002, 0.002 / COUNTING_SHARE), (3600.0, OLDEST_SECONDS)])
def test_looks_go_by_what_was_counted_the_longer_the_longer_it_took(
    tenant_load: TenantLoad, clock: Clock, took: float, pause: float
) -> None:
    for _ in range(2):  # the first alone may have waited for a processor
        asked_at = clock.now
        clock.now += took
        tenant_load.polled(asked_at, {"t": 3})
    clock.now += pause * 0.99
    assert tenant_load.running() == {"t": 3}
    tenant_load.polled(clock.now, None)  # a look that went by it
    assert tenant_load.running() == {"t": 3}
    clock.now += pause * 0.02
    assert tenant_load.running() is None
