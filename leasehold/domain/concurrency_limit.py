"""A concurrency limit: how many jobs may be unfinished at once under one key, and how many may be admitted a minute.

A pipeline's submission names the limits of its job; `leasehold.transitions.concurrency` admits the jobs. In the schema
a concurrency limit is a `gate`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The `tenant_id` of a limit that counts the jobs of all tenants together.
EVERYBODY = "*"
#: Divides places fairly between tenants. A place is room for one job at a limit that all tenants share, or a slot of a
#: worker. A tenant that already has places may take one more only while `its places < GREED * free places`. So a tenant
#: that is alone takes seven eighths of the places, rounded up. For example, it takes all places of 7 or fewer, 7 of 8,
#: 14 of 15, and 35 of 40. Limits and workers may reserve further places for tenants that have none.
GREED = 7


@dataclass(frozen=True, slots=True)
class ConcurrencyLimit:
    """A limit that a job names. The job waits while `at_most` jobs of this limit are admitted and unfinished, or while
    `per_minute` jobs were admitted within the last minute. If one of these is None, the limit has no such bound.

    `tenant_id`: the tenant that owns the limit; EVERYBODY: all tenants share it.
    `key`: what the limit counts, for example `queue:media`.
    `declared_as`: None, or the (tenant, key) of a declared limit. The submission then reads the bounds of the declared
    limit when it writes the job, and ignores `at_most` and `per_minute`.
    """

    tenant_id: str
    key: str
    at_most: int | None = None
    per_minute: int | None = None
    declared_as: tuple[str, str] | None = None
