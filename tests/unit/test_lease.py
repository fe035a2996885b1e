"""Which leases a worker may settle together."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from leasehold.domain.lease import Lease, differ_in_a_task


def test_two_leases_of_one_task_differ_by_their_epoch_or_their_owner() -> None:
    lease = Lease(uuid4(), uuid4(), epoch=2, attempt=1, trusted_until=1.0)
    other_task = replace(lease, task_id=uuid4())
    assert differ_in_a_task([lease, other_task, replace(lease, epoch=1)])
    assert differ_in_a_task([lease, replace(lease, owner=uuid4())])
    assert not differ_in_a_task([])
    assert not differ_in_a_task([lease, other_task])
    assert not differ_in_a_task([lease, replace(lease, trusted_until=2.0)])  # renewed meanwhile
