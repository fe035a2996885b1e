"""Makes a failed job run again. Like a new job, it may wait at the concurrency limits of its kind and of its tenant.
For a run, the template's concurrency policy decides what happens while other runs of the scope are unfinished. The run
waits for them, replaces them, or is refused.

A Target is a job with its kind. Actions holds what the functions here need of their process (context.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import asyncpg

from leasehold.actions.context import Actions, Target
from leasehold.broker.outbox import Announcement
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict
from leasehold.domain.pipeline import Pipeline
from leasehold.evaluation.templates import TemplateVersion
from leasehold.kinds.job_kinds import FailedJob, RetryTerms
from leasehold.transitions import debounce, jobs, limits, runs
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.limits import TenantRules
from leasehold.transitions.runs import CreatedRun, NewRun


async def template_of(actions: Actions, connection: Connection, target: Target) -> TemplateVersion | None:
    """The template of a run, or None if the job is not a run. Raises NotFound `template_not_found`."""
    row = target.row
    if not row["is_run"]:
        return None
    return await actions.templates.find_for_run(connection, target.tenant_id, row["template"], row["version"])


def may_revive_together(
    actions: Actions, target: Target, template_version: TemplateVersion | None, rules: TenantRules
) -> bool:
    """Whether `revive_together` may retry the job. True if the job has no concurrency limit (`gated`), no exclusive key
    and no dedupe key, waits for no other run, and its kind has no hooks for retries. `template_version`: the template
    of a run, or None if the job is not a run. `rules`: the limits that are declared for the tenant's new jobs.
    """
    row = target.row
    if row["gated"] or row["exclusive_key"] is not None or row["dedupe_key"] is not None:
        return False
    if template_version is None:
        is_served = actions.kinds.pipeline(row["pipeline"]) is not None
        operations = target.kind.operations
        has_hooks = operations.before_retry is not None or operations.after_retry is not None
        return is_served and not has_hooks and not rules.limits
    pipeline = template_version.pipeline
    declared_limits = limits.applicable_limits(rules.limits, target.tenant_id, pipeline, row["params"])
    return pipeline.terms.concurrency == "allow" and not declared_limits


async def revive_together(
    actions: Actions, connection: Connection, targets: Sequence[Target], cause: Mapping[str, str] | None = None
) -> list[Announcement]:
    """Do the same as `revive`, for failed jobs of one tenant for which `may_revive_together` is true. The caller has
    locked them. Returns the hints (messages that tell workers of due tasks) to publish after the commit.
    """
    hints: list[Announcement] = []
    for target in targets:
        if target.row["notify"]:
            # Write the webhook deliveries of the failure first, as `revive` does.
            hints += await actions.dispatch(connection, target.id)
    pipelines_with_on_failure = [
        pipeline.name for pipeline in actions.templates.pipelines if pipeline.on_failure is not None
    ]
    return hints + await jobs.replay_together(
        connection, [target.id for target in targets], targets[0].tenant_id, pipelines_with_on_failure, cause
    )


async def limits_of_retry(
    actions: Actions,
    connection: Connection,
    target: Target,
    template_version: TemplateVersion | None,
    rules: TenantRules,
) -> Sequence[ConcurrencyLimit]:
    """The limits at which the job may wait after `revive`. A caller that retries several jobs in one transaction must
    first lock the limits of all these jobs, in the order of the limits' names. Each admission locks limits in this
    order, and could deadlock with a transaction that uses another order.

    Raises Conflict `pipeline_not_served`. `rules`: the limits that are declared for the tenant's new jobs.
    """
    if template_version is not None:
        return runs.limits_of(_new_run(target, template_version, None), rules)
    return _limits_without_template(target, *await _pipeline_and_terms(actions, connection, target), rules)


async def revive(
    actions: Actions,
    connection: Connection,
    target: Target,
    template_version: TemplateVersion | None,
    params: dict[str, Any] | None = None,
    from_step: str | None = None,
    cause: Mapping[str, str] | None = None,
) -> CreatedRun | None:
    """Make the failed job pending again, inside the caller's transaction. Returns what the caller must publish and
    admit after the commit (CreatedRun). If the job is no longer failed, the function changes nothing, and returns None.
    `params`: the new parameters. If None, the job keeps its old parameters, or gets those that its kind sets.
    `from_step`: the first step to run again. If None, it is the failed step. `cause`: who retries the job, for its
    history.

    The function writes the webhook deliveries of the failure first, because afterwards the job's row no longer shows
    the failure. Raises the errors of `runs.revive`, Conflict `pipeline_not_served` or `same_key_running`, and the
    Conflict of the kind's `after_retry`.
    """
    # Lock the dedupe keys before `dispatch`, which may write an `on_failure` run and so lock concurrency limits. A
    # debounced submission also locks keys before limits. If this function used another order, the two could deadlock.
    await debounce.lock_keys_of_jobs(connection, target.tenant_id, [target.id])
    hints = await actions.dispatch(connection, target.id)
    if template_version is not None:
        new_run = _new_run(target, template_version, params)
        effects = await runs.revive(connection, new_run, from_step, cause, replaces_params=params is not None)
    else:
        effects = await _revive_job_without_template(actions, connection, target, params, from_step, cause)
    return None if effects is None else replace(effects, hints=[*hints, *effects.hints])


def _new_run(target: Target, template_version: TemplateVersion, params: dict[str, Any] | None) -> NewRun:
    row = target.row
    return NewRun(
        template_version=template_version,
        tenant_id=target.tenant_id,
        params=row["params"] if params is None else params,
        scope=row["scope"],
        scope_id=row["scope_id"],
        priority=row["priority"],
        id=target.id,
    )


async def _revive_job_without_template(
    actions: Actions,
    connection: Connection,
    target: Target,
    params: dict[str, Any] | None,
    from_step: str | None,
    cause: Mapping[str, str] | None,
) -> CreatedRun | None:
    """Do the same as `revive`, for a job that is not a run."""
    tenant_id = target.tenant_id
    pipeline, retry_terms = await _pipeline_and_terms(actions, connection, target)
    if params is not None:
        retry_terms = replace(retry_terms, params=params)
    rules = (await limits.tenant_rules(connection, {tenant_id}))[tenant_id]
    all_limits = _limits_without_template(target, pipeline, retry_terms, rules)
    terms = AdmissionTerms(all_limits, target.row["exclusive_key"])
    after_retry = target.kind.operations.after_retry
    ended: Sequence[JobEnded] = ()
    try:
        async with connection.transaction():  # a savepoint, so that a refusal does not end the caller's transaction
            hints = await jobs.replay(
                connection, target.id, tenant_id, retry_terms.params, from_step, terms, cause=cause
            )
            if hints is not None and after_retry is not None:
                ended = await after_retry(connection, target.id, tenant_id, from_step)
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name not in runs.KEYS:  # the unique indexes of exclusive keys and dedupe keys
            raise
        raise Conflict("same_key_running", "Another job with the same key is unfinished.") from None
    limit_names = [(limit.tenant_id, limit.key) for limit in all_limits]
    return None if hints is None else CreatedRun(target.id, hints, limit_names, ended=ended)


def _limits_without_template(
    target: Target, pipeline: Pipeline, terms: RetryTerms, rules: TenantRules
) -> list[ConcurrencyLimit]:
    params = target.row["params"] if terms.params is None else terms.params
    return [*terms.limits, *limits.applicable_limits(rules.limits, target.tenant_id, pipeline, params)]


async def _pipeline_and_terms(actions: Actions, connection: Connection, target: Target) -> tuple[Pipeline, RetryTerms]:
    """The pipeline of a job that is not a run, and the terms of the retry, which the kind's hook `before_retry` sets.
    Raises Conflict `pipeline_not_served`.
    """
    pipeline = actions.kinds.pipeline(target.row["pipeline"])
    if pipeline is None:
        raise Conflict("pipeline_not_served", "This installation no longer has the job's pipeline.")
    before_retry = target.kind.operations.before_retry
    if before_retry is None:
        return pipeline, RetryTerms()
    pin = target.queue.partition("@")[2] or None  # the queue of a pinned job is `name@label`
    job = FailedJob(target.tenant_id, target.row["params"], pin, await database_time(connection))
    opened = actions.opened.get(target.kind.name)  # what the kind has opened at the start of this process
    return pipeline, before_retry(actions.settings, opened, job)
