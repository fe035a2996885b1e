"""Reads who did what with a job. The acts of persons and clients come from the audit. The acts of bulk operations (each
retries, cancels or deletes many jobs) come from the job's events. The job's page lists the acts from both sources. If
the job's state does not allow a person's act any more, the refusal names the latest act on the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from leasehold.db.event_reads import EventView

#: The page shows at most this many acts.
MAX_ACTS = 20
#: If a person repeats an act within this many seconds, the second request counts as the second click of a double click.
_DOUBLE_CLICK_SECONDS = 10.0
#: The kind of an event that a bulk operation can cause -> the name of the same act in the audit.
_ACTION_OF_EVENT = {"replayed": "job.retried", "cancel_requested": "job.cancelled"}


@dataclass(frozen=True, slots=True)
class Act:
    """An action of a person, a client or a bulk operation on a job. `action`: its name in the audit, such as
    `job.retried`. `details` never contain a secret or a payload.
    """

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
        """Whether this act is the first click of a double click by the caller, who now requests `action` again."""
        return (
            self.action == action
            and (self.actor, self.key_prefix) == (caller.actor.name, caller.actor.key_prefix)
            and self._age < _DOUBLE_CLICK_SECONDS
        )


async def acts_on(
    connection: Connection, tenant_id: str, job_id: UUID, events: Sequence[EventView], limit: int = MAX_ACTS
) -> list[Act]:
    """The latest acts on the job, the newest first. `events`: the latest events of the job.

    The acts of bulk operations come from `events`, because the audit has one row for the operation, and no row for each
    job.
    """
    rows = await audit.page(connection, AuditFilter(tenant_id, target=str(job_id)), None, limit)
    acts = [
        Act(row["at"], row["actor"], row["key_prefix"], row["action"], orjson.loads(row["details"])) for row in rows
    ]
    return sorted([*acts, *_of_operations(events)], key=lambda act: act.at, reverse=True)[:limit]


def _of_operations(events: Sequence[EventView]) -> list[Act]:
    """The acts of bulk operations, from the events that name their operation. A retry causes an event for each step, so
    only the first event of an operation counts.
    """
    acts: dict[tuple[str, str], Act] = {}
    for event in events:
        data = event.data or {}
        action = _ACTION_OF_EVENT.get(event.kind)
        if action is not None and "operation" in data:
            actor = str(data["by"]).removeprefix("client ")  # the audit names a client without this word
            details = {name: data[name] for name in ("reason", "operation") if data.get(name)}
            acts.setdefault((action, data["operation"]), Act(event.at, actor, None, action, details))
    return list(acts.values())
