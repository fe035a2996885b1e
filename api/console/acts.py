"""Who did what with a job, from the audit. The job's page lists these acts. The answer to an act that came too late
names the latest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson

from leasehold.api.console.rendering import span
from leasehold.api.process.keyring import Caller
from leasehold.db import audit
from leasehold.db.audit import AuditFilter
from leasehold.db.database import Connection

#: The page shows at most this many acts.
MAX_ACTS = 20
#: A person who repeats an act within these seconds has pressed its button twice.
_DOUBLE_CLICK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Act:
    """`action`: as the audit names it, such as `job.retried`. `details`: never a secret or a payload."""

    at: datetime
    actor: str
    key_prefix: str | None
    action: str
    details: Mapping[str, Any]

    @property
    def verb(self) -> str:
        return self.action.partition(".")[2].replace("_", " ")

    @property
    def sentence(self) -> str:
        return f"{self.actor} {self.verb} it {span(self._age)} ago."

    @property
    def _age(self) -> float:
        return max(0.0, (datetime.now(UTC) - self.at).total_seconds())

    def is_first_click(self, caller: Caller, action: str) -> bool:
        """Whether the caller did the same just now."""
        return (
            self.action == action
            and (self.actor, self.key_prefix) == (caller.actor.name, caller.actor.key_prefix)
            and self._age < _DOUBLE_CLICK_SECONDS
        )


async def acts_on(connection: Connection, tenant_id: str, job_id: UUID, limit: int = MAX_ACTS) -> list[Act]:
    """The latest acts on the job, the newest first."""
    rows = await audit.page(connection, AuditFilter(tenant_id, target=str(job_id)), None, limit)
    return [
        Act(row["at"], row["actor"], row["key_prefix"], row["action"], orjson.loads(row["details"])) for row in rows
    ]
