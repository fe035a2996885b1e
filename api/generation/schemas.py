"""The JSON of the generation endpoints: Pydantic models of their requests and answers.

JsonNumber, Number and Flag refuse values that Pydantic would convert, such as "1" or `true` for a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from leasehold.api.http.callback_urls import CallbackUrl
from leasehold.api.http.tags import Tags
from leasehold.domain.json_values import Flag, JsonNumber, Number

MAX_PROMPT_CHARACTERS = 10_000
MAX_IMAGES = 16
MAX_EXTRA_BYTES = 8 * 1024  # the size of the member `extra` as JSON
MAX_SIDE_PIXELS = 16_384

TASK_ID = r"^[!-+\--~]{1,200}$"  # printable ASCII, but no space and no comma, because clients join ids by commas
# A server's id is a label of the workers that use the server, so it has the form of a label (LEASEHOLD_WORKER_LABELS).
SERVER_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def _check_size(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """Raises ValueError if the object is too large."""
    if extra is not None and len(orjson.dumps(extra)) > MAX_EXTRA_BYTES:
        raise ValueError(f"at most {MAX_EXTRA_BYTES} bytes of JSON")
    return extra


class SourcePicture(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: str = Field(
        max_length=2048, pattern=r"^https?://", description="The address from which the provider fetches the picture."
    )
    width: Annotated[int, Field(ge=1, le=MAX_SIDE_PIXELS), JsonNumber] | None = None
    height: Annotated[int, Field(ge=1, le=MAX_SIDE_PIXELS), JsonNumber] | None = None


class GenerationRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"prompt": "a lighthouse in a storm", "ratio": "16:9", "task_id": "order-4711"}],
        },
    )

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)
    model: str | None = Field(None, max_length=200, description="The provider's name of the model.")
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARACTERS)
    width: Annotated[int, Field(ge=1, le=MAX_SIDE_PIXELS), JsonNumber] | None = None
    height: Annotated[int, Field(ge=1, le=MAX_SIDE_PIXELS), JsonNumber] | None = None
    sample_strength: Annotated[float, Field(ge=0, le=1), JsonNumber] | None = None
    images: list[SourcePicture] = Field(default=[], max_length=MAX_IMAGES)
    is_pro: Flag = False  # the provider decides what `is_pro` means
    duration: Annotated[int, Field(ge=1, le=600_000), JsonNumber] | None = Field(
        None, description="The length of a video, in milliseconds."
    )
    ratio: str | None = Field(None, pattern=r"^[0-9]{1,3}:[0-9]{1,3}$")
    response_format: Literal["url"] = Field("url", description="Results are URLs; there is no other form.")
    task_id: str | None = Field(
        None,
        pattern=TASK_ID,
        description="Your own id of the order. An order that is repeated with the same id is not bought twice.",
    )
    server_id: str | None = Field(
        None,
        pattern=SERVER_ID,
        description="Only workers with this label run the job; by default, three jobs with the same label at once.",
    )
    provider: str | None = Field(None, max_length=63, description="If left out, the installation's default.")
    allow_resubmit: Flag = Field(
        False,
        description="If the job would fail with `submit_outcome_unknown`, submit again instead, and perhaps pay twice.",
    )
    extra: Annotated[dict[str, Any] | None, AfterValidator(_check_size)] = Field(
        None, description="Further fields, passed to the provider as they are."
    )
    tags: Tags = {}
    callback_url: CallbackUrl = None


class TaskQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"task_id": "order-4711"}]})

    task_id: str = Field(pattern=TASK_ID)
    consume: Flag = Field(False, description="Consume a finished result: no later query finds the task.")
    wait: Number = Field(0, ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for a change.")


class CancelRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"task_id": "order-4711"}]})

    task_id: str = Field(pattern=TASK_ID)
    reason: str = Field("", max_length=500)


class Ordered(BaseModel):
    task_id: str
    job_id: UUID | None = Field(None, description="The id of the job.")
    status: Literal[0] = 0  # under way, as in GenerationState


class GenerationAccepted(BaseModel):
    created: int = Field(description="Seconds since 1970.")
    data: Ordered


class GenerationError(BaseModel):
    code: str
    message: str
    retryable: bool = Field(description="Whether another order may succeed.")
    fail_code: str | None = Field(None, description="The provider's own code.")


class GenerationState(BaseModel):
    task_id: str
    job_id: UUID | None = Field(None, description="The id of the job.")
    url: str = Field(description="The files' URLs, joined by commas.")
    status: Literal[0, -1, -2] = Field(description="0: under way or unknown; -1: completed; -2: failed.")
    status_text: Literal["unknown", "pending", "processing", "polling", "completed", "failed"]
    urls: list[str]
    error: GenerationError | None = None
    metadata: dict[str, Any] | None = None
    expires_at: int | None = Field(None, description="When the result is deleted, in seconds since 1970.")


class GenerationAnswer(BaseModel):
    created: int
    data: GenerationState


class GenerationStatistics(BaseModel):
    """`tasks`: the number of generations by kind and status. `servers`: the number of generations that each server is
    processing or polling.
    """

    tasks: dict[str, dict[str, int]]
    servers: dict[str, int]
