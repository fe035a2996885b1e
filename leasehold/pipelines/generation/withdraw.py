"""Telling a provider that nobody wants a generation any more: a job of its own, so that the word is not lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.states import JOB_TERMINAL
from leasehold.domain.verdicts import Snooze
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.pipeline import GenerationParams, Withdrawal, withdrawal
from leasehold.pipelines.generation.provider import OutcomeUnknown, Rejected, TryLater
from leasehold.pipelines.generation.provider_context import ProviderContext, open_provider_context, order_of

#: A submit that is under way when its job is cancelled is let finish.
_LOOK_AGAIN = timedelta(seconds=2)

withdrawal.opens(open_provider_context)


@withdrawal.handles("withdraw")
async def withdraw(attempt: Attempt) -> dict[str, Any] | Snooze:
    """Cancel at the provider what was bought, once it is known whether it was."""
    wanted: Withdrawal = attempt.params
    provider_context: ProviderContext = attempt.opened
    async with attempt.connection() as connection:
        bought = await generations.purchase(connection, wanted.job_id, attempt.tenant_id)
    if bought is None:
        return {"stopped": False, "because": "the generation is forgotten"}
    if bought.job_status not in JOB_TERMINAL:
        return Snooze(_LOOK_AGAIN)
    ref = (bought.submitted or {}).get("ref")
    if ref is None:
        return {"stopped": False, "because": "nothing was bought that is known of"}
    params = GenerationParams.model_validate(bought.params)
    provider, credential = provider_context.provider(params), provider_context.credential(params)
    try:
        stopped = await provider.cancel(ref, order_of(params, wanted.job_id, 1.0), credential)
    except Rejected as error:
        raise Permanent(error.code, error.message) from None
    except (TryLater, OutcomeUnknown) as error:
        raise Retryable(error.message, code=error.code) from None
    return {"stopped": stopped, "because": "asked to" if stopped else "the provider cannot stop it"}
