"""Gates: how many jobs may be inside at once, and how many may enter a minute."""

from __future__ import annotations

from dataclasses import dataclass

#: The tenant of gates that jobs of all tenants pass.
EVERYBODY = "*"
#: Where tenants share a number of places, slots of a worker or places of a gate, a tenant that has some takes another
#: only while it has fewer than so many times as many as are free: one tenant alone has seven eighths.
GREED = 7


@dataclass(frozen=True, slots=True)
class ConcurrencyLimit:
    """A job that names it is held until fewer than `at_most` of those that name it are inside (admitted and
    unfinished), and until fewer than `per_minute` have entered lately. None: no such bound.

    `tenant_id`: whose it is; EVERYBODY: shared by all. `key` says what it guards, for example `queue:media`.
    `limit`: (tenant, key) of the declared limit that it stands for; then its bounds are that limit's, as they are when
    the job is written.
    """

    tenant_id: str
    key: str
    at_most: int | None = None
    per_minute: int | None = None
    limit: tuple[str, str] | None = None
