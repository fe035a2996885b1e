"""The handler of the pipeline `webhook`: it sends one signed message to the address of a client's webhook."""

from __future__ import annotations

from datetime import timedelta
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import urlsplit

import orjson

from leasehold.domain.attempt import Attempt
from leasehold.domain.backoff import delay_after
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Snooze
from leasehold.pipelines.webhooks.context import DeliveryContext, open_delivery_context
from leasehold.pipelines.webhooks.pipeline import Delivery, webhooks
from leasehold.security.egress import Answer, EgressFailed, EgressRefused
from leasehold.security.signing import signature
from leasehold.transitions import webhooks as transitions

_ANSWER_BYTES = 64 * 1024
_STATUS_GONE = 410
_MAX_RETRY_AFTER_SECONDS = 86_400.0
#: The pauses of a delivery whose tenant or host has reached its limit. Such a pause costs no attempt.
_SNOOZES = tuple(timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 15, 30))

webhooks.opens(open_delivery_context)


@webhooks.handles("deliver")
async def deliver(attempt: Attempt) -> dict[str, Any] | Snooze:
    """Send the message. The answer 2xx means that the receiver has the message, and 410 disables the webhook. After any
    other answer, also a redirect, the step is retried.
    """
    delivery: Delivery = attempt.params
    delivery_context: DeliveryContext = attempt.opened
    async with attempt.connection() as connection:
        row = await transitions.find(connection, delivery.webhook_id, attempt.tenant_id)
    if row is None or not row["enabled"]:
        return {"delivered": False, "because": "the webhook is deleted or disabled"}
    host = urlsplit(row["url"]).hostname or ""
    with delivery_context.shares.share(tenant=attempt.tenant_id, host=host) as has_share:
        if not has_share:
            return await _snoozed(attempt)
        answer = await _send(delivery_context, attempt, row, orjson.dumps(delivery.event))
    if answer.status == _STATUS_GONE:
        async with attempt.connection() as connection:
            await transitions.disable(
                connection, delivery.webhook_id, attempt.tenant_id, "its address answered 410 Gone"
            )
        raise Permanent("webhook_gone", "The address answered 410 Gone; the webhook is disabled.")
    if 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP statuses
        return {"delivered": True, "status": answer.status}
    raise Retryable(f"the address answered {answer.status}", code="webhook_refused", after=_retry_after(answer))


async def _snoozed(attempt: Attempt) -> Snooze:
    """Snooze the delivery, each time for longer, so that a long queue of deliveries costs few claims."""
    snoozes = (await attempt.note()).get("snoozes", 0) + 1
    return Snooze(delay_after(snoozes, _SNOOZES), {"snoozes": snoozes})


async def _send(delivery_context: DeliveryContext, attempt: Attempt, row: Any, body: bytes) -> Answer:
    message_id, now = f"msg_{attempt.params.message or attempt.job_id}", int(time())
    secrets = [delivery_context.sealing.open(secret) for secret in row["secrets"]]
    headers = {
        "content-type": "application/json",
        "user-agent": "leasehold-webhooks",
        "webhook-id": message_id,  # the same for every try of this message
        "webhook-timestamp": str(now),
        "webhook-signature": signature(secrets, message_id, now, body),
    }
    try:
        return await delivery_context.egress.request(
            "POST", row["url"], headers=headers, content=body, max_bytes=_ANSWER_BYTES, timeout=delivery_context.seconds
        )
    except EgressRefused as error:
        if error.code == "host_unknown":  # DNS may work again later
            raise Retryable(str(error), code=error.code) from None
        raise Permanent(error.code, str(error)) from None
    except EgressFailed as error:
        raise Retryable(str(error), code="webhook_unreachable") from None


def _retry_after(answer: Answer) -> timedelta | None:
    """The receiver's Retry-After, at most a day."""
    header = answer.headers.get("retry-after", "")
    if header.isdecimal():
        return timedelta(seconds=min(float(header), _MAX_RETRY_AFTER_SECONDS))
    try:
        seconds = parsedate_to_datetime(header).timestamp() - time()
    except (TypeError, ValueError, OverflowError):  # or a year that no clock can hold
        return None
    return timedelta(seconds=min(max(seconds, 0.0), _MAX_RETRY_AFTER_SECONDS))
