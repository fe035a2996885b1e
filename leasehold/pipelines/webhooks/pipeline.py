"""Declares the pipeline that delivers webhooks. Each message is one job. A failed delivery is tried again after the
delays of the Standard Webhooks specification.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, model_validator

from leasehold.domain.kind import Kind, Scopes
from leasehold.domain.pipeline import Pipeline, RunTerms, Step

#: The delay after each failed try: 5 s, 5 m, 30 m, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h. Jitter shortens each delay by
#: up to a half.
_RETRY_LADDER = tuple(timedelta(seconds=s) for s in (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400))


class Delivery(BaseModel):
    """The parameters of a delivery. The delivery goes to the webhook `webhook_id`, or to `url`, which is the callback
    URL of one job. `event`: the JSON to send. `message`: None in the first delivery of a message. A redelivery has the
    id of the first delivery's job here, because the receiver must get the same message id again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    webhook_id: UUID | None = None
    url: str | None = None
    event: dict[str, Any]
    message: UUID | None = None

    @model_validator(mode="after")
    def _has_one_destination(self) -> Self:
        if (self.webhook_id is None) == (self.url is None):
            raise ValueError("a delivery goes to a webhook or to a URL")
        return self


#: A job of this pipeline delivers one message.
webhooks = Pipeline(
    "webhook",
    module="leasehold.pipelines.webhooks.steps",
    params=Delivery,
    steps=[
        Step(
            "deliver",
            queue="webhooks",
            max_attempts=len(_RETRY_LADDER) + 1,
            retry_ladder=_RETRY_LADDER,
            timeout=timedelta(seconds=60),
        )
    ],
    # `offered=False`: clients cannot start deliveries through /v1/runs. `unlimited=True`: no concurrency limit makes a
    # delivery wait.
    terms=RunTerms(offered=False, unlimited=True),
    slots="webhook_slots",  # the setting with the number of worker slots that are for deliveries alone
)

#: Deliveries as a kind of job in /v1/jobs.
WEBHOOK = Kind(
    "webhook",
    pipelines=(webhooks,),
    # Only a key that may change webhooks may read deliveries.
    scopes=Scopes(read="webhooks:write", write="webhooks:write"),
    parents={"webhook": "/event/data/id"},  # the JSON pointer to the id of the job that the event is about
    redacted=frozenset({"url"}),  # /v1/jobs does not show the URL, because it may contain a secret of the client
)
