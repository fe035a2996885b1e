"""The handler of the pipeline `generation_withdrawal`: it cancels the order of a generation at the provider.

A job of this pipeline is a withdrawal. If a client cancels a generation, the API submits a withdrawal in the same
transaction, so that the request to the provider cannot be lost. If a generation reaches its deadline, its own step
`poll` cancels the order. `poll` submits a withdrawal only if the provider cannot be asked then, or does not answer. For
an expired generation, housekeeping (a maintenance loop of the workers) submits a withdrawal.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.backoff import delay_after_answer
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.states import JOB_TERMINAL
from leasehold.domain.verdicts import Snooze
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.pipeline import GenerationParams, Withdrawal, withdrawal
from leasehold.pipelines.generation.provider import NoAccess, OutcomeUnknown, Rejected, TryLater
from leasehold.pipelines.generation.provider_context import ProviderContext, open_provider_context, order_of

#: How long the step waits before it checks again whether the generation's job has ended. The job may need a while to
#: end, because its step `submit` may have been running when the client cancelled the job.
_CHECK_AGAIN = timedelta(seconds=2)

#: A worker opens the context once for all attempts of this pipeline. A handler finds it as `attempt.opened`.
withdrawal.opens(open_provider_context)


@withdrawal.handles("withdraw")
async def withdraw(attempt: Attempt) -> dict[str, Any] | Snooze:
    """Wait until the generation's job has ended, because only then it is certain whether there is an order. Then cancel
    the order at the provider.
    """
    params: Withdrawal = attempt.params
    provider_context: ProviderContext = attempt.opened
    async with attempt.connection() as connection:
        generation = await generations.withdrawn(connection, params.job_id, attempt.tenant_id, attempt.job_id)
    if generation is None:  # it is deleted, and had no order at the provider
        return {"stopped": False, "because": "the generation is deleted"}
    if generation.job_status not in JOB_TERMINAL:
        return Snooze(_CHECK_AGAIN)
    ref = (generation.submitted or {}).get("ref")  # the provider's id of the order
    if ref is None:
        # If a person finds the order later, the generation can adopt it, and the adoption submits another withdrawal.
        because = "it is unknown whether there is one" if generation.is_unknown else "no order at the provider is known"
        return {"stopped": False, "because": because}
    order_params = GenerationParams.model_validate(generation.params)
    try:
        provider, credential = provider_context.access(order_params)
        # `cancel` needs the description of the order, and a description must have a deadline. Here the deadline has no
        # meaning, so it is the shortest that is allowed, one second.
        stopped = await provider.cancel(ref, order_of(order_params, params.job_id, seconds_left=1.0), credential)
    except (NoAccess, OutcomeUnknown) as error:  # try again, because the order may go on, and cost money
        raise Retryable(error.message, code=error.code) from None
    except Rejected as error:
        raise Permanent(error.code, error.message) from None
    except TryLater as error:
        delay = delay_after_answer(error.after, attempt.errors + 1, withdrawal.by_name["withdraw"].retry_ladder)
        raise Retryable(error.message, code=error.code, after=delay) from None
    return {"stopped": stopped, "because": "the provider was asked to" if stopped else "the provider cannot stop it"}
