"""Declares the generation pipeline (order images or a video from a provider, poll, store the files), and the pipeline
that withdraws an order.

The API and the workers import this module, so it imports no heavy library. The step `submit` records its intent before
it orders, so that no order is bought twice. The step `poll` gives its lease back between two requests, so that a
waiting order holds no slot of a worker. The step `store` downloads the files before the provider's links expire.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.errors import Permanent
from leasehold.domain.kind import Kind, NamedObjects, Scopes
from leasehold.domain.pipeline import Pipeline, RunTerms, Step

#: The queue of all steps. If a client names a server for its order, the steps go to the queue `generation@{server_id}`.
QUEUE = "generation"
_SUBMIT_TIMEOUT = timedelta(minutes=3)
#: A poll after the order's deadline cancels the order at the provider, and fails the job. If no such poll comes, the
#: platform expires the job when this time has passed after the deadline. This time is long enough for a submit that
#: begins just before the deadline, and for the poll that follows the submit.
BACKSTOP = _SUBMIT_TIMEOUT + timedelta(minutes=2)
#: How long the job may last after the provider has made the files. This is enough for four attempts of the step
#: `store`, and for some time in which no worker runs.
STORE_TIME = timedelta(hours=4)
#: The pauses before the second, third and fourth attempt of a step.
_RETRY_LADDER = tuple(timedelta(seconds=seconds) for seconds in (5, 15, 60))
#: A withdrawal is tried for at least a day, because an order that nobody cancels goes on, and costs money. In this time
#: an operator can replace a revoked key, or pay the provider.
_WITHDRAWAL_LADDER = tuple(timedelta(seconds=seconds) for seconds in (5, 15, 60, 300, 1800))
_WITHDRAWAL_ATTEMPTS = 101
# The code and the sentence stand in an error object, because the script that writes the reference of errors
# (docs/generate/raised.py) finds a code only in a call such as `Permanent(...)`.
_UNKNOWN_ORDER = Permanent(
    "submit_outcome_unknown",
    "It is unknown whether the provider accepted the order: its answer was lost, and to order again might buy it"
    " twice.",
)
#: The error's code and sentence for an order whose outcome is unknown.
OUTCOME_UNKNOWN_CODE, OUTCOME_UNKNOWN = _UNKNOWN_ORDER.code, _UNKNOWN_ORDER.message


class Source(BaseModel):
    """A source image of the order, by its address."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    width: int | None = None
    height: int | None = None


class GenerationParams(BaseModel):
    """The parameters of a generation. `credential`: the client's own credential, sealed (encrypted); None: the job uses
    the installation's credential.

    `resubmit`: if it is unknown whether the provider accepted an order, order again instead of failing with
    `submit_outcome_unknown`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["image", "video"]
    provider: str
    prompt: str
    deadline_at: datetime
    poll_seconds: float = Field(gt=0)
    model: str | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    sample_strength: float | None = None  # a field of the HTTP API; each provider interprets it in its own way
    images: tuple[Source, ...] = ()
    is_pro: bool = False  # each provider interprets this in its own way, too
    duration: int | None = Field(default=None, description="Of a video, in milliseconds.")
    ratio: str | None = None
    extra: dict[str, Any] | None = None
    resubmit: bool = False
    credential: str | None = Field(default=None, repr=False)


generation = Pipeline(
    "generation",
    params=GenerationParams,
    module="leasehold.pipelines.generation.steps",
    terms=RunTerms(title="Generation", offered=False),  # its clients use /v1/images and /v1/video, and not /v1/runs
    steps=[
        # Not cancelable: if the submit has bought something, it must record the purchase.
        Step(
            "submit",
            queue=QUEUE,
            max_attempts=4,
            retry_ladder=_RETRY_LADDER,
            timeout=_SUBMIT_TIMEOUT,
            cancelable=False,
        ),
        Step(
            "poll",
            needs=("submit",),
            queue=QUEUE,
            max_attempts=4,
            retry_ladder=_RETRY_LADDER,
            timeout=timedelta(minutes=2),
        ),
        Step(
            "store",
            needs=("poll",),
            queue=QUEUE,
            max_attempts=4,
            retry_ladder=_RETRY_LADDER,
            timeout=timedelta(minutes=40),
        ),
    ],
)


class Withdrawal(BaseModel):
    """The parameters of a withdrawal. `job_id`: the generation. `order`: a copy of what a worker needs to cancel the
    order at the provider: the generation's parameters without the client's content (`params`), and the provider's id of
    the order (`ref`). The platform writes the copy before it deletes the generation, if the withdrawal has not ended
    (transitions/withdrawals.py). None: the generation exists, or no such id was known when it was deleted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: UUID
    order: dict[str, Any] | None = Field(default=None, repr=False)


withdrawal = Pipeline(
    "generation_withdrawal",
    params=Withdrawal,
    module="leasehold.pipelines.generation.withdraw",
    # Not `offered`: clients start no withdrawals through /v1/runs. `unlimited`: a withdrawal waits for no concurrency
    # limit.
    terms=RunTerms(title="Withdrawing an order from a provider", offered=False, unlimited=True),
    steps=[
        Step(
            "withdraw",
            queue=QUEUE,
            max_attempts=_WITHDRAWAL_ATTEMPTS,
            retry_ladder=_WITHDRAWAL_LADDER,
            timeout=timedelta(minutes=2),
        ),
    ],
)

GENERATION = Kind(
    "generation",
    pipelines=(generation, withdrawal),
    routers=(
        "leasehold.api.generation.generation:router",
        "leasehold.api.generation.callbacks:router",
        "leasehold.api.generation.queries:router",
        "leasehold.api.generation.events:router",
        "leasehold.api.generation.source_images:router",
    ),
    # Providers have no API key of the platform. The signature in the URL proves that they may call this endpoint.
    public=frozenset({"/v1/generations/callbacks/{job_id}/{signature}"}),
    # Each process of the API opens the catalogue of providers once, for the endpoints.
    opens="leasehold.pipelines.generation.providers:open_catalogue",
    # SQL: how many bytes of source images the tenant $1 has. They count against the tenant's bound on stored bytes.
    stored="SELECT coalesce(sum(size), 0) FROM source_image WHERE tenant_id = $1",
    # For `leasehold doctor --reconcile`: which source images have a row, and which must exist in the store.
    objects=NamedObjects(
        prefix="sources/",
        pattern=r"sources/[0-9a-f]{16}/[0-9a-f]{64}\.(jpg|png|webp)",
        owners="SELECT key AS id FROM source_image WHERE key = ANY($1::text[])",
        keys="SELECT key AS id, key FROM source_image WHERE key > $1 AND expires_at > statement_timestamp()"
        " ORDER BY key LIMIT $2",
    ),
    housekeeping="leasehold.pipelines.generation.housekeeping:housekeeping",
    # The exporter's statements for metrics of generations.
    questions="leasehold.pipelines.generation.questions:questions",
    scopes=Scopes(read="generation:read", write="generation:write"),
    redacted=frozenset({"credential", "order"}),  # `order` of a withdrawal has the credential, too
    # A withdrawal belongs to another job. The JSON pointer leads to that job's id in the withdrawal's parameters.
    parents={"generation_withdrawal": "/job_id"},
    # What the actions on jobs (cancel, retry, delete) do for this kind.
    operations="leasehold.pipelines.generation.operations:operations",
)
