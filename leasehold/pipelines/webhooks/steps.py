"""Sending one message, signed, to an address that its client named."""

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
_GONE = 410
_MAX_RETRY_AFTER = 86_400.0
#: A delivery whose tenant or host has enough under way comes again after these. It is no attempt.
_SNOOZES = tuple(timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 15, 30))

webhooks.opens(open_delivery_context)


@webhooks.handles("deliver")
async def deliver(attempt: Attempt) -> dict[str, Any] | Snooze:
    """A 2xx is taken for received; 410 ends the webhook; anything else, redirects too, is tried again."""
    wanted: Delivery = attempt.params
    delivery_context: DeliveryContext = attempt.opened
    async with attempt.connection() as connection:
        row = await transitions.find(connection, wanted.webhook_id, attempt.tenant_id)
    if row is None or not row["enabled"]:
        return {"delivered": False, "because": "the webhook is gone or disabled"}
    host = urlsplit(row["url"]).hostname or ""
    with delivery_context.shares.taken(tenant=attempt.tenant_id, host=host) as taken:
        if not taken:
            return await _snoozed(attempt)
        answer = await _send(delivery_context, attempt, row, orjson.dumps(wanted.event))
    if answer.status == _GONE:
        async with attempt.connection() as connection:
            await transitions.disable(connection, wanted.webhook_id, attempt.tenant_id, "its address answered 410 Gone")
        raise Permanent("webhook_gone", "The address answered 410 Gone; the webhook is disabled.")
    if 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP statuses
        return {"delivered": True, "status": answer.status}
    raise Retryable(f"the address answered {answer.status}", code="webhook_refused", after=_retry_after(answer))


async def _snoozed(attempt: Attempt) -> Snooze:
    """The longer, the more often it has come in vain: a long line of deliveries asks seldom."""
    snoozes = (await attempt.note()).get("snoozes", 0) + 1
    return Snooze(delay_after(snoozes, _SNOOZES), {"snoozes": snoozes})


async def _send(delivery_context: DeliveryContext, attempt: Attempt, row: Any, body: bytes) -> Answer:
    message_id, now = f"msg_{attempt.job_id}", int(time())
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
        if error.code == "host_unknown":  # it may come back
            raise Retryable(str(error), code=error.code) from None
        raise Permanent(error.code, str(error)) from None
    except EgressFailed as error:
        raise Retryable(str(error), code="webhook_unreachable") from None


def _retry_after(answer: Answer) -> timedelta | None:
    """What the receiver asked for, within a day."""
    said = answer.headers.get("retry-after", "")
    if said.isdecimal():
        return timedelta(seconds=min(float(said), _MAX_RETRY_AFTER))
    try:
        seconds = parsedate_to_datetime(said).timestamp() - time()
    except (TypeError, ValueError, OverflowError):  # some years are beyond the clock
        return None
    return timedelta(seconds=min(max(seconds, 0.0), _MAX_RETRY_AFTER))
