"""The three steps of a generation."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done, Snooze
from leasehold.pipelines.generation.files import NotNow, Unfit, bring
from leasehold.pipelines.generation.pipeline import GenerationParams, generation
from leasehold.pipelines.generation.provider import (
    Made,
    Order,
    OutcomeUnknown,
    Provider,
    ProviderError,
    Rejected,
    TryLater,
)
from leasehold.pipelines.generation.provider_context import ProviderContext, open_provider_context, order_of
from leasehold.runtime import failpoints

#: What a provider that is busy or down is given, at most, before it is asked again.
_MAX_BACKOFF = 120.0
#: The most that a provider's Retry-After counts for.
_MAX_WAIT = 600.0
#: Polls that came due together part ways.
_JITTER = 0.1
_UNKNOWN = "Nobody knows whether the provider took the order: its answer was lost, and asking again might buy it twice."

generation.opens(open_provider_context)


@generation.handles("submit")
async def submit(attempt: Attempt) -> Done | Snooze:
    """Buy once. The intent is committed before the order goes out: whoever finds one knows that it may have."""
    params, provider_context = _of(attempt)
    provider, credential = provider_context.provider(params), provider_context.credential(params)
    note = await attempt.note()
    may_repeat = provider.takes_token or params.resubmit
    if note.get("asked_at") and not may_repeat:
        raise Permanent("submit_outcome_unknown", _UNKNOWN)
    order = replace(_order(attempt, note), callback=provider_context.callback(attempt.job_id))
    await attempt.remember(note | {"asked_at": _now().isoformat()})
    failpoints.reach("after_intent")
    attempt.checkpoint()
    try:
        answer = await provider.submit(order, credential)
    except TryLater as error:
        tries = note.get("tries", 0) + 1
        return Snooze(_later(params, error, tries), {"tries": tries, "last_error": error.message})
    except Rejected as error:
        raise await _refused(attempt, error) from None
    except OutcomeUnknown as error:
        if may_repeat:
            raise Retryable(error.message, code=error.code) from None
        raise Permanent("submit_outcome_unknown", f"{_UNKNOWN} ({error.message})") from None
    failpoints.reach("after_purchase")
    said = {"urls": list(answer.urls)} if isinstance(answer, Made) else {"ref": answer.ref}
    return Done(value=said | {"at": _now().isoformat()})


@generation.handles("poll")
async def poll(attempt: Attempt) -> Done | Snooze:
    """Ask once, and come again later: nothing is held meanwhile."""
    params, provider_context = _of(attempt)
    note = await attempt.note()
    if not note:
        bought = await attempt.value("submit")
        if "urls" in bought:  # a provider that answers with the files at once
            return Done(value=bought | {"submitted_at": bought["at"]})
        return Snooze(_spread(params.poll_seconds), {"ref": bought["ref"], "submitted_at": bought["at"], "misses": 0})
    provider, credential = provider_context.provider(params), provider_context.credential(params)
    if _now() >= params.deadline_at:
        await _give_up(attempt, provider, note, credential)
    try:
        answer = await provider.poll(note["ref"], _order(attempt, note), credential)
    except Rejected as error:
        raise await _refused(attempt, error, note) from None
    except (TryLater, OutcomeUnknown) as error:
        misses = note["misses"] + 1
        return Snooze(_later(params, error, misses), note | {"misses": misses, "last_error": error.message})
    if isinstance(answer, Made):
        return Done(value={"urls": list(answer.urls), "at": _now().isoformat(), "submitted_at": note["submitted_at"]})
    delay = max(params.poll_seconds, min(answer.after or 0.0, _MAX_WAIT))
    return Snooze(_before_deadline(params, _spread(delay)), note | {"misses": 0, "state": answer.state[:100]})


@generation.handles("store")
async def store(attempt: Attempt) -> Done:
    """Bring every file home. One that will never come is told of, and fails the job only if all are so."""
    params, provider_context = _of(attempt)
    made, began = await attempt.value("poll"), monotonic()
    errors: list[dict[str, Any]] = []
    stored = 0
    for number, url in enumerate(made["urls"]):
        path = attempt.directory / str(number)
        try:
            extension, content_type = await bring(
                provider_context.egress, provider_context.settings, params.kind, url, path
            )
        except Unfit as error:
            errors.append({"file": number, "code": error.code, "message": str(error)})
            continue
        except NotNow as error:
            if attempt.number < generation.by_name["store"].max_attempts:
                raise Retryable(str(error), code="file_unavailable") from None
            errors.append({"file": number, "code": "file_unavailable", "message": str(error)})
            continue
        await attempt.write_file(f"{number}.{extension}", path, content_type)
        path.unlink()
        stored += 1
        attempt.progress(50.0 + 50.0 * (number + 1) / len(made["urls"]), f"stored {stored} of {len(made['urls'])}")
    if not stored:
        raise Permanent(errors[0]["code"], errors[0]["message"])
    return Done(
        value={
            "original_urls": made["urls"],
            "total_files": len(made["urls"]),
            "successful_uploads": stored,
            "tos_upload_errors": errors,
            "generation_time": _milliseconds(made["submitted_at"], made["at"]),
            "tos_upload_time": int((monotonic() - began) * 1000),
        }
    )


def _of(attempt: Attempt) -> tuple[GenerationParams, ProviderContext]:
    return attempt.params, attempt.opened


def _order(attempt: Attempt, note: dict[str, Any]) -> Order:
    """Raises Permanent `deadline_exceeded`: too late even to ask."""
    params: GenerationParams = attempt.params
    left = (params.deadline_at - _now()).total_seconds()
    if left <= 0:
        raise Permanent("deadline_exceeded", _too_late(note))
    return order_of(params, attempt.job_id, left)


async def _give_up(attempt: Attempt, provider: Provider, note: dict[str, Any], credential: str) -> None:
    """Past its deadline: what the provider still does is of no use to anybody. Raises Permanent."""
    try:
        await provider.cancel(note["ref"], order_of(attempt.params, attempt.job_id, 1.0), credential)
    except ProviderError as error:
        attempt.log.warning("the provider was not told to stop", code=error.code)
    raise Permanent("deadline_exceeded", _too_late(note))


def _too_late(note: dict[str, Any]) -> str:
    last = note.get("last_error")
    return "The generation was not made in time." + (f" Last heard: {last}" if last else "")


async def _refused(attempt: Attempt, error: Rejected, note: dict[str, Any] | None = None) -> Permanent:
    if error.fail_code is not None:
        await attempt.remember((note or {}) | {"fail_code": error.fail_code})
    return Permanent(error.code, error.message)


def _later(params: GenerationParams, error: TryLater | OutcomeUnknown, misses: int) -> timedelta:
    """As the provider asked; else twice as long each time."""
    asked = getattr(error, "after", None)
    seconds = min(params.poll_seconds * 2 ** min(misses - 1, 10), _MAX_BACKOFF)
    return _before_deadline(params, _spread(seconds if asked is None else min(asked, _MAX_WAIT)))


def _spread(seconds: float) -> timedelta:
    return timedelta(seconds=seconds * random.uniform(1.0, 1.0 + _JITTER))  # noqa: S311 - spreads load, guards nothing


def _before_deadline(params: GenerationParams, delay: timedelta) -> timedelta:
    """Not later than the deadline: it is kept by the poll that finds it passed."""
    left = params.deadline_at - _now()
    return max(min(delay, left), timedelta(0))


def _milliseconds(since: str, until: str) -> int:
    return int((datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds() * 1000)


def _now() -> datetime:
    return datetime.now(UTC)
