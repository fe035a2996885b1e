"""/v1/templates: clients read templates, write and delete versions of a template, and enable or disable them.

The lists include templates that are declared in code, which clients cannot change. `kind` in a path is the template's
`type`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import RUNS_READ, TEMPLATES_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import VersionCursor, cursor_of_version, version_of_cursor
from leasehold.api.http.idempotent import Answer, IdempotencyKey, is_repeated, key_has_expired, once
from leasehold.api.http.openapi import TOO_MANY_CHECKS, problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Conflict
from leasehold.domain.json_values import MAX_SMALLINT, Flag
from leasehold.domain.template import Template
from leasehold.evaluation.templates import TemplatePage, TemplateVersion, template_not_found
from leasehold.limits.bounds import check_room, lock_additions

router = APIRouter(tags=["templates"], prefix="/v1/templates", route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(TEMPLATES_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]
Version = Annotated[int, Path(ge=1, le=MAX_SMALLINT)]


Limit = Annotated[int, Query(ge=1, le=1000)]
# The problems that both lists may answer.
_PAGES = problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"})


class Enabling(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enabled: Flag


# A version of a template, as the API shows it.
def _answer(template_version: TemplateVersion) -> dict[str, Any]:
    source = "code" if template_version.in_code else "api"
    # `warnings=False`: a template in code is built without validation (`template_of_pipeline`), and Pydantic would warn
    # about the types of its values.
    return template_version.template.model_dump(mode="json", warnings=False) | {
        "enabled": template_version.enabled,
        "source": source,
    }


def _list_response(page: TemplatePage) -> Response:
    next_cursor = None if page.next_after is None else cursor_of_version(*page.next_after)
    return json_response({"templates": [_answer(version) for version in page.versions], "next_cursor": next_cursor})


@router.post(
    "",
    operation_id="createTemplate",
    summary="Write a version of a template",
    status_code=201,
    responses=problems({
        HTTPStatus.CONFLICT: "`template_exists`, `template_version_used`: this version or a later version was deleted; "
        "`template_reserved`, `too_many_templates`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`unknown_worker_type`, `queue_reserved`, `two_workflows`, "
        "`schema_too_complex`, `invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: TOO_MANY_CHECKS,
    }),
)  # fmt: skip
async def create_template(
    request: Request, body: Template, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    # The check is slow, so it comes before the transaction. A repeated request needs no check, because it gets the
    # stored answer.
    is_checked = not await is_repeated(services.pool, caller.tenant_id, idempotency_key)
    if is_checked:
        await services.templates.check(caller.tenant_id, body)

    async def work(connection: Connection) -> Answer:
        if not is_checked:  # the request was repeated, but its stored answer has just expired
            raise key_has_expired()
        await check_room(connection, "template", caller.tenant_id, services.settings.templates_per_tenant)
        await services.templates.write(connection, caller.tenant_id, body)
        await record(connection, caller, "template.written", f"{body.type}/{body.version}", enabled=body.enabled)
        template_version = TemplateVersion(body, body.pipeline(), enabled=body.enabled, in_code=False)
        return Answer(HTTPStatus.CREATED, encoded(_answer(template_version)))

    request_hash = fingerprint(b"POST /v1/templates", body.model_dump_json().encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    location = {"Location": f"/v1/templates/{body.type}/{body.version}"}
    return json_response(answer.body, answer.status_code, location)


@router.get(
    "",
    operation_id="listTemplates",
    summary="List the versions of all templates, by type",
    responses=_PAGES,
)
async def list_templates(
    request: Request, caller: Reader, cursor: VersionCursor = None, limit: Limit = 1000
) -> Response:
    services = services_of(request)
    after = version_of_cursor(cursor)
    async with services.pool.acquire() as connection:
        page = await services.templates.page(connection, caller.tenant_id, after=after, limit=limit)
    return _list_response(page)


@router.get(
    "/{kind}",
    operation_id="listTemplateVersions",
    summary="List the versions of a template, the newest first",
    responses=_PAGES | problems({HTTPStatus.NOT_FOUND: "`template_not_found`"}),
)
async def list_versions(
    request: Request, kind: str, caller: Reader, cursor: VersionCursor = None, limit: Limit = 1000
) -> Response:
    services = services_of(request)
    after = version_of_cursor(cursor)
    async with services.pool.acquire() as connection:
        page = await services.templates.page(connection, caller.tenant_id, kind, after=after, limit=limit)
        # A page leaves out versions that this release cannot read. So it can be empty although the template exists.
        if (
            not page.versions
            and after is None
            and not await services.templates.exists(connection, caller.tenant_id, kind)
        ):
            raise template_not_found()
    return _list_response(page)


@router.get(
    "/{kind}/{version}",
    operation_id="getTemplate",
    summary="Get a version of a template",
    responses=problems({HTTPStatus.NOT_FOUND: "`template_not_found`", HTTPStatus.CONFLICT: "`template_unreadable`"}),
)
async def get_template(request: Request, kind: str, version: Version, caller: Reader) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        return json_response(_answer(await services.templates.find(connection, caller.tenant_id, kind, version)))


@router.patch(
    "/{kind}/{version}",
    operation_id="enableTemplate",
    summary="Enable or disable a version",
    description="Nothing else of a version can change. Existing runs go on; new runs of a disabled version are "
    "refused. A version that this release cannot read can be disabled, and not enabled; its answer has only `type`, "
    "`version`, `enabled` and `source`.",
    responses=problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_reserved`: it is declared in code; `template_unreadable`",
    }),
)  # fmt: skip
async def enable_template(request: Request, kind: str, version: Version, body: Enabling, caller: Writer) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection, connection.transaction():
        await services.templates.enable(connection, caller.tenant_id, kind, version, enabled=body.enabled)
        try:
            answer = _answer(await services.templates.find(connection, caller.tenant_id, kind, version))
        except Conflict:  # the version is unreadable, and disabling must always be possible
            if body.enabled:
                raise
            answer = {"type": kind, "version": version, "enabled": False, "source": "api"}
        action = "template.enabled" if body.enabled else "template.disabled"
        await record(connection, caller, action, f"{kind}/{version}")
        return json_response(answer)


@router.delete(
    "/{kind}/{version}",
    operation_id="deleteTemplate",
    summary="Delete a version that nothing uses",
    description="Runs that have ended stay, and can no longer be retried or repeated. A deleted version, and the "
    "versions before it, can never be written again.",
    status_code=204,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_in_use`: a schedule or an unfinished run uses it; `template_reserved`: it is "
        "declared in code",
    }),
)  # fmt: skip
async def delete_template(request: Request, kind: str, version: Version, caller: Writer) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection, connection.transaction():
        # Until the commit, these locks prevent others from writing the version again, and from adding a schedule that
        # uses it.
        await lock_additions(connection, "template", caller.tenant_id)
        await lock_additions(connection, "schedule", caller.tenant_id)
        await services.templates.delete(connection, caller.tenant_id, kind, version)
        await record(connection, caller, "template.deleted", f"{kind}/{version}")
    return Response(status_code=HTTPStatus.NO_CONTENT)
