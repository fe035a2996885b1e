"""The context that all bulk operations (jobs that act on many other jobs) of a worker use. The context has the actions
on jobs (`actions`), and the limits of tenants (`admission`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from leasehold.actions.context import Actions
from leasehold.db.database import connected
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.evaluator import evaluating
from leasehold.evaluation.templates import Templates
from leasehold.kinds.housekeeping import HousekeepingContext, hooks_before_jobs_go, housekeeping_of
from leasehold.kinds.job_kinds import RUN_SCOPES, JobKinds
from leasehold.kinds.opening import open_all
from leasehold.limits.admission import Admission
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class OperationContext:
    settings: Settings
    actions: Actions
    admission: Admission


@asynccontextmanager
async def open_operation_context(settings: Settings, pipelines: Pipelines) -> AsyncIterator[OperationContext]:
    kinds = kinds_of(pipelines)
    job_kinds = JobKinds(kinds, pipelines, RUN_SCOPES)
    # HousekeepingContext needs a store, but the store stays closed, because operations call only the hooks before
    # deletions, and these hooks change only rows.
    store = ObjectStore.from_settings(settings)
    context = HousekeepingContext(settings, lambda: connected(settings, "worker operations"), store)
    async with AsyncExitStack() as stack:
        evaluator = await stack.enter_async_context(evaluating(settings))
        opened = await open_all(kinds, settings, stack)
        hooks = hooks_before_jobs_go(housekeeping_of(kinds, context))
        actions = Actions(settings, Templates(pipelines, evaluator), job_kinds, opened, hooks)
        yield OperationContext(settings, actions, Admission(settings, kinds))
