"""The JSON of the media endpoints: the models of their requests and answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.http.callback_urls import CallbackUrl
from leasehold.api.http.tags import Tags
from leasehold.domain.json_values import JsonNumber
from leasehold.pipelines.media.variants import VariantName

MediaStatus = Literal["INIT", "UPLOADED", "PROCESSING", "READY", "FAILED"]
StepStatus = Literal["PENDING", "RUNNING", "RETRY", "SUCCEEDED", "FAILED", "SKIPPED", "CANCELLED"]

_EXAMPLE_ID = "01975c1e-7d3a-7c55-9a3e-1f7f6f2f9b10"
_EXAMPLE_JOB = "01975c1e-9f01-7b12-8d6c-0a4b1c2d3e4f"
_EXAMPLE_KEY = f"media/{_EXAMPLE_ID}/original.jpg"


def _example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


class UploadRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"content_type": "image/jpeg", "file_name": "a.jpg", "content_length": 48213}]},
    )

    content_type: str = Field(
        max_length=100, description="The media type of the upload: the upload URL admits only this type."
    )
    file_name: str = Field(max_length=1024, description="A name for people. The key does not contain it.")
    content_length: Annotated[int, Field(gt=0), JsonNumber] | None = Field(
        None, description="If given, the upload URL admits exactly this many bytes."
    )


class UploadTicket(BaseModel):
    model_config = _example(
        media_id=_EXAMPLE_ID,
        upload_url=f"https://s3.example.com/leasehold/{_EXAMPLE_KEY}?X-Amz-Signature=...",
        original_key=_EXAMPLE_KEY,
        expires_in=300,
    )

    media_id: UUID
    upload_url: str = Field(description="PUT the bytes here, with the same Content-Type header.")
    original_key: str
    expires_in: int = Field(description="The lifetime of the URL in seconds, from when it was issued.")


class CompleteRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"media_id": _EXAMPLE_ID, "original_key": _EXAMPLE_KEY, "variants": ["thumb", "avif"]}]
        },
    )

    media_id: UUID
    original_key: str = Field(max_length=1024)
    variants: list[VariantName] = Field(
        [], max_length=20, description="Further outputs. A name that is given twice counts once."
    )
    priority: Literal["high", "normal", "low"] = "normal"
    step_priority: dict[Literal["resize", "compress", "webp"], Literal["high", "normal", "low"]] = Field(
        {}, description="The priority of each step that has another priority than the picture."
    )
    tags: Tags = {}
    callback_url: CallbackUrl = None


class Accepted(BaseModel):
    model_config = _example(status="PROCESSING", media_id=_EXAMPLE_ID, job_id=_EXAMPLE_JOB)

    status: Literal["PROCESSING"] = "PROCESSING"
    media_id: UUID
    job_id: UUID


class Failure(BaseModel):
    code: str = Field(description="Stable and machine-readable.")
    message: str = Field(description="A sentence for people.")
    retryable: bool = Field(description="Whether another try with the same picture may succeed.")


class StepAnswer(BaseModel):
    name: str
    status: StepStatus
    attempt: int = Field(
        description="The number of the latest attempt; 0 before the first. An attempt that a worker has given back "
        "does not count."
    )
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration_ms: int | None = Field(None, description="The time of the attempt that finished the step.")
    error: Failure | None = Field(
        None, description="Why the last attempt failed. Absent once an attempt has succeeded."
    )


class Original(BaseModel):
    width: int | None = Field(None, description="In pixels, upright. Known once `resize` has read the picture.")
    height: int | None = None
    bytes: int
    content_type: str


class VariantAnswer(BaseModel):
    url: str
    bytes: int
    content_type: str


class MediaAnswer(BaseModel):
    model_config = _example(
        media_id=_EXAMPLE_ID,
        status="READY",
        job_id=_EXAMPLE_JOB,
        final_url=f"https://cdn.example.com/media/{_EXAMPLE_ID}/final.webp",
        original={"width": 4000, "height": 3000, "bytes": 48213, "content_type": "image/jpeg"},
        steps=[
            {
                "name": "resize",
                "status": "SUCCEEDED",
                "attempt": 1,
                "started_at": "2026-11-20T12:00:01.100000Z",
                "finished_at": "2026-11-20T12:00:01.400000Z",
                "duration_ms": 300,
            }
        ],
        created_at="2026-11-20T12:00:00Z",
        updated_at="2026-11-20T12:00:02Z",
    )

    media_id: UUID
    status: MediaStatus
    job_id: UUID | None = None
    final_url: str | None = Field(
        None, description="Set once READY. A signed URL has at least half of its lifetime left."
    )
    variants: dict[str, VariantAnswer] | None = Field(
        None, description="Set once READY: the requested variants, by name."
    )
    original: Original | None = Field(None, description="Set once the upload is accepted.")
    steps: list[StepAnswer] = []
    error: Failure | None = Field(None, description="Set once FAILED.")
    created_at: datetime
    updated_at: datetime
