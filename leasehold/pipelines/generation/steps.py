"""The handlers of the generation pipeline (orders of images or videos at a provider): `submit` sends the order, `poll`
asks the provider until the order is finished, and `store` downloads the files.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from leasehold.db.clock import database_time
from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done, Snooze
from leasehold.pipelines.generation.files import FileUnavailable, UnusableFile, download
from leasehold.pipelines.generation.operations import withdraw
from leasehold.pipelines.generation.pipeline import (
    OUTCOME_UNKNOWN,
    OUTCOME_UNKNOWN_CODE,
    STORE_TIME,
    GenerationParams,
    generation,
)
from leasehold.pipelines.generation.provider import (
    Finished,
    NoAccess,
    Order,
    OutcomeUnknown,
    ProviderError,
    Rejected,
    TryLater,
)
from leasehold.pipelines.generation.provider_context import ProviderContext, open_provider_context, order_of
from leasehold.runtime import failpoints
from leasehold.transitions.jobs.deadlines import extend_deadline

#: The longest pause before the next request to a provider that is busy or down.
_MAX_BACKOFF_SECONDS = 120.0
#: The longest pause that a provider's Retry-After can cause.
_MAX_RETRY_AFTER_SECONDS = 600.0
#: Each pause is extended by a random fraction of its length, at most this fraction. So polls that are due at the same
#: time spread out.
_MAX_JITTER = 0.1
#: The most files of one order. The client may choose the provider's model, and the model may decide how many links the
#: answer has.
_MAX_FILES = 100

generation.opens(open_provider_context)  # each worker opens one context; handlers get it as `attempt.opened`


@generation.handles("submit")
async def submit(attempt: Attempt) -> Done | Snooze:
    """Send the order once. Before the step sends the order, it records its intent (`asked_at`) in the note. If an
    attempt finds this record, an earlier attempt may have ordered. The record stays until an attempt knows that nothing
    was ordered. As long as the record exists, people can settle the order (see operations.py), even after the job has
    ended.
    """
    params, provider_context = _params_and_context(attempt)
    note = await _note_without_refusal(attempt)
    try:
        provider, credential = provider_context.access(params)
    except NoAccess as error:
        raise _final_error(note, error.code, error.message) from None
    # A provider that honours the order's token does not sell the same order twice. With `resubmit`, the client accepts
    # that the order may be sold twice.
    may_repeat = provider.honours_token or params.resubmit
    # `earlier`: the note to keep if this attempt turns out to order nothing. It has `asked_at` only if an earlier
    # attempt may have ordered. Otherwise it is empty, so that a later attempt may order.
    earlier = {name: value for name, value in note.items() if name == "asked_at"}
    if earlier and not may_repeat:
        raise Permanent(OUTCOME_UNKNOWN_CODE, OUTCOME_UNKNOWN)
    seconds_left = await _seconds_left(attempt)
    order = replace(_order(attempt, note, seconds_left), callback=provider_context.callback(attempt.job_id))
    attempt.checkpoint()  # an attempt that must stop ends here, before the intent, and has ordered nothing
    intent = {"asked_at": _now().isoformat()}
    await attempt.remember(note | intent)
    failpoints.reach("after_intent")
    try:
        answer = await provider.submit(order, credential)
    except TryLater as error:
        tries = note.get("tries", 0) + 1
        later = earlier | {"tries": tries, "last_error": error.message}
        await attempt.remember(later)  # because in a job that is being cancelled, the snooze below writes no note
        return Snooze(_retry_delay(params, error, tries, seconds_left), later)
    except (NoAccess, Rejected) as error:
        raise await _recorded_rejection(attempt, error, earlier) from None
    except OutcomeUnknown as error:
        # `attempt.errors` counts the attempts that raised an error. `attempt.number` would also count lost attempts,
        # and the attempts before a retry of the job.
        if may_repeat and attempt.errors + 1 < generation.by_name["submit"].max_attempts:
            raise Retryable(error.message, code=error.code) from None
        raise _final_error(intent, error.code, error.message) from None
    failpoints.reach("after_purchase")
    purchase = {"urls": list(answer.urls)} if isinstance(answer, Finished) else {"ref": answer.ref}
    return Done(value=purchase | {"at": _now().isoformat()})


@generation.handles("poll")
async def poll(attempt: Attempt) -> Done | Snooze:
    """Ask the provider once, then snooze: give the lease back until the next poll, so that the task holds no slot of a
    worker.

    The first attempt asks nothing, because the provider has only just got the order. `misses` in the note: how many
    polls in a row have failed. The poll at the deadline still asks, because the order may have finished since the last
    poll. If the order has not finished, the poll at the deadline cancels it.
    """
    params, provider_context = _params_and_context(attempt)
    note = await _note_without_refusal(attempt)
    if not note:  # this is the first attempt
        purchase = await attempt.value("submit")
        if "urls" in purchase:  # the provider returned the files immediately
            await _give_time_to_store(attempt)
            return Done(value=purchase | {"submitted_at": purchase["at"]})
        first_note = {"ref": purchase["ref"], "submitted_at": purchase["at"], "misses": 0}
        return Snooze(_with_jitter(params.poll_seconds), first_note)
    seconds_left = await _seconds_left(attempt)
    try:
        provider, credential = provider_context.access(params)
        answer = await provider.poll(note["ref"], order_of(params, attempt.job_id, seconds_left), credential)
    except (NoAccess, TryLater, OutcomeUnknown) as error:
        if seconds_left <= 0:
            raise await _cancelled_late_order(attempt, note | {"last_error": error.message}) from None
        misses = note["misses"] + 1
        return Snooze(
            _retry_delay(params, error, misses, seconds_left), note | {"misses": misses, "last_error": error.message}
        )
    except Rejected as error:
        raise await _recorded_rejection(attempt, error, note) from None
    if isinstance(answer, Finished):
        await _give_time_to_store(attempt)
        return Done(value={"urls": list(answer.urls), "at": _now().isoformat(), "submitted_at": note["submitted_at"]})
    if seconds_left <= 0:
        raise await _cancelled_late_order(attempt, note)
    delay = max(params.poll_seconds, min(answer.after or 0.0, _MAX_RETRY_AFTER_SECONDS))
    return Snooze(
        _before_deadline(_with_jitter(delay), seconds_left), note | {"misses": 0, "state": answer.state[:100]}
    )


@generation.handles("store")
async def store(attempt: Attempt) -> Done:
    """Download and store every file. The step's value lists the files that cannot be stored. The step fails only if no
    file could be stored, or if there are too many files.
    """
    poll_value, began = await attempt.value("poll"), monotonic()
    urls: list[str] = poll_value["urls"]
    if len(urls) > _MAX_FILES:
        raise Permanent("too_many_files", f"The provider returned {len(urls)} files; at most {_MAX_FILES} are stored.")
    errors: list[dict[str, Any]] = []
    stored_count = 0
    for number, url in enumerate(urls):
        error = await _store_file(attempt, number, url)
        if error is not None:
            errors.append({"file": number} | error)
            continue
        stored_count += 1
        attempt.progress(50.0 + 50.0 * (number + 1) / len(urls), f"stored {stored_count} of {len(urls)}")
    if not stored_count:
        raise Permanent(errors[0]["code"], errors[0]["message"])
    return Done(  # in the HTTP contract, `tos` means the object store
        value={
            "original_urls": urls,
            "total_files": len(urls),
            "successful_uploads": stored_count,
            "tos_upload_errors": errors,
            "generation_time": _milliseconds(poll_value["submitted_at"], poll_value["at"]),
            "tos_upload_time": int((monotonic() - began) * 1000),
        }
    )


async def _store_file(attempt: Attempt, number: int, url: str) -> dict[str, str] | None:
    """Download one file and write it as an output. Returns None, or the code and the message of a file that cannot be
    stored.

    Raises Retryable if another attempt may still download the file.
    """
    params, provider_context = _params_and_context(attempt)
    path = attempt.directory / str(number)
    try:
        extension, content_type = await download(
            provider_context.egress, provider_context.settings, params.kind, url, path
        )
    except UnusableFile as error:
        return {"code": error.code, "message": str(error)}
    except FileUnavailable as error:
        # `attempt.errors` counts the attempts that raised an error. `attempt.number` would also count lost attempts,
        # and the attempts before a retry of the job.
        if attempt.errors + 1 < generation.by_name["store"].max_attempts:
            raise Retryable(str(error), code="file_unavailable") from None
        return {"code": "file_unavailable", "message": str(error)}
    else:
        await attempt.write_file(f"{number}.{extension}", path, content_type)
        return None
    finally:
        path.unlink(missing_ok=True)  # in any case, so that the disk holds only one file at a time


def _params_and_context(attempt: Attempt) -> tuple[GenerationParams, ProviderContext]:
    return attempt.params, attempt.opened


async def _give_time_to_store(attempt: Attempt) -> None:
    """Give the job a later deadline, because the provider has made the files, and they are paid for. From now on the
    order's own deadline must not end the job.
    """
    async with attempt.connection() as connection:
        await extend_deadline(connection, attempt.job_id, STORE_TIME)


async def _seconds_left(attempt: Attempt) -> float:
    """The seconds until the deadline, by the database's clock, because the API set the deadline by that clock."""
    params: GenerationParams = attempt.params
    async with attempt.connection() as connection:
        return (params.deadline_at - await database_time(connection)).total_seconds()


