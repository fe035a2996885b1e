"""The generation pipeline: ask a provider for images or a video, poll until it is made, store its files. Light: the
API imports it.

`submit` records its intent first and so never buys twice; `poll` holds no worker while it waits; `store` brings the
provider's files home before their links die.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.kind import Kind, Scopes
from leasehold.domain.pipeline import Pipeline, RunTerms, Step

#: The queue of all its steps; pinned tasks go to `generation@{server_id}`.
QUEUE = "generation"
#: The step that notices its deadline ends the job itself, with a word to the provider; the platform does after this.
BACKSTOP = timedelta(minutes=2)
_LADDER = tuple(timedelta(seconds=seconds) for seconds in (5, 15, 60))


class Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    width: int | None = None
    height: int | None = None


class GenerationParams(BaseModel):
    """`credential`: sealed; without one the installation's own is used. `resubmit`: the caller would rather buy twice
    than be told `submit_outcome_unknown`.
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
    sample_strength: float | None = None
    images: tuple[Source, ...] = ()
    is_pro: bool = False
    duration: int | None = Field(default=None, description="Of a video, in milliseconds.")
    ratio: str | None = None
    extra: dict[str, Any] | None = None
    resubmit: bool = False
    credential: str | None = Field(default=None, repr=False)


generation = Pipeline(
    "generation",
    params=GenerationParams,
    module="leasehold.pipelines.generation.steps",
    terms=RunTerms(title="Generation", offered=False),
    steps=[
        # Not to be stopped half way: what was bought must be written down.
        Step(
            "submit", queue=QUEUE, max_attempts=4, retry_ladder=_LADDER, timeout=timedelta(minutes=3), cancelable=False
        ),
        Step(
            "poll", needs=("submit",), queue=QUEUE, max_attempts=4, retry_ladder=_LADDER, timeout=timedelta(minutes=2)
        ),
        Step(
            "store", needs=("poll",), queue=QUEUE, max_attempts=4, retry_ladder=_LADDER, timeout=timedelta(minutes=40)
        ),
    ],
)


class Withdrawal(BaseModel):
    """The generation of this tenant that nobody wants any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: UUID


withdrawal = Pipeline(
    "generation_withdrawal",
    params=Withdrawal,
    module="leasehold.pipelines.generation.withdraw",
    terms=RunTerms(title="Telling a provider to stop", offered=False, unlimited=True),
    steps=[
        Step("withdraw", queue=QUEUE, max_attempts=6, retry_ladder=_LADDER, timeout=timedelta(minutes=2)),
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
    public=frozenset(
        {"/v1/generations/callbacks/{job_id}/{signature}"}
    ),  # for providers: the address is a secret itself
    opens="leasehold.pipelines.generation.providers:open_catalogue",
    housekeeping="leasehold.pipelines.generation.housekeeping:housekeeping",
    questions="leasehold.pipelines.generation.questions:questions",
    scopes=Scopes("generation:read", "generation:write"),
    redacted=frozenset({"credential"}),
    parents={"generation_withdrawal": "/job_id"},
    operations="leasehold.pipelines.generation.operations:operations",
)
