"""`HttpLink` connects an app to its installation through the HTTP API. It needs an API key, and no database URL."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import httpx2

from leasehold.app.calls import Call
from leasehold.app.chunks import AT_MOST, PAUSE_SECONDS, Chunks, chunks_of
from leasehold.app.link import Outcome
from leasehold.app.results import OUTPUT, missing_result
from leasehold.app.terms import STEP
from leasehold.client import calls as requests
from leasehold.client import models
from leasehold.client.async_client import AsyncClient
from leasehold.client.errors import ApiError, Unavailable
from leasehold.client.objects import OtherBytes, read_object
from leasehold.client.requests import DIRECT
from leasehold.domain import errors
from leasehold.domain.celery_ids import TAG, uuid_of
from leasehold.domain.job_filter import quoted
from leasehold.domain.sentences import full_stop

# Here a `Call` is a call of a task, and a `requests.Call` is a request of the API's client.
T = TypeVar("T")  # what a request of the client returns

#: Seconds that a request to the object store may take.
_STORE_SECONDS = 60.0
_TOO_MANY = 429
#: The most characters of an idempotency key that the API accepts.
_MAX_KEY = 255
#: The status of the API's answer -> the error to raise. Any other status raises RequestError.
_ERRORS: Mapping[int, type[errors.RequestError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    410: errors.Gone,
    422: errors.Invalid,
}


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """How an app reaches the API. `url`, `key`: by default the values of LEASEHOLD_URL and LEASEHOLD_API_KEY.
    `timeout`: for how many seconds a request is repeated while the API does not answer, or answers that it is
    overloaded.
    """

    url: str | None = None
    key: str | None = None
    timeout: float = 60.0


class HttpLink:
    """A `Link` over the API. The tenant of the API key owns the runs, and the rate limits and quotas of the API key
    apply to them. `store`: an HTTP client that downloads large results from the object store.

    Each method raises Unavailable when the API does not answer in time, and a RequestError when the API refuses.
    """

    def __init__(self, client: AsyncClient, store: httpx2.AsyncClient) -> None:
        self._client = client
        self._store = store

    @classmethod
    @asynccontextmanager
    async def opened(cls, access: ApiAccess) -> AsyncIterator[HttpLink]:
        """Make a link, which connects at its first request. Raises ClientError for a malformed URL or key."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(access.url, access.key, timeout=access.timeout))
            # DIRECT: requests to this machine use no proxy.
            store = await stack.enter_async_context(httpx2.AsyncClient(timeout=_STORE_SECONDS, mounts=DIRECT))
            yield cls(client, store)

    async def submit(self, calls: Sequence[Call[Any]]) -> list[UUID]:
        """Start all runs or none. Raises Invalid `not_over_http` for a call that the API cannot do."""
        for call in calls:
            _refuse_unsupported(call)
        if len(calls) == 1:
            return [(await _with_platform_errors(self._client.send(_request_of(calls[0])))).id]
        return (await _with_platform_errors(self._client.send(_batch_of(calls)))).ids

    async def find(self, celery_id: str) -> UUID | None:
        """The run with this Celery id, or None. The Celery id is the run's own id or, for a run with another id, a tag
        of the run. Raises Forbidden if a tag must be searched, and the API key lacks the scope `jobs:read`.
        """
        if (own_id := uuid_of(celery_id)) is not None:
            try:
                return (await _with_platform_errors(self._client.get_run(own_id))).id
            except errors.NotFound:
                pass
        params = {"q": f"tag.{TAG}:{quoted(celery_id)}", "limit": 1}
        request = requests.Call("GET", "/v1/jobs", lambda page: page["jobs"], params=params, idempotent=True)
        found = await _with_platform_errors(self._client.send(request))
        return UUID(found[0]["id"]) if found else None

    async def wait(self, run_id: UUID, seconds: float | None) -> bool:
        """Whether the run ended within `seconds`. If `seconds` is None, wait without a limit. Raises NotFound."""
        try:
            await _with_platform_errors(self._client.wait(run_id, timeout=seconds))
        except TimeoutError:
            return False
        return True

    async def outcome(self, run_id: UUID) -> Outcome:
        """The state of the run, with its result. Raises NotFound, and ObjectMissing if the result was stored as an
        output and the run has no such output any more.
        """
        run = await _with_platform_errors(self._client.get_run(run_id))
        error = None
        if run.ended and run.status != "succeeded":
            error = _error_of(run)
        # The value of the task's only step: {"value": the result as JSON}, or {"output": NAME} if the object store has
        # the result (see results.py).
        value = (run.result or {}).get(STEP)
        large = None
        if run.status == "succeeded" and value is not None and "output" in value:
            large = await self._read_stored_result(run_id)
        return Outcome(run.status, run.ended, error, value, large)

    async def cancel(self, run_id: UUID, reason: str) -> str:
        """Ask the API to cancel the run. Returns the status that the run then has. Raises NotFound."""
        path = f"/v1/runs/{run_id}/cancel"
        request = requests.Call(
            "POST", path, models.JobAfterAction.model_validate, body={"reason": reason}, idempotent=True
        )
        try:
            return (await _with_platform_errors(self._client.send(request))).status
        except errors.Conflict as error:
            if error.code != "resource_invalid_state":
                raise
            return (await self.outcome(run_id)).status  # the run has ended

    async def signal(self, run_id: UUID, name: str, payload: Any) -> None:
        """Send a signal to the run, once. Raises NotFound, Conflict `run_ended`, TooMany."""
        await _with_platform_errors(self._client.signal(run_id, name, payload))

    async def chunks(self, run_id: UUID, after: int) -> Chunks:
        """The chunks after number `after`. If there is none yet, this returns only after a moment, because the caller
        then asks again immediately. Raises NotFound.
        """
        # First read whether the run has ended, and then the chunks. If it has ended, no chunk can follow these chunks.
        has_ended = (await _with_platform_errors(self._client.get_run(run_id))).ended
        params = {"after": after, "limit": AT_MOST}
        request = requests.Call(
            "GET", f"/v1/runs/{run_id}/stream", lambda page: page["chunks"], params=params, idempotent=True
        )
        chunks = chunks_of(await _with_platform_errors(self._client.send(request)), after, ended=has_ended)
        if not chunks.items and not chunks.is_end:
            await asyncio.sleep(PAUSE_SECONDS)
        return chunks

    async def _read_stored_result(self, run_id: UUID) -> bytes:
        """Read the result from the object store, by the link in the answer of /v1/jobs. Raises Unavailable,
        ObjectMissing, and Forbidden for a key without `jobs:read`.
        """
        job = await _with_platform_errors(self._client.get_job(run_id))
        results = (output for output in job.outputs or () if (output.step, output.name) == (STEP, OUTPUT))
        output = next(results, None)
        if output is None:
            raise missing_result(run_id)
        try:
            return await read_object(self._store, output.url or "", size=output.size, sha256=output.sha256)
        except httpx2.HTTPError as error:
            raise errors.Unavailable("store_unavailable", full_stop(f"The result cannot be read: {error}")) from error
        except OtherBytes as error:
            sentence = "The bytes of the result are not those that were stored."
            raise errors.Unavailable("store_unavailable", sentence) from error