def _order(attempt: Attempt, note: dict[str, Any], seconds_left: float) -> Order:
    """The order of this job. Raises Permanent if the deadline has passed. The code of the error is
    `submit_outcome_unknown` if an earlier attempt may have ordered, and `deadline_exceeded` otherwise.
    """
    if seconds_left <= 0:
        raise _final_error(note, "deadline_exceeded", _too_late_message(note))
    return order_of(attempt.params, attempt.job_id, seconds_left)


async def _cancelled_late_order(attempt: Attempt, note: dict[str, Any]) -> Permanent:
    """Ask the provider to stop, because the deadline has passed. If the provider cannot be asked now, or does not
    answer, this function writes a withdrawal (a job that asks again). Returns the error to raise.
    """
    params, provider_context = _params_and_context(attempt)
    try:
        provider, credential = provider_context.access(params)
        # 1.0: the seconds left. Any number would do, because a cancel does not use the order's time limit.
        await provider.cancel(note["ref"], order_of(params, attempt.job_id, 1.0), credential)
    except ProviderError as error:
        attempt.log.warning("the provider could not be asked to stop", code=error.code)
        if not isinstance(error, Rejected):
            settings = provider_context.settings
            async with attempt.connection() as connection, connection.transaction():
                await connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", attempt.job_id)
                await withdraw(connection, settings, attempt.job_id, attempt.tenant_id)  # the relay publishes its hint
    return Permanent("deadline_exceeded", _too_late_message(note))


