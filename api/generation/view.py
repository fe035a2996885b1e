"""Builds the JSON answer for a generation from its row, with the statuses that docs/guides/generation.md lists."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from time import time
from typing import Any, Literal, TypeAlias

from leasehold.api.generation.schemas import GenerationAnswer, GenerationError, GenerationState, GenerationStatistics
from leasehold.api.http.etags import weak_etag
from leasehold.api.process.services import Services
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.pipelines.generation.pipeline import OUTCOME_UNKNOWN, OUTCOME_UNKNOWN_CODE
from leasehold.pipelines.generation.rows import UNDER_WAY, Row
from leasehold.storage.signing import MAX_URL_SECONDS

#: The statuses of a generation, as answers name them.
StatusText: TypeAlias = Literal["unknown", "pending", "processing", "polling", "completed", "failed"]
#: The number that stands for a status in answers. Every status that is missing here has the number 0.
STATUS_NUMBERS: dict[StatusText, Literal[0, -1, -2]] = {"completed": -1, "failed": -2}
#: The error (code, message) for a job that did not succeed and has no error of its own. This error is retryable,
#: because another order may succeed.
_DEFAULT_ERRORS = {
    JobState.CANCELLED: ("cancelled", "The generation was cancelled."),
    JobState.EXPIRED: ("deadline_exceeded", "The generation did not finish in time."),
    JobState.FAILED: ("failed", "The generation failed."),
}


def is_finished(row: Row) -> bool:
    return row["status"] in JOB_TERMINAL


def status_text(row: Row) -> StatusText:
    """The public status of a row. leasehold.pipelines.generation.rows.STATUS follows the same rules in SQL."""
    if row["status"] == JobState.SUCCEEDED:
        return "completed"
    if is_finished(row):
        return "failed"
    submit_status = row["steps"]["submit"]
    if submit_status == "succeeded":
        return "polling"
    return "processing" if submit_status in ("running", "retry", "waiting") else "pending"


def unknown_answer(task_id: str) -> GenerationAnswer:
    """The answer for an unknown `task_id`. Its HTTP status is 200, and it is no problem document (RFC 9457), because
    this API imitates another API, whose clients do not expect a problem.
    """
    return GenerationAnswer(
        created=int(time()),
        data=GenerationState(task_id=task_id, url="", status=0, status_text="unknown", urls=[]),
    )


def answer(services: Services, row: Row) -> GenerationAnswer:
    text = status_text(row)
    urls = [_url_of(services, row, key) for key in row["keys"] or []] if text == "completed" else []
    return GenerationAnswer(
        created=int(time()),
        data=GenerationState(
            task_id=row["task_id"],
            job_id=row["job_id"],
            url=",".join(urls),
            status=STATUS_NUMBERS.get(text, 0),
            status_text=text,
            urls=urls,
            error=_error_of(row) if text == "failed" else None,
            metadata=_metadata_of(row) if is_finished(row) else None,
            expires_at=int(row["expires_at"].timestamp()) if is_finished(row) else None,
        ),
    )


def etag(row: Row) -> str:
    """The ETag of the state. It is weak, because `created` and the signatures of URLs differ in every answer to the
    same state.

    A URL is valid for a week at most. So the ETag of a finished generation also changes every half week. The next
    answer is then not 304, and the client gets new URLs.
    """
    version = f"{row['job_id']}.{row['status']}.{row['event_seq']}"
    return weak_etag(version + (f".{int(time() // (MAX_URL_SECONDS / 2))}" if is_finished(row) else ""))


def _url_of(services: Services, row: Row, key: str) -> str:
    base = services.settings.cdn_base_url
    if base is not None:
        return f"{base.rstrip('/')}/{key}"
    seconds_left = (row["expires_at"] - datetime.now(UTC)).total_seconds()
    return services.store.sign_get(key, seconds=max(1, int(seconds_left)))


def _error_of(row: Row) -> GenerationError:
    error: dict[str, Any] | None = row["error"]
    if error is None:
        code, message = _DEFAULT_ERRORS[JobState(row["status"])]
        return GenerationError(code=code, message=message, retryable=True)
    if row["has_intent"] and error["code"] != OUTCOME_UNKNOWN_CODE:
        # `has_intent`: the step `submit` began to send the order, but nobody knows whether the provider got it, for
        # example because the job has expired or the worker was lost. A new order might buy the same thing twice, so the
        # error is not retryable.
        message = f"{OUTCOME_UNKNOWN} ({error['message']})"
        return GenerationError(code=OUTCOME_UNKNOWN_CODE, message=message, retryable=False)
    return GenerationError(
        code=error["code"],
        message=error["message"],
        retryable=error["retryable"],
        fail_code=row["fail_code"],  # the provider's own code
    )


def _metadata_of(row: Row) -> dict[str, Any]:
    """The metadata that were stored with the result, without the provider's own links. If there is no result, the
    metadata say why the generation failed.
    """
    metadata: dict[str, Any] | None = row["stored"]
    if metadata is not None:
        return {name: value for name, value in metadata.items() if name != "original_urls"}
    return {"total_files": 0, "successful_uploads": 0, "fail_reason": _error_of(row).message}


def statistics(rows: Sequence[Row]) -> GenerationStatistics:
    # `rows`: each row has a kind, a server, a status and the number `n` of these generations (`counts` of rows.py).
    # `tasks`: kind -> status -> number. `servers`: server -> the number of its unfinished generations.
    tasks: dict[str, dict[str, int]] = {}
    servers: dict[str, int] = {}
    for row in rows:
        counts_by_status = tasks.setdefault(row["kind"], {})
        counts_by_status[row["status"]] = counts_by_status.get(row["status"], 0) + row["n"]
        if row["status"] in UNDER_WAY:
            servers[row["server_id"]] = servers.get(row["server_id"], 0) + row["n"]
    return GenerationStatistics(tasks=tasks, servers=servers)
