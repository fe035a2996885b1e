"""Finds templates by type (a template's name) and version, and checks payloads against their schemas.

Code declares templates for all tenants. A tenant writes its own templates over HTTP. The schema of a tenant's template
may be hostile, so the evaluator checks the payloads of such templates. If a check may be expensive, the evaluator uses
a child process (flat.py decides which checks are cheap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import asyncpg
import structlog
from jsonschema_rs import Draft202012Validator
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.json_pointer import first_mismatch_of
from leasehold.domain.params import json_of_params, params_of_json
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.sentences import full_stop
from leasehold.domain.storable import NotStorable
from leasehold.domain.template import Template, encoded_payload, template_of_pipeline
from leasehold.evaluation.child import first_mismatch
from leasehold.evaluation.evaluator import EvaluationLimits, Evaluator, PayloadMismatch, mismatch_sentence
from leasehold.evaluation.model_schemas import compile_model_schema
from leasehold.runtime.pacing import paced
from leasehold.settings import Settings

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TemplateVersion:
    """One version of a template, and the pipeline that its runs use. `in_code`: code declares the template."""

    template: Template
    pipeline: Pipeline
    enabled: bool
    in_code: bool

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return compile_model_schema(self.template.payload_schema)  # cached: to compile costs as much as a run's commit

    @property
    def independent(self) -> bool:
        """Whether runs of this template may run at the same time, and no run replaces another run."""
        return self.pipeline.terms.concurrency == "allow"

    def params_by_code(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a run of a template that code declares. The schema of such a template is trusted. Raises
        Invalid with the path of the value that does not fit.
        """
        if (problem := first_mismatch(self._validator, dict(payload))) is not None:
            raise Invalid("invalid_payload", mismatch_sentence(*problem))
        model = self.pipeline.params
        try:
            return json_of_params(model, params_of_json(model, payload))
        except ValidationError as error:
            raise Invalid("invalid_payload", mismatch_sentence(*first_mismatch_of(error))) from None
        except NotStorable as error:
            raise Invalid("invalid_payload", mismatch_sentence(error.path, error.reason)) from None
        except (PydanticSerializationError, ValueError) as error:
            raise Invalid("invalid_payload", full_stop(f"The payload has no JSON by its model: {error}")) from None


@dataclass(frozen=True, slots=True)
class TemplatePage:
    """`versions`: the versions on the page, sorted by type; newer versions of a type come first. `next_after`: the type
    and the number of the version after which the next page begins; None: this is the last page. A version that this
    release cannot read is left out, but counts for the page's length.
    """

    versions: Sequence[TemplateVersion]
    next_after: tuple[str, int] | None


