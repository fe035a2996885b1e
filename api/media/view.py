"""Builds the JSON answer of the media endpoints for a picture, from the picture's row and its job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from leasehold.api.media.schemas import (
    Failure,
    MediaAnswer,
    MediaStatus,
    Original,
    StepAnswer,
    StepStatus,
    VariantAnswer,
)
from leasehold.api.process.services import Services
from leasehold.domain.states import JOB_TERMINAL, JobState, TaskState
from leasehold.pipelines.media.pipeline import media as pipeline
from leasehold.pipelines.media.reads import MediaView, StepView
from leasehold.pipelines.media.variants import VARIANTS

#: The result of this step has the original's width and height.
_MEASURING_STEP = "resize"
#: The name of the output with the final picture, which the step `webp` writes.
_FINAL = pipeline.by_name["webp"].writes

#: The state of a job -> the status that clients see. A job in any other state is PROCESSING.
_MEDIA_STATUS: dict[JobState, MediaStatus] = {
    JobState.SUCCEEDED: "READY",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "FAILED",
    JobState.EXPIRED: "FAILED",
}

#: The state of a task -> the status of the step that clients see.
_STEP_STATUS: dict[TaskState, StepStatus] = {
    TaskState.BLOCKED: "PENDING",
    TaskState.PENDING: "PENDING",
    TaskState.RUNNING: "RUNNING",
    TaskState.RETRY: "RETRY",
    TaskState.WAITING: "RETRY",
    TaskState.SUCCEEDED: "SUCCEEDED",
    TaskState.FAILED: "FAILED",
    TaskState.SKIPPED: "SKIPPED",
    TaskState.CANCELLED: "CANCELLED",
}

#: The error that clients see of a job that did not succeed, if the job's row has no error.
_DEFAULT_ERRORS = {
    JobState.CANCELLED: {"code": "cancelled", "message": "The job was cancelled.", "retryable": True},
    JobState.EXPIRED: {"code": "deadline_exceeded", "message": "The job ran past its deadline.", "retryable": True},
    JobState.FAILED: {"code": "failed", "message": "The job failed.", "retryable": False},
}


def status_word(job_status: str) -> MediaStatus:
    return _MEDIA_STATUS.get(JobState(job_status), "PROCESSING")


def step_word(task_status: str) -> StepStatus:
    return _STEP_STATUS[TaskState(task_status)]


def media_status(media: MediaView) -> MediaStatus:
    # The picture's job decides. A picture has no job until its upload is complete and accepted.
    if media.job_status is not None:
        return status_word(media.job_status)
    if media.error is not None:
        return "FAILED"
    return "INIT" if media.status == "INIT" else "UPLOADED"


def is_finished(media: MediaView) -> bool:
    """Whether the state is final."""
    return media.error is not None or media.job_status in JOB_TERMINAL


def media_answer(services: Services, media: MediaView) -> MediaAnswer:
    """The answer of the GET endpoint. Its URLs lead to the CDN. Without a CDN, they are signed URLs of the object
    store.
    """
    status = media_status(media)
    is_ready = status == "READY"
    return MediaAnswer(
        media_id=media.id,
        status=status,
        job_id=media.job_id,
        final_url=_url_of(services, media, _FINAL) if is_ready else None,
        variants=(_variants_of(services, media) or None) if is_ready else None,
        original=_original_of(media),
        steps=[_step_answer(step) for step in media.steps],
        error=_error_of(media),
        created_at=media.created_at,
        updated_at=media.changed_at,
    )


def _url_of(services: Services, media: MediaView, name: str | None) -> str | None:
    """The URL of an output, or None if the job has no such output."""
    key = f"{media.output_prefix}/{name}"
    if key not in media.outputs:
        return None
    base = services.settings.cdn_base_url
    if base is not None:
        return f"{base.rstrip('/')}/{key}"
    return services.store.sign_get(key, seconds=services.settings.download_url_seconds)


def _variants_of(services: Services, media: MediaView) -> dict[str, VariantAnswer]:
    variants: dict[str, VariantAnswer] = {}
    for name, variant in VARIANTS.items():
        url = _url_of(services, media, variant.output)
        if url is not None:
            row = media.outputs[f"{media.output_prefix}/{variant.output}"]
            variants[name] = VariantAnswer(url=url, bytes=row.size, content_type=row.content_type)
    return variants


def _original_of(media: MediaView) -> Original | None:
    if media.job_id is None or media.size is None:
        return None
    values = [step.value for step in media.steps if step.name == _MEASURING_STEP and step.value is not None]
    measures: Mapping[str, Any] = values[0].get("original", {}) if values else {}
    return Original(
        width=measures.get("width"),
        height=measures.get("height"),
        bytes=media.size,
        content_type=media.content_type,
    )


def _step_answer(step: StepView) -> StepAnswer:
    status = step_word(step.status)
    # Only a step that has succeeded or failed has a duration.
    finished_at = step.finished_at if status in {"SUCCEEDED", "FAILED"} else None
    return StepAnswer(
        name=step.name,
        status=status,
        attempt=step.attempt,
        started_at=_utc(step.started_at),
        finished_at=_utc(step.finished_at),
        duration_ms=round((finished_at - step.started_at).total_seconds() * 1000)
        if finished_at is not None and step.started_at is not None
        else None,
        error=Failure.model_validate(step.failure) if step.failure and status != "SUCCEEDED" else None,
    )


def _utc(instant: datetime | None) -> datetime | None:
    return instant.astimezone(UTC) if instant is not None else None


def _error_of(media: MediaView) -> Failure | None:
    if media.error is not None:
        return Failure.model_validate(media.error)
    if media.job_status is None or media_status(media) != "FAILED":
        return None
    return Failure.model_validate(media.job_error or _DEFAULT_ERRORS[JobState(media.job_status)])
