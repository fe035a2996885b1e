"""The console's pages of templates, with their versions, steps and schemas. On them a person enables, disables and
deletes a version. In the addresses, `kind` is the name of the template.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import RUNS_READ, TEMPLATES_WRITE
from leasehold.api.console.once import Outcome, act_once, new_form_token
from leasehold.api.console.rendering import content_of, go_to, page
from leasehold.api.console.routes import Fields
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import VersionCursor
from leasehold.api.process.keyring import Caller
from leasehold.api.runs import templates as endpoints

router = APIRouter()
# The person who is signed in, by the scope that a page demands.
Reader = Annotated[Caller, Depends(SignedIn(RUNS_READ))]
Writer = Annotated[Caller, Depends(SignedIn(TEMPLATES_WRITE))]
#: The number of templates on a page.
_PAGE = 100


@router.get("/templates")
async def show_templates(request: Request, caller: Reader, cursor: VersionCursor = None) -> Response:
    answer = content_of(await endpoints.list_templates(request, caller, cursor, _PAGE))
    return page(
        request, "templates.html", templates=answer["templates"], next_cursor=answer["next_cursor"], cursor=cursor
    )


@router.get("/templates/{kind}/{version}")
async def show_template(request: Request, kind: str, version: endpoints.Version, caller: Reader) -> Response:
    template = content_of(await endpoints.get_template(request, kind, version, caller))
    # `once` is for the form that deletes the version. With it, a second press of the button gets the first answer.
    return page(request, "template.html", template=template, once=new_form_token())


@router.post("/templates/{kind}/{version}/enable")
async def enable(request: Request, kind: str, version: endpoints.Version, caller: Writer, form: Fields) -> Response:
    enabled = form.get("enabled") == "true"
    await endpoints.enable_template(request, kind, version, endpoints.Enabling(enabled=enabled), caller)
    sentence = f"Version {version} is {'enabled' if enabled else 'disabled: new runs of it are refused'}."
    return go_to(request, f"/templates/{kind}/{version}", sentence)


@router.post("/templates/{kind}/{version}/delete")
async def delete(request: Request, kind: str, version: endpoints.Version, caller: Writer, form: Fields) -> Response:
    async def act() -> Outcome:
        await endpoints.delete_template(request, kind, version, caller)
        return Outcome("/templates", f"Version {version} of {kind} is deleted.")

    return await act_once(request, caller, form, act)