class Templates:
    """Finds templates, and checks payloads against them. `pipelines`: the pipelines that this installation's code
    declares. `evaluator`: the caller opens and closes it. `reserved`: names, in addition to the names of the pipelines,
    that no tenant's template may have. `reserved_queues`: queues in which no step of a tenant's template may run.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        evaluator: Evaluator | None = None,
        *,
        reserved: frozenset[str] = frozenset(),
        reserved_queues: frozenset[str] = frozenset(),
    ) -> None:
        self.pipelines = pipelines
        self._reserved = reserved
        # If a pipeline has its own slots, its queues serve this pipeline alone.
        self._reserved_queues = reserved_queues | {
            step.queue for pipeline in pipelines if pipeline.slots is not None for step in pipeline.steps
        }
        self._evaluator = evaluator if evaluator is not None else Evaluator(EvaluationLimits.of(Settings()))
        # The name of a pipeline -> its version. This is a cache, because making a version costs as much as a run's
        # commit.
        self._in_code: dict[str, TemplateVersion] = {}

    def all_declared_in_code(self) -> list[TemplateVersion]:
        """The templates of the pipelines that clients may start (`offered`) and that read no inputs."""
        return [
            self._of_pipeline(pipeline) for pipeline in self.pipelines if pipeline.terms.offered and not pipeline.inputs
        ]

    def _of_pipeline(self, pipeline: Pipeline) -> TemplateVersion:
        template_version = self._in_code.get(pipeline.name)
        if template_version is None or template_version.pipeline is not pipeline:
            template_version = self._in_code[pipeline.name] = TemplateVersion(
                template_of_pipeline(pipeline), pipeline, enabled=True, in_code=True
            )
        return template_version

    def declared_in_code(self, template_type: str, version: int | None = None) -> TemplateVersion | None:
        """The template that is declared in code. It takes precedence over a tenant's template of the same name."""
        for template_version in self.all_declared_in_code():
            if template_version.template.type == template_type and version in (None, template_version.template.version):
                return template_version
        return None

    async def find(
        self, connection: Connection, tenant_id: str, template_type: str, version: int | None = None
    ) -> TemplateVersion:
        """The template in this version, even if the version is disabled. If `version` is None, it is the template in
        its newest enabled version. Raises NotFound `template_not_found`, and Conflict `template_unreadable` if this
        release cannot read the template.
        """
        template_version = self.declared_in_code(template_type, version)
        if template_version is not None:
            return template_version
        row = await connection.fetchrow(
            "SELECT declaration, enabled FROM template WHERE tenant_id = $1 AND type = $2"
            " AND CASE WHEN $3::int IS NULL THEN enabled ELSE version = $3 END ORDER BY version DESC LIMIT 1",
            tenant_id,
            template_type,
            version,
        )
        if row is None:
            raise template_not_found()
        template = _read(row["declaration"])
        return TemplateVersion(template, template.pipeline(), enabled=row["enabled"], in_code=False)

    async def exists(self, connection: Connection, tenant_id: str, template_type: str) -> bool:
        """Whether the template has any version. A disabled version counts, and a version that this release cannot read
        counts, too.
        """
        if self.declared_in_code(template_type) is not None:
            return True
        found: bool = await connection.fetchval(
            "SELECT EXISTS (SELECT 1 FROM template WHERE tenant_id = $1 AND type = $2)", tenant_id, template_type
        )
        return found

    async def find_for_run(
        self, connection: Connection, tenant_id: str, template_type: str, version: int
    ) -> TemplateVersion:
        """The template of an existing run. A template in code has only its current version, so for such a template this
        method returns the current version, whatever version the run names. Raises the errors of `find`.
        """
        return self.declared_in_code(template_type) or await self.find(connection, tenant_id, template_type, version)

    async def find_usable(
        self, connection: Connection, tenant_id: str, template_type: str, version: int | None
    ) -> TemplateVersion:
        """As `find`, but raises Conflict `template_disabled` for a disabled version, and Invalid `two_workflows` for a
        version with two workflows.
        """
        return self._runnable(await self.find(connection, tenant_id, template_type, version))

    async def find_for_rerun(
        self, connection: Connection, tenant_id: str, template_type: str, version: int
    ) -> TemplateVersion:
        """As `find_for_run`, but raises Conflict `template_disabled` and Invalid `two_workflows`, as `find_usable`
        does.
        """
        return self._runnable(await self.find_for_run(connection, tenant_id, template_type, version))

    def _runnable(self, template_version: TemplateVersion) -> TemplateVersion:
        """The version, if runs of it may start. `check` refuses a version with two workflows. But an earlier release
        may have written such a version, or handlers that it names may have become workflows later.
        """
        if not template_version.enabled:
            raise Conflict("template_disabled", "This version of the template is disabled.")
        self._check_workflows(template_version.pipeline)
        return template_version

    async def find_schedulable(
        self, connection: Connection, tenant_id: str, template_type: str, version: int | None
    ) -> TemplateVersion:
        """As `find_usable`, but also raises Conflict `not_schedulable` if schedules may not run the template."""
        template_version = await self.find_usable(connection, tenant_id, template_type, version)
        if not template_version.template.schedulable:
            raise Conflict("not_schedulable", "Runs of this template are not scheduled.")
        return template_version

    async def params(
        self, tenant_id: str, template_version: TemplateVersion, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The parameters of a run. Raises Invalid with the path of the value that does not fit, and the errors of
        Evaluator.check.

        Hold no database connection during the call if you can. The call may take as long as the evaluator's limits
        allow.
        """
        (params,) = await self.params_of_all(tenant_id, template_version, [payload])
        return params

    def asks_evaluator(self, template_version: TemplateVersion) -> bool:
        """Whether `params` may wait for the evaluator. Otherwise `params` computes the parameters without waiting."""
        return not template_version.in_code and bool(template_version.template.payload_schema)

    async def params_of_all(
        self, tenant_id: str, template_version: TemplateVersion, payloads: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """As `params`, for many payloads. If a payload is at fault, this raises PayloadMismatch with the payload's
        position.
        """
        all_params: list[dict[str, Any]] = []
        encoded_payloads: list[bytes] = []
        async for payload in paced(payloads):  # `paced` lets the event loop serve other requests between payloads
            try:
                encoded_payloads.append(encoded_payload(payload))
                params = template_version.params_by_code(payload) if template_version.in_code else dict(payload)
                all_params.append(params)
            except Invalid as error:
                raise PayloadMismatch(len(all_params), error.code, error.message) from None
        if not template_version.in_code:
            await self._evaluator.check(tenant_id, template_version.template.payload_schema, encoded_payloads)
        return all_params

    async def check(self, tenant_id: str, template: Template) -> None:
        """Check that the template may be written. Raises Conflict if its name is reserved, or is the name of a pipeline
        in code. Raises Invalid for an unknown handler, a reserved queue, or two workflows. Also raises the errors of
        Evaluator.check_schema.
        """
        if template.type in self.pipelines or template.type in self._reserved:
            raise Conflict("template_reserved", "A pipeline or a kind of work of this platform has this name.")
        pipeline = template.pipeline()
        for step in pipeline.steps:
            if step.handler is not None:  # otherwise an external worker does the step
                self._check_handler(step.handler)
                self._check_queue(step.queue)
        self._check_workflows(pipeline)
        if template.payload_schema:
            await self._evaluator.check_schema(tenant_id, template.payload_schema)

    async def write(self, connection: Connection, tenant_id: str, template: Template) -> None:
        """Write a template that `check` accepted. Call this in a transaction, after `limits.bounds.check_room`.

        Raises Conflict `template_exists` if the version exists. Raises Conflict `template_version_used` for a version
        that was deleted, or that is older than a deleted version. The reason: a run names the version of its template,
        and a repetition of the run must not find other content under the same version.
        """
        deleted_version = await connection.fetchval(
            "SELECT version FROM template_deletion WHERE tenant_id = $1 AND type = $2", tenant_id, template.type
        )
        if deleted_version is not None and template.version <= deleted_version:
            raise Conflict(
                "template_version_used",
                f"Version {deleted_version} was deleted. It cannot be written again: write a later version.",
            )
        try:
            await connection.execute(
                "INSERT INTO template (tenant_id, type, version, enabled, declaration) VALUES ($1, $2, $3, $4, $5)",
                tenant_id,
                template.type,
                template.version,
                template.enabled,
                template.model_dump(mode="json"),
            )
        except asyncpg.UniqueViolationError:
            raise Conflict(
                "template_exists", "This version exists. Versions do not change: write a new version."
            ) from None

    def _check_handler(self, handler: str) -> None:
        """Raises Invalid for a handler that templates may not name. Such a handler is unknown, or its pipeline is not
        offered, or its step is isolated, a part (which needs an item of the step that fans out) or external (no worker
        has the step's code).
        """
        pipeline = self.pipelines.find(handler.rpartition(".")[0])
        step = self._step_of(handler) if pipeline is not None and pipeline.terms.offered else None
        if step is None or step.isolated or step.part or step.external:
            raise Invalid("unknown_worker_type", f"No handler {handler!r} is offered to templates.")

    def _step_of(self, handler: str) -> Step | None:
        """The step that declares this handler (`pipeline.step`). None: the code of this process has no such step."""
        pipeline_name, _, name = handler.rpartition(".")
        pipeline = self.pipelines.find(pipeline_name)
        return None if pipeline is None else pipeline.by_name.get(name)

    def _check_workflows(self, pipeline: Pipeline) -> None:
        """Raises Invalid for a pipeline with two workflows. A run has one journal, so the second workflow would mistake
        the results of the first workflow's calls for results of its own calls.
        """
        declared_steps = [step if step.handler is None else self._step_of(step.handler) for step in pipeline.steps]
        if sum(step is not None and step.workflow for step in declared_steps) > 1:
            raise Invalid(
                "two_workflows",
                "Two steps of the template are workflows, and a run has one journal. Name one workflow that starts the"
                " others (ctx.start).",
            )

    def _check_queue(self, queue: str) -> None:
        """Raises Invalid for a queue in which no step of a tenant's template may run."""
        if queue in self._reserved_queues:
            raise Invalid(
                "queue_reserved",
                f"The queue {queue!r} is for the platform's own steps. Leave `queue` out, or name another queue that "
                "workers serve.",
            )

    async def enable(
        self, connection: Connection, tenant_id: str, template_type: str, version: int, *, enabled: bool
    ) -> None:
        """Enable or disable a version. Raises NotFound. Raises Conflict for a template in code, because it is always
        enabled.
        """
        if self.declared_in_code(template_type) is not None:
            raise Conflict("template_reserved", "Templates that code declares are always enabled.")
        if not await connection.fetchval(
            "UPDATE template SET enabled = $4 WHERE tenant_id = $1 AND type = $2 AND version = $3 RETURNING true",
            tenant_id,
            template_type,
            version,
            enabled,
        ):
            raise NotFound("template_not_found", "There is no such template.")

    async def delete(self, connection: Connection, tenant_id: str, template_type: str, version: int) -> None:
        """Delete a version that nothing uses. Call this in a transaction, after `limits.bounds.lock_additions` for
        templates and for schedules. No lock stops a run of this version that is submitted at the same moment. Workers
        carry out such a run without its template, but nobody can retry or repeat the run.

        Raises NotFound. Raises Conflict `template_in_use` or, for a template in code, Conflict `template_reserved`.
        """
        if self.declared_in_code(template_type) is not None:
            raise Conflict("template_reserved", "A template that code declares is deleted with its code.")
        row = await connection.fetchrow(_USES, tenant_id, template_type, version)
        if row is None:
            raise NotFound("template_not_found", "There is no such template.")
        if row["scheduled"]:
            raise Conflict("template_in_use", "A schedule runs this version: delete the schedule first.")
        if row["unfinished"]:
            raise Conflict("template_in_use", "Runs of this version are unfinished: disable it first.")
        await connection.execute(_DELETE, tenant_id, template_type, version)

    async def page(
        self,
        connection: Connection,
        tenant_id: str,
        template_type: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        limit: int,
    ) -> TemplatePage:
        """One page of the versions of all templates, or of the template `template_type`. `after`: the type and version
        of the last entry of the previous page.
        """
        rows = await connection.fetch(_PAGE, tenant_id, template_type, *(after or (None, None)), limit + 1)
        last_key = ("", 0) if after is None else _sort_key(*after)
        # Sort key -> version; None: a version that this release cannot read.
        versions: dict[tuple[str, int], TemplateVersion | None] = {
            _sort_key_of(version): version
            for version in self.all_declared_in_code()
            if template_type in (None, version.template.type) and _sort_key_of(version) > last_key
        }
        for row in rows:  # a version in code takes precedence over a tenant's version of the same type and number
            versions.setdefault(_sort_key(row["type"], row["version"]), _read_or_leave_out(tenant_id, row))
        keys = sorted(versions)
        page_keys = keys[:limit]
        readable_versions = [version for key in page_keys if (version := versions[key]) is not None]
        if len(keys) <= limit:
            return TemplatePage(readable_versions, None)
        type_of_last, negative_version = page_keys[-1]
        return TemplatePage(readable_versions, (type_of_last, -negative_version))


#: Whether something uses a version. In this statement and the next: $1 the tenant, $2 the type, $3 the version.
#: `scheduled`: a schedule needs this version. A schedule that names no version runs the newest enabled version, so it
#: needs this version if no other version is enabled. `unfinished`: runs of this version have not ended.
_USES = """
-- template_used
SELECT EXISTS (SELECT FROM schedule s WHERE s.tenant_id = $1 AND s.template = $2
               AND CASE WHEN s.version IS NULL
                        THEN NOT EXISTS (SELECT FROM template other WHERE other.tenant_id = $1 AND other.type = $2
                                         AND other.version <> $3 AND other.enabled)
                        ELSE s.version = $3 END) AS scheduled,
       EXISTS (SELECT FROM job j JOIN run r ON r.job_id = j.id
               WHERE j.tenant_id = $1 AND j.pipeline = $2 AND j.finished_at IS NULL AND r.version = $3) AS unfinished
FROM template t WHERE t.tenant_id = $1 AND t.type = $2 AND t.version = $3
"""

#: `template_deletion` has a row for each type, with its newest deleted version. A new version must have a higher
#: number.
_DELETE = """
-- template_delete
WITH deleted_version AS (
    DELETE FROM template WHERE tenant_id = $1 AND type = $2 AND version = $3 RETURNING tenant_id, type, version
)
INSERT INTO template_deletion AS deletion (tenant_id, type, version)
SELECT tenant_id, type, version FROM deleted_version
ON CONFLICT (tenant_id, type) DO UPDATE SET version = greatest(deletion.version, excluded.version)
"""

#: $1 the tenant, $2 the type to list (NULL: all types), $3 and $4 the type and version of the last entry of the
#: previous page, $5 the most rows. PostgreSQL compares types by their bytes (COLLATE "C"), as Python does.
_PAGE = """
-- template_page
SELECT type, version, declaration, enabled FROM template
WHERE tenant_id = $1 AND ($2::text IS NULL OR type = $2)
  AND ($3::text IS NULL OR type COLLATE "C" > $3 OR (type = $3 AND version < $4::int))
ORDER BY type COLLATE "C", version DESC LIMIT $5
"""


def _sort_key(template_type: str, version: int) -> tuple[str, int]:
    """The sort key of a version. Lists are sorted by type, and have newer versions of a type first."""
    return template_type, -version


def _sort_key_of(version: TemplateVersion) -> tuple[str, int]:
    return _sort_key(version.template.type, version.template.version)


def _read_or_leave_out(tenant_id: str, row: Any) -> TemplateVersion | None:
    """The version in the row. None: this release cannot read it, so the list leaves it out."""
    try:
        template = _read(row["declaration"])
    except Conflict as error:
        log.warning(
            "a template is left out of a list",
            tenant_id=tenant_id, template=row["type"], version=row["version"], code=error.code,
        )  # fmt: skip
        return None
    return TemplateVersion(template, template.pipeline(), enabled=row["enabled"], in_code=False)


def template_not_found() -> NotFound:
    return NotFound("template_not_found", "There is no such template, or no version of it is enabled.")


def _read(declaration: Any) -> Template:
    """The template of a row. Raises Conflict `template_unreadable` if this release cannot read the row, because a
    person changed it, or because it was written by a release that allowed more.
    """
    try:
        return Template.model_validate(declaration)
    except (ValidationError, ValueError, TypeError, RecursionError):
        raise Conflict(
            "template_unreadable", "This version of the template cannot be read by this release: write a new version."
        ) from None