def _error_of(run: models.Run) -> tuple[str, str]:
    """The code and the message with which the run ended. DatabaseLink gives the same ones for such a run."""
    if run.status == "cancelled":
        return "cancelled", (run.cancel or {}).get("reason") or "the run was cancelled"
    return (run.status, f"the run is {run.status}") if run.error is None else (run.error.code, run.error.message)


def _refuse_unsupported(call: Call[Any]) -> None:
    """Raises Invalid for a call that needs a link to the database."""
    if call.options.celery_id is not None:
        _refuse("The API chooses the ids of runs: call apply_async without task_id=, and keep the id of its result.")
    if call.options.id is not None:
        _refuse("The API chooses the ids of runs: give a key= in place of id=.")
    if call.debounce_key is not None:
        _refuse(f"{call.task.name} has a debounce, which the API cannot do: submit it to the database.")
    # `call.key` is the caller's key (`options.key`), or else a key that the platform makes of the arguments.
    if call.key is not None and not call.has_key_of_caller:
        _refuse(f"{call.task.name} is unique by its arguments: give a key= of your own.")


def _refuse(sentence: str) -> NoReturn:
    raise errors.Invalid("not_over_http", sentence)


def _request_of(call: Call[Any]) -> requests.Call[models.Accepted]:
    options = call.options
    # With an idempotency key, send the delay itself. A repetition must be the same request, and a time computed from
    # `now` would differ. Without a key, send the time, because the API of release 0.1.0 refuses `delay_seconds`.
    delay = options.delay if options.key is not None else None
    return requests.submit(
        call.task.name,
        call.params,
        priority=options.priority,
        scheduled_at=None if delay else call.scheduled_at(datetime.now(UTC)),
        delay_seconds=delay.total_seconds() if delay else None,
        tags=options.tags,
        key=None if options.key is None else _idempotency_key(call.task.name, options.key),
    )


def _idempotency_key(task: str, key: str) -> str:
    """The caller's key with the task's name before it, because another task may have the same key. (DatabaseLink also
    puts the task's name before the key.) A hash replaces a key that is too long for the API, and a key that ends with a
    space, because HTTP removes the space.
    """
    full_key = f"{task}:{key}"
    if len(full_key) <= _MAX_KEY and not key.endswith(" "):
        return full_key
    return f"{task}:{hashlib.sha256(key.encode()).hexdigest()}"


def _batch_of(calls: Sequence[Call[Any]]) -> requests.Call[models.Batch]:
    """One request for all calls. Raises Invalid if they have keys, or differ in more than arguments and tags."""
    first = calls[0]
    variants = {(call.task.name, call.options.priority, call.options.delay, call.options.start_at) for call in calls}
    if len(variants) > 1 or any(call.options.key is not None for call in calls):
        _refuse("The calls of one batch have the same priority and delay, and no keys.")
    request = requests.submit_many(
        first.task.name, [], priority=first.options.priority, scheduled_at=first.scheduled_at(datetime.now(UTC))
    )
    # `submit_many` gives all runs the same tags. Here each call has its own tags, so set the field `runs` afterwards.
    batch_runs = [{"payload": dict(call.params), "tags": dict(call.options.tags or {})} for call in calls]
    return requests.with_body_fields(request, runs=batch_runs)


async def _with_platform_errors(request: Awaitable[T]) -> T:
    """Await a request of the client. Raises the platform's errors in place of the client's."""
    try:
        return await request
    except ApiError as error:
        if error.status == _TOO_MANY:
            # TooMany needs the limit's name (`policy`) and number (`at_most`), and ApiError has neither. So the values
            # given here are placeholders. Nobody sees them, because this error never becomes an answer of the API.
            raise errors.TooMany(error.code, error.message, policy=error.code, at_most=0, retry_after=1) from error
        raise _ERRORS.get(error.status, errors.RequestError)(error.code, error.message) from error
    except Unavailable as error:
        # Leave out the client's advice. It names the request's idempotency key, and a caller of the app must not use
        # this key.
        raise errors.Unavailable("api_unreachable", error.what_happened) from error
