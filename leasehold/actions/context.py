"""What every action on a job (cancel, retry, delete, ...) needs: the parts of the process, and the job itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.evaluation.templates import Templates
from leasehold.kinds.housekeeping import BeforeJobsGo
from leasehold.kinds.job_kinds import JobKind, JobKinds
from leasehold.settings import Settings
from leasehold.transitions import webhooks


@dataclass(frozen=True, slots=True)
class Actions:
    """What an action needs of its process. `kinds`: the kinds of work. `opened`: the name of a kind -> what the kind
    has opened for its endpoints, such as clients of a store. `before_jobs_go`: hooks of all kinds, called before jobs
    are deleted.
    """

    settings: Settings
    templates: Templates
    kinds: JobKinds
    opened: Mapping[str, Any]
    before_jobs_go: Sequence[BeforeJobsGo] = ()

    async def dispatch(self, connection: Connection, job_id: UUID, *, deletes: bool = False) -> list[Announcement]:
        """Write what follows the end of an ended job: the webhook deliveries about the end, and the `on_failure` run of
        a failed job. This function does nothing if the job has not ended, or if all this is written already. Call it
        before the job's row changes again or is deleted, because the deliveries are made from the row. Returns hints
        (messages that tell workers of due tasks) to publish.

        `deletes`: the caller deletes the job. The code of a failed job may be missing in this process, while a worker
        may have it. Then this function leaves the deliveries and the `on_failure` run to that worker. The row of the
        deleted job is hidden, and stays until the worker has written them.
        """
        # None: this installation delivers no webhooks. It has no `on_failure` runs either, because only the tasks of an
        # app have them, and the processes of an app always have the pipeline `webhook` (`App.pipelines`).
        pipeline = self.templates.pipelines.find("webhook")
        if pipeline is None:
            return []
        keep_seconds = self.settings.retention_days * 86_400
        hints, _ = await webhooks.dispatch(
            connection,
            pipeline,
            keep_seconds,
            self.kinds.reported_jobs,
            job_id=job_id,
            pipelines=self.templates.pipelines,
            deletes=deletes,
        )
        return hints


@dataclass(frozen=True, slots=True)
class Target:
    """A job to act on. (Elsewhere, a target is also where a conversion is promoted to, or what an audit row is about.)
    `row`: the job's id, tenant_id, pipeline, status, params, priority, exclusive_key, dedupe_key and is_run, and a
    run's template, version, scope and scope_id. If a bulk operation acts on the job, its row also has `gated` (the job
    has a concurrency limit) and `notify` (a webhook or a callback URL waits for the job's end). Only the functions for
    several jobs (`..._together`) read these two columns. `queue`: the queue of the job's first step.
    """

    row: Row
    kind: JobKind
    queue: str

    @property
    def id(self) -> UUID:
        job_id: UUID = self.row["id"]
        return job_id

    @property
    def tenant_id(self) -> str:
        tenant_id: str = self.row["tenant_id"]
        return tenant_id
