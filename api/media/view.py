"""A media row and its job, told in the media door's words."""

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
from leasehold.db.reads import MediaView, StepView
from leasehold.domain.states import JOB_TERMINAL, JobState, TaskState
from leasehold.pipelines.media.pipeline import media
from leasehold.pipelines.media.variants import VARIANTS

#: The step whose value says what the original is, and the output that is the result.
_MEASURES = "resize"
_FINAL = media.by_name["webp"].writes

_MEDIA_STATUS: dict[JobState, MediaStatus] = {
    JobState.SUCCEEDED: "READY",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "FAILED",
    JobState.EXPIRED: "FAILED",
}

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

#: For a job that ended badly without an error of its own.
_ENDED = {
    JobState.CANCELLED: {"code": "cancelled", "message": "The job was cancelled.", "retryable": True},
    JobState.EXPIRED: {"code": "deadline_exceeded", "message": "The job ran past its deadline.", "retryable": True},
    JobState.FAILED: {"code": "failed", "message": "The job failed.", "retryable": False},
}


def status_word(job_status: str) -> MediaStatus:
    return _MEDIA_STATUS.get(JobState(job_status), "PROCESSING")


def step_word(task_status: str) -> StepStatus:
    return _STEP_STATUS[TaskState(task_status)]


def media_status(found: MediaView) -> MediaStatus:
    if found.job_status is not None:
        return status_word(found.job_status)
    if found.error is not None:
        return "FAILED"
    return "INIT" if found.status == "INIT" else "UPLOADED"


def is_finished(found: MediaView) -> bool:
    """Whether it can be expected to change no more."""
    return found.error is not None or found.job_status in JOB_TERMINAL


async def media_answer(services: Services, found: MediaView) -> MediaAnswer:
    """What GET answers; signs its URLs, where there is no CDN."""
    status = media_status(found)
    ready = status == "READY"
    return MediaAnswer(
        media_id=found.id,
        status=status,
        job_id=found.job_id,
        final_url=await _url(services, found, _FINAL) if ready else None,
        variants=(await _variants(services, found) or None) if ready else None,
        original=_original(found),
        steps=[_step(step) for step in found.steps],
        error=_error(found),
        created_at=found.created_at,
        updated_at=found.changed_at,
    )


async def _url(services: Services, found: MediaView, name: str | None) -> str | None:
    """Through the row: only what was committed has a URL."""
    key = f"{found.output_prefix}/{name}"
    if key not in found.outputs:
        return None
    base = services.settings.cdn_base_url
    if base is not None:
        return f"{base.rstrip('/')}/{key}"
    return await services.store.sign_get(key, seconds=services.settings.download_url_seconds)


async def _variants(services: Services, found: MediaView) -> dict[str, VariantAnswer]:
    made: dict[str, VariantAnswer] = {}
    for name, variant in VARIANTS.items():
        url = await _url(services, found, variant.output)
        if url is not None:
            row = found.outputs[f"{found.output_prefix}/{variant.output}"]
            made[name] = VariantAnswer(url=url, bytes=row.size, content_type=row.content_type)
    return made


def _original(found: MediaView) -> Original | None:
    if found.job_id is None or found.size is None:
        return None
    values = [step.value for step in found.steps if step.name == _MEASURES and step.value is not None]
    measured: Mapping[str, Any] = values[0].get("original", {}) if values else {}
    return Original(
        width=measured.get("width"),
        height=measured.get("height"),
        bytes=found.size,
        content_type=found.content_type,
    )


def _step(step: StepView) -> StepAnswer:
    status = step_word(step.status)
    finished = step.finished_at if status in {"SUCCEEDED", "FAILED"} else None
    return StepAnswer(
        name=step.name,
        status=status,
        attempt=step.attempt,
        started_at=_utc(step.started_at),
        finished_at=_utc(step.finished_at),
        duration_ms=round((finished - step.started_at).total_seconds() * 1000)
        if finished is not None and step.started_at is not None
        else None,
        error=Failure.model_validate(step.failure) if step.failure and status != "SUCCEEDED" else None,
    )


def _utc(instant: datetime | None) -> datetime | None:
    return instant.astimezone(UTC) if instant is not None else None


def _error(found: MediaView) -> Failure | None:
    if found.error is not None:
        return Failure.model_validate(found.error)
    if found.job_status is None or media_status(found) != "FAILED":
        return None
    return Failure.model_validate(found.job_error or _ENDED[JobState(found.job_status)])
