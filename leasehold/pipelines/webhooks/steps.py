"""The handler of the pipeline `webhook`: it sends one signed message to a client's webhook, or to a callback URL."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import time
from typing import Any

import orjson

from leasehold.domain.attempt import Attempt
from leasehold.domain.backoff import delay_after, delay_after_answer
from leasehold.domain.errors import Permanent, Retryable, StepError
from leasehold.domain.verdicts import Snooze
from leasehold.pipelines.webhooks.context import DeliveryContext, open_delivery_context
from leasehold.pipelines.webhooks.pipeline import Delivery, webhooks
from leasehold.security.egress import Answer, EgressFailed, EgressRefused, shown_host
from leasehold.security.signing import new_secret, signature
from leasehold.transitions import callbacks
from leasehold.transitions import webhooks as transitions

_STATUS_GONE = 410
#: The pauses of a delivery while its tenant or its host has the maximum of requests under way. A pause costs no
#: attempt.
_SNOOZE_LADDER = tuple(timedelta(seconds=seconds) for seconds in (1, 2, 4, 8, 15, 30))

webhooks.opens(open_delivery_context)


@webhooks.handles("deliver")
async def deliver(attempt: Attempt) -> dict[str, Any] | Snooze:
    """Send the message. After an answer 2xx the message is delivered. After 410 the delivery has failed for good, and
    its webhook is disabled. After any other answer, even a redirect, the step is retried. The step is also retried
    while the webhook is disabled. While the tenant or the host has too many deliveries under way, the step snoozes.
    """
    delivery: Delivery = attempt.params
    delivery_context: DeliveryContext = attempt.opened
    destination = await _find_destination(delivery_context, attempt, delivery)
    if destination is None:
        return {"delivered": False, "because": "the webhook is deleted"}
    host = (shown_host(destination.url) or "").removesuffix(".")  # `example.com.` is the same host as `example.com`
    # `_send` adds the DNS lookups of the host. A lookup may run on in its thread after the request has ended. The
    # delivery counts at its limits until all lookups have ended.
    lookups: list[Future[Any]] = []
    with delivery_context.limits.try_acquire(tenant=attempt.tenant_id, host=host, lookups=lookups) as acquired:
        if not acquired:
            return await _snooze(attempt)
        answer = await _send(delivery_context, attempt, destination, orjson.dumps(delivery.event), lookups)
    if answer.status == _STATUS_GONE:
        raise await _error_after_gone(attempt, delivery, destination)
    if 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP statuses
        return {"delivered": True, "status": answer.status}
    delay = delay_after_answer(answer.retry_after(), attempt.errors + 1, webhooks.by_name["deliver"].retry_ladder)
    raise Retryable(f"the address answered {answer.status}", code="webhook_refused", after=delay)


@dataclass(frozen=True, slots=True)
class _Destination:
    """The URL of a message, and the secrets that sign it. The message gets one signature for each secret.
    `disabled_at`: when the webhook, which is enabled now, was last disabled; None: the webhook was never disabled, or
    the URL is a callback URL.
    """

    url: str
    sealed_secrets: Sequence[bytes]
    disabled_at: datetime | None = None


async def _find_destination(
    delivery_context: DeliveryContext, attempt: Attempt, delivery: Delivery
) -> _Destination | None:
    """Read the URL and the secrets. A delivery without `webhook_id` goes to the callback URL of a job. Returns None if
    the webhook is deleted, because then nobody waits for the message. Raises Retryable `webhook_disabled` if the
    webhook is disabled, because somebody may enable it again.
    """
    async with attempt.connection() as connection:
        if delivery.webhook_id is None:
            assert delivery.url is not None
            sealing = delivery_context.sealing
            # All callback URLs of a tenant use the tenant's secrets. If the tenant has no secret yet, `secrets` stores
            # a new one.
            sealed_secrets = await callbacks.secrets(connection, attempt.tenant_id, lambda: sealing.seal(new_secret()))
            return _Destination(delivery.url, sealed_secrets)
        row = await transitions.find(connection, delivery.webhook_id, attempt.tenant_id)
    if row is None:
        return None
    if not row["enabled"]:
        raise Retryable("The webhook is disabled.", code="webhook_disabled")
    return _Destination(row["url"], row["secrets"], row["disabled_at"])


async def _error_after_gone(attempt: Attempt, delivery: Delivery, destination: _Destination) -> StepError:
    """Disable the webhook after an answer 410, which means that the address must get no further message. Returns the
    error that the step must raise. Exception: during the request the webhook's URL may have changed, or somebody may
    have disabled the webhook (and perhaps enabled it again). Then the answer says nothing about the webhook as it is
    now. So this function disables nothing, and the next attempt sends the message again.
    """
    if delivery.webhook_id is None:
        return Permanent("callback_gone", "The callback URL answered 410 Gone.")
    reason = "its address answered 410 Gone"
    async with attempt.connection() as connection:
        was_disabled = await transitions.disable(
            connection, delivery.webhook_id, attempt.tenant_id, destination.url, destination.disabled_at, reason
        )
    if not was_disabled:
        return Retryable(
            "the address answered 410 Gone, and the webhook was changed or disabled during the request",
            code="webhook_url_changed",
        )
    return Permanent("webhook_gone", "The address answered 410 Gone; the webhook is disabled.")


async def _snooze(attempt: Attempt) -> Snooze:
    """Snooze the delivery. Each snooze is longer than the previous one, up to the last pause of _SNOOZE_LADDER, so that
    a long queue of deliveries costs few claims.
    """
    snoozes = (await attempt.note()).get("snoozes", 0) + 1
    return Snooze(delay_after(snoozes, _SNOOZE_LADDER), {"snoozes": snoozes})


async def _send(
    delivery_context: DeliveryContext,
    attempt: Attempt,
    destination: _Destination,
    body: bytes,
    lookups: list[Future[Any]],
) -> Answer:
    # `params.message`: the id of the first delivery, if this delivery repeats it; None: this is the first delivery.
    message_id, timestamp = f"msg_{attempt.params.message or attempt.job_id}", int(time())
    secrets = [delivery_context.sealing.open(secret) for secret in destination.sealed_secrets]
    headers = {
        "content-type": "application/json",
        "user-agent": "leasehold-webhooks",
        "webhook-id": message_id,  # the same for every try of this message
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secrets, message_id, timestamp, body),
    }
    try:
        return await delivery_context.egress.request(
            "POST",
            destination.url,
            headers=headers,
            content=body,
            timeout=delivery_context.seconds,
            reads_body=False,
            lookups=lookups,
        )
    except EgressRefused as error:
        if error.code == "host_unknown":  # DNS may work again later
            raise Retryable(str(error), code=error.code) from None
        raise Permanent(error.code, str(error)) from None
    except EgressFailed as error:
        raise Retryable(str(error), code="webhook_unreachable") from None
