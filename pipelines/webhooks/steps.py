"""Sending one message, signed, to an address that its client named."""

from __future__ import annotations

from datetime import timedelta
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import orjson

from leasehold.attempt import Attempt
from leasehold.database import connect
from leasehold.egress import Answer, Egress, EgressFailed, EgressRefused
from leasehold.errors import Permanent, Retryable
from leasehold.sealing import Sealing
from leasehold.settings import Settings
from leasehold.signing import signature
from leasehold.transitions import webhooks as transitions
from pipelines.webhooks.pipeline import Delivery, webhooks

_SECONDS = 20.0
_ANSWER_BYTES = 64 * 1024
_GONE = 410
_MOST_RETRY_AFTER = 86_400.0


@webhooks.handles("deliver")
async def deliver(attempt: Attempt) -> dict[str, Any]:
    """A 2xx is taken for received; 410 ends the webhook; anything else, redirects too, is tried again."""
    wanted: Delivery = attempt.params
    settings = Settings()
    connection = await connect(settings, "webhooks")
    try:
        row = await transitions.find(connection, wanted.webhook_id, attempt.tenant_id)
        if row is None or not row["enabled"]:
            return {"delivered": False, "because": "the webhook is gone or disabled"}
        answer = await _send(settings, attempt, row, orjson.dumps(wanted.event))
        if answer.status == _GONE:
            await transitions.disable(connection, wanted.webhook_id, attempt.tenant_id, "its address answered 410 Gone")
            raise Permanent("webhook_gone", "The address answered 410 Gone; the webhook is disabled.")
    finally:
        await connection.close()
    if 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP statuses
        return {"delivered": True, "status": answer.status}
    raise Retryable(f"the address answered {answer.status}", code="webhook_refused", after=_retry_after(answer))


async def _send(settings: Settings, attempt: Attempt, row: Any, body: bytes) -> Answer:
    sealing = Sealing(settings)
    message_id, now = f"msg_{attempt.job_id}", int(time())
    headers = {
        "content-type": "application/json",
        "user-agent": "leasehold-webhooks",
        "webhook-id": message_id,  # the same for every try of this message
        "webhook-timestamp": str(now),
        "webhook-signature": signature([sealing.open(secret) for secret in row["secrets"]], message_id, now, body),
    }
    try:
        async with Egress.from_settings(settings) as egress:
            return await egress.request(
                "POST", row["url"], headers=headers, content=body, max_bytes=_ANSWER_BYTES, timeout=_SECONDS
            )
    except EgressRefused as error:
        if error.code == "host_unknown":  # it may come back
            raise Retryable(str(error), code=error.code) from None
        raise Permanent(error.code, str(error)) from None
    except EgressFailed as error:
        raise Retryable(str(error), code="webhook_unreachable") from None


def _retry_after(answer: Answer) -> timedelta | None:
    """What the receiver asked for, within a day."""
    said = answer.headers.get("retry-after", "")
    if said.isdecimal():
        return timedelta(seconds=min(float(said), _MOST_RETRY_AFTER))
    try:
        seconds = parsedate_to_datetime(said).timestamp() - time()
    except (TypeError, ValueError):
        return None
    return timedelta(seconds=min(max(seconds, 0.0), _MOST_RETRY_AFTER))
