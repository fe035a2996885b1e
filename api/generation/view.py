"""Builds the JSON answer of a generation from its row, in the words of the original API (docs/guides/generation.md)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from time import time
from typing import Any, Literal, TypeAlias

from leasehold.api.generation.schemas import GenerationAnswer, GenerationError, GenerationState, GenerationStatistics
from leasehold.api.http.etags import weak
from leasehold.api.process.services import Services
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.pipelines.generation.rows import UNDER_WAY, Row

Word: TypeAlias = Literal["unknown", "pending", "processing", "polling", "completed", "failed"]
NUMBER: dict[Word, Literal[0, -1, -2]] = {"completed": -1, "failed": -2}
#: The error of a job that ended badly and has no error of its own. Both may be ordered again.
_ENDED = {
    JobState.CANCELLED: ("cancelled", "The generation was cancelled."),
    JobState.EXPIRED: ("deadline_exceeded", "The generation was not made in time."),
}
#: S3 signs for a week at most.
_MAX_SECONDS = 7 * 86_400


def is_finished(row: Row) -> bool:
    return row["status"] in JOB_TERMINAL


def status_word(row: Row) -> Word:
    """The public status. leasehold.pipelines.generation.rows.STATUS is the same rule in SQL."""
    if row["status"] == JobState.SUCCEEDED:
        return "completed"
    if is_finished(row):
        return "failed"
    submit = row["steps"]["submit"]
    if submit == "succeeded":
        return "polling"
    return "processing" if submit in ("running", "retry", "waiting") else "pending"


def unknown(task_id: str) -> GenerationAnswer:
    """The answer for an unknown task: clients expect no error."""
    return GenerationAnswer(
        created=int(time()),
        data=GenerationState(task_id=task_id, url="", status=0, status_text="unknown", urls=[]),
    )


async def answer(services: Services, row: Row) -> GenerationAnswer:
    word = status_word(row)
    urls = [await _url(services, row, key) for key in row["keys"] or []] if word == "completed" else []
    return GenerationAnswer(
        created=int(time()),
        data=GenerationState(
            task_id=row["task_id"],
            job_id=row["job_id"],
            url=",".join(urls),
            status=NUMBER.get(word, 0),
            status_text=word,
            urls=urls,
            error=_error(row) if word == "failed" else None,
            metadata=_metadata(row) if is_finished(row) else None,
            expires_at=int(row["expires_at"].timestamp()) if is_finished(row) else None,
        ),
    )


def etag(row: Row) -> str:
    """The state's version. Weak: `created` is the time of the answer, and a URL's signature differs. A signed URL lives
    a week at most, so the version changes meanwhile.
    """
    version = f"{row['job_id']}.{row['status']}.{row['event_seq']}"
    return weak(version + (f".{int(time() // (_MAX_SECONDS / 2))}" if is_finished(row) else ""))


async def _url(services: Services, row: Row, key: str) -> str:
    base = services.settings.cdn_base_url
    if base is not None:
        return f"{base.rstrip('/')}/{key}"
    left = (row["expires_at"] - datetime.now(UTC)).total_seconds()
    return await services.store.sign_get(key, seconds=max(1, min(int(left), _MAX_SECONDS)))


def _error(row: Row) -> GenerationError:
    error: dict[str, Any] | None = row["error"]
    if error is None:
        code, message = _ENDED[JobState(row["status"])]
        return GenerationError(code=code, message=message, retryable=True)
    return GenerationError(
        code=error["code"], message=error["message"], retryable=error["retryable"], fail_code=row["fail_code"]
    )


def _metadata(row: Row) -> dict[str, Any]:
    """The text's metadata of a result; the provider's own links stay inside."""
    stored: dict[str, Any] | None = row["stored"]
    if stored is not None:
        return {name: value for name, value in stored.items() if name != "original_urls"}
    return {"total_files": 0, "successful_uploads": 0, "fail_reason": _error(row).message}


def statistics(rows: Sequence[Row]) -> GenerationStatistics:
    tasks: dict[str, dict[str, int]] = {}
    servers: dict[str, int] = {}
    for row in rows:
        words = tasks.setdefault(row["kind"], {})
        words[row["status"]] = words.get(row["status"], 0) + row["n"]
        if row["status"] in UNDER_WAY:
            servers[row["server_id"]] = servers.get(row["server_id"], 0) + row["n"]
    return GenerationStatistics(tasks=tasks, servers=servers)
