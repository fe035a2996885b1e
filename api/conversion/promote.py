"""POST /api/v1/jobs/{job_id}/promote: copies the requested artifacts of a conversion to the promotion target, all or
none. An installation serves its models from the promotion target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.audit import AuditedRequire, log_access, record
from leasehold.api.auth.security import CONVERSION_WRITE
from leasehold.api.conversion.rates import check_rate
from leasehold.api.conversion.result import ArtifactName, finished_artifacts
from leasehold.api.conversion.view import file_name_of
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.process import deadline
from leasehold.api.process.best_effort import best_effort
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import audit
from leasehold.db.audit import AuditFilter
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.json_values import Flag
from leasehold.pipelines.conversion import rows as conversions
from leasehold.pipelines.conversion.promotion import ownership as promotions
from leasehold.pipelines.conversion.promotion.copying import Copy, Promoter
from leasehold.pipelines.conversion.promotion.ownership import PromoteCall
from leasehold.pipelines.conversion.promotion.targets import open_target
from leasehold.runtime.transient import until_answered

router = APIRouter(tags=["conversion"], route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(AuditedRequire(CONVERSION_WRITE))]

#: One part of a key, as a pattern. The parts are separated by `/`.
_KEY_PART = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_MAX_KEY_CHARACTERS = 512
#: The name of a promotion in the audit.
_PROMOTED = "job.promoted"
#: A request whose promotion has failed ends its claim of the job. If PostgreSQL does not answer, the request tries this
#: again for up to _GIVE_UP_SECONDS.
_GIVE_UP_SECONDS = 10.0


#: An artifact to copy, and its key at the promotion target.
class Target(BaseModel):
    model_config = ConfigDict(extra="forbid")

    artifact: ArtifactName = "nef"
    key: str | None = Field(
        None,
        max_length=_MAX_KEY_CHARACTERS,
        pattern=f"^{_KEY_PART}(/{_KEY_PART})*$",
        description="The key below the tenant's own folder: parts of letters, digits, `.`, `_` and `-`, separated by "
        "`/`. Default: `{job_id}/out.<artifact>`.",
    )
    replace: Flag | None = Field(None, description="Default: the `replace` of the request.")


class PromoteRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"targets": [{"artifact": "nef", "key": "models/40000/0001/out.nef"}]}]},
    )

    targets: list[Target] = Field(min_length=1, max_length=8)
    replace: Flag = Field(
        False, description="Overwrite objects that the same tenant promoted to these keys before, and no other objects."
    )


class Promoted(BaseModel):
    job_id: UUID
    promoted: bool = True
    promoted_object_keys: list[str]


@router.post(
    "/api/v1/jobs/{job_id}/promote",
    operation_id="promoteConversion",
    summary="Copy results to where models are served from",
    description="All targets (200) or none (502). A repeated request copies nothing again. Keys begin with the "
    "tenant's own folder at the target, and `promoted_object_keys` names them in full.",
    response_model=Promoted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`job_not_found`",
        HTTPStatus.CONFLICT: "`not_ready`, `promotion_in_progress`, `already_promoted` (to other keys, or other "
        "artifacts), `target_exists`",
        HTTPStatus.GONE: "`expired`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `targets_not_distinct`",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`",
        HTTPStatus.BAD_GATEWAY: "`promotion_failed`, `token_refused`, `token_endpoint_unavailable`",
        HTTPStatus.SERVICE_UNAVAILABLE: "`promotion_not_configured`",
    }),
)  # fmt: skip
async def promote_conversion(request: Request, job_id: UUID, body: PromoteRequest, caller: Writer) -> Promoted:
    services = services_of(request)
    await check_rate(services, caller, "posts")
    artifacts = await finished_artifacts(services, caller, job_id, tuple(target.artifact for target in body.targets))
    copies = [
        Copy(
            key=f"{promotions.folder_of(caller.tenant_id)}/{target.key or f'{job_id}/{file_name_of(target.artifact)}'}",
            source=artifact["key"],
            size=artifact["size"],
            replace=body.replace if target.replace is None else target.replace,
        )
        for target, artifact in zip(body.targets, artifacts, strict=True)
    ]
    keys = [copy.key for copy in copies]
    if len(set(keys)) != len(keys):
        raise Invalid("targets_not_distinct", "Two targets have the same key.")
    artifacts_by_key = {key: target.artifact for key, target in zip(keys, body.targets, strict=True)}
    async with services.pool.acquire() as connection:
        # Claim the promotion of this job for this request. `call` is this claim. `earlier_changes`: the changes at the
        # target by earlier requests whose process died. `Promoter` undoes these changes first.
        call_and_changes = await promotions.begin(connection, caller.tenant_id, job_id)
    if call_and_changes is None:
        return await _answer_without_call(services, caller, job_id, keys, artifacts_by_key)
    call, earlier_changes = call_and_changes
    # End the request's deadline; each statement keeps its own limit. If the call fails, its copies must be undone, even
    # if waits for PostgreSQL have already used up the whole deadline.
    deadline.current().lift()

    async def record_promotion(connection: Connection) -> None:
        # A repeated request reads `artifacts` from the audit (`_promoted_artifacts`), because the row of the conversion
        # has only the keys.
        artifacts = [target.artifact for target in body.targets]
        await record(connection, caller, _PROMOTED, job_id, kind="conversion", keys=keys, artifacts=artifacts)

    try:
        async with open_target(services.settings, services.store) as target:
            await Promoter(services.pool.acquire, services.store, target).promote(
                call, earlier_changes, copies, record_promotion
            )
    except BaseException:
        await asyncio.shield(_give_up(services, call))
        log_access("promote.failed", request, caller, job_id=str(job_id))
        raise
    return Promoted(job_id=job_id, promoted_object_keys=keys)


async def _answer_without_call(
    services: Services, caller: Caller, job_id: UUID, keys: list[str], artifacts_by_key: Mapping[str, str]
) -> Promoted:
    """The answer to a request that could not claim the job's promotion, because another request has claimed it. If the
    other request has promoted the same artifacts to the same keys, its result is the answer. Raises Conflict if the
    other request has promoted other artifacts, has used other keys, or has not finished. Raises NotFound if there is no
    such conversion.
    """
    async with services.pool.acquire() as connection:
        row = await conversions.find(connection, caller.tenant_id, job_id)
        promoted_artifacts = await _promoted_artifacts(connection, caller.tenant_id, job_id)
    if row is None:
        raise NotFound("job_not_found", "There is no such conversion.")
    if row["promoted"] is None:
        raise promotions.in_progress()
    has_other_artifacts = promoted_artifacts is not None and promoted_artifacts != artifacts_by_key
    if set(row["promoted"]) != set(keys) or has_other_artifacts:
        raise Conflict("already_promoted", "The conversion was promoted to other keys, or with other artifacts.")
    return Promoted(job_id=job_id, promoted_object_keys=row["promoted"])


async def _promoted_artifacts(connection: Connection, tenant_id: str, job_id: UUID) -> Mapping[str, str] | None:
    """The artifact at each key of the job's promotion, from the audit. Returns None if the audit does not know the
    artifacts. There are two reasons. An earlier release, which did not record them, has promoted the job. Or the tenant
    has moved here from another cell (another installation), and the audit of that cell stayed there.
    """
    rows = await audit.page(connection, AuditFilter(tenant_id, action=_PROMOTED, target=str(job_id)), None, 1)
    details = orjson.loads(rows[0]["details"]) if rows else {}
    return dict(zip(details["keys"], details["artifacts"], strict=True)) if "artifacts" in details else None


async def _give_up(services: Services, call: PromoteCall) -> None:
    """End the call's claim of the job. If an outage prevents this, the claim ends with its lease, and a worker undoes
    the copies.
    """

    async def give_up() -> None:
        async with services.pool.acquire() as connection:
            await promotions.give_up(connection, call)

    with best_effort("ends of promotions"):
        await until_answered(give_up, within=_GIVE_UP_SECONDS)
