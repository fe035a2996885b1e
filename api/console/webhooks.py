"""The pages of webhooks: their URLs, and their deliveries with the answers.

On these pages a person sends a test message, delivers a message again, and enables or disables a webhook.
"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import WEBHOOKS_WRITE
from leasehold.api.console.rendering import content_of, form_idempotency_key, go_to, page
from leasehold.api.console.routes import Fields
from leasehold.api.console.session import SignedIn
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.runs import webhooks as endpoints
from leasehold.domain.errors import NotFound

router = APIRouter()
#: The signed-in person, whose key or role has the scope `webhooks:write`.
Owner = Annotated[Caller, Depends(SignedIn(WEBHOOKS_WRITE))]
#: The page of a webhook shows at most this many of its latest deliveries.
_MAX_DELIVERIES = 50


@router.get("/webhooks")
@may_read_standby
async def show_webhooks(request: Request, caller: Owner) -> Response:
    return page(request, "webhooks.html", webhooks=await _list_webhooks(request, caller))


async def _list_webhooks(request: Request, caller: Caller) -> list[dict[str, Any]]:
    answer: dict[str, Any] = content_of(await endpoints.list_webhooks(request, caller))
    webhooks: list[dict[str, Any]] = answer["webhooks"]
    return webhooks


@router.get("/webhooks/{webhook_id}")
@may_read_standby
async def show_webhook(request: Request, webhook_id: UUID, caller: Owner) -> Response:
    webhooks = await _list_webhooks(request, caller)
    webhook = next((webhook for webhook in webhooks if webhook["id"] == str(webhook_id)), None)
    if webhook is None:
        raise NotFound("webhook_not_found", "There is no such webhook.")
    answer = content_of(await endpoints.list_deliveries(request, webhook_id, caller, _MAX_DELIVERIES + 1))
    deliveries = answer["deliveries"]
    # `once` is the idempotency key of the page's forms. It depends on the minute and on the newest delivery. A message
    # that a person sends becomes the newest delivery, so the person can send another message within the same minute.
    newest = deliveries[0]["id"] if deliveries else ""
    return page(
        request,
        "webhook.html",
        refresh_seconds=5,
        refresh_url=request.url.path,
        webhook=webhook,
        deliveries=deliveries[:_MAX_DELIVERIES],
        has_more=len(deliveries) > _MAX_DELIVERIES,
        max_deliveries=_MAX_DELIVERIES,
        once=form_idempotency_key(request, "send", str(webhook_id), newest),
    )


@router.post("/webhooks/{webhook_id}/test")
async def send_test(request: Request, webhook_id: UUID, caller: Owner, form: Fields) -> Response:
    await endpoints.send_test(request, webhook_id, caller, form.get("once") or None)
    return go_to(request, f"/webhooks/{webhook_id}", "A test message is on its way.")


@router.post("/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver")
async def redeliver(request: Request, webhook_id: UUID, delivery_id: UUID, caller: Owner, form: Fields) -> Response:
    # The field `once` is the same for all deliveries of the page. But each delivery needs a different idempotency key.
    idempotency_key = f"{form['once']}-{delivery_id}" if form.get("once") else None
    await endpoints.redeliver(request, webhook_id, delivery_id, caller, idempotency_key)
    return go_to(request, f"/webhooks/{webhook_id}", "The message is on its way again.")


@router.post("/webhooks/{webhook_id}/enable")
async def enable(request: Request, webhook_id: UUID, caller: Owner, form: Fields) -> Response:
    enabled = form.get("enabled") == "true"
    await endpoints.change_webhook(request, webhook_id, endpoints.Changes(enabled=enabled), caller)
    return go_to(request, f"/webhooks/{webhook_id}", f"The webhook is {'enabled' if enabled else 'disabled'}.")
