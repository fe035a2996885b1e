"""The names of concurrency limits, and the names of the duties that admit jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

from leasehold.telemetry.duties import counted

#: The tenant of a limit, and the limit's key. A key is unique within a tenant.
ConcurrencyLimitName: TypeAlias = tuple[str, str]

#: Some limits count each value of the payload separately. The key of such a limit ends with `=` and a digest of the
#: value.
_VALUE = re.compile(r"=[0-9a-f]{40}\Z")

#: The names of two duties in the table `quarantine`, which lists the units that were set aside after an error. The
#: units of JOBS are jobs, and the units of LIMITS are concurrency limits. `counted` creates the duty's counters, and
#: returns its name.
JOBS, LIMITS = counted("admissions"), counted("gates")
#: SQL: the limit `g` as a unit of the duty LIMITS.
LIMIT_UNIT = "g.tenant_id || '/' || g.key"


def limit_columns(names: Iterable[ConcurrencyLimitName]) -> tuple[list[str], list[str]]:
    """Two parameters of a statement: the tenants of these limits, and their keys."""
    pairs = list(names)
    return [tenant for tenant, _ in pairs], [key for _, key in pairs]


def without_value(key: str) -> str:
    """The key as its limit was declared, to be shown to people. The digest of a value at the end of the key is left
    out. An earlier `=` in the key stays, because it belongs to a pointer into the payload.
    """
    return _VALUE.sub("", key)