def _too_late_message(note: dict[str, Any]) -> str:
    last_error = note.get("last_error")
    return "The generation did not finish in time." + (f" Last error: {last_error}" if last_error else "")


async def _recorded_rejection(attempt: Attempt, error: NoAccess | Rejected, note: dict[str, Any]) -> Permanent:
    """Write `note`, and in it the provider's own code as `fail_code`, which the API shows. After a retry of the job,
    the next attempt reads this note. Returns the error to raise.
    """
    await attempt.remember(note | {"fail_code": error.fail_code})
    return _final_error(note, error.code, error.message)


def _final_error(note: dict[str, Any], code: str, message: str) -> Permanent:
    """The error with which a step gives up. If an attempt may have ordered (`note` has `asked_at`), the error has the
    code of an unknown outcome. A client that reads any other code may order again, and buy twice.
    """
    if "asked_at" in note:
        return Permanent(OUTCOME_UNKNOWN_CODE, f"{OUTCOME_UNKNOWN} ({message})")
    return Permanent(code, message)


async def _note_without_refusal(attempt: Attempt) -> dict[str, Any]:
    """The note without `fail_code` (the provider's code of a refusal that came before a retry of the job). This
    function also deletes `fail_code` from the stored note. Otherwise the API would show the old code with the error of
    this attempt.
    """
    note = await attempt.note()
    if "fail_code" in note:
        del note["fail_code"]
        await attempt.remember(note)
    return note


def _retry_delay(params: GenerationParams, error: ProviderError, misses: int, seconds_left: float) -> timedelta:
    """The pause before the next request. If the provider's answer has a Retry-After, the pause lasts that long, but at
    least the poll interval. Otherwise the pause is the poll interval, doubled with each further failure in a row.
    `misses`: the number of these failures. Every pause has an upper bound, gets jitter, and ends at the deadline at the
    latest.
    """
    retry_after = getattr(error, "after", None)
    if retry_after is None:
        seconds = min(params.poll_seconds * 2 ** min(misses - 1, 10), _MAX_BACKOFF_SECONDS)
    else:
        seconds = max(params.poll_seconds, min(retry_after, _MAX_RETRY_AFTER_SECONDS))
    return _before_deadline(_with_jitter(seconds), seconds_left)


def _with_jitter(seconds: float) -> timedelta:
    return timedelta(seconds=seconds * random.uniform(1.0, 1.0 + _MAX_JITTER))  # noqa: S311 - spreads load, guards nothing


def _before_deadline(delay: timedelta, seconds_left: float) -> timedelta:
    """The delay, but at most until the deadline, because the poll at the deadline ends the job."""
    return max(min(delay, timedelta(seconds=seconds_left)), timedelta(0))


def _milliseconds(since: str, until: str) -> int:
    return int((datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds() * 1000)


def _now() -> datetime:
    return datetime.now(UTC)
