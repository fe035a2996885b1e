"""A worker outside of the platform. It claims tasks over HTTP, renews their leases, runs a handler and settles the
tasks (reports how each ended).

    worker = ExternalWorker("https://jobs.example.com", "lh_...", queues=["reports"])
    await worker.serve(handle)         # handle(task) -> dict | None

docs/guides/external-workers.md describes the worker's requests; this module is the reference implementation in Python.
The worker needs only the API's URL and an API key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any, NoReturn, Self
from uuid import uuid4

import httpx2

from leasehold.client.external_output import MAX_CHARACTERS, MAX_ITEMS, OutputBuffer
from leasehold.client.objects import OtherBytes, check_answer, read_object
from leasehold.client.requests import DIRECT, KeyAuth, key_of, url_of
from leasehold.client.retrying import problem_of
from leasehold.domain.errors import Cancelled, LeaseholdError, LeaseLost, Permanent, Retryable, StepError, deciding
from leasehold.runtime.foreign_errors import text_of
from leasehold.runtime.gather import being_cancelled, cancel_and_wait

_log = logging.getLogger(__name__)
#: HTTP statuses. The store answers 412 to an upload if it already has an object with this key, because a signed upload
#: may only make a new object.
_CONFLICT, _EXISTS_ALREADY, _TOO_MANY = 409, 412, 429
#: With these statuses the API refuses the API key. The API then refuses every further request, including a settlement.
_KEY_REFUSED = (401, 403)
#: With these statuses the API refuses the content of a request. The cause may be a single item of the request, or the
#: request's length.
_BODY_REFUSED = (400, 413, 422)
#: Seconds between two tries, after the API did not answer or was overloaded.
_OUTAGE_SECONDS = 2.0
#: For how many seconds a claim of `serve` waits for a task. The API allows no more.
_WAIT_SECONDS = 30.0
#: `serve` ends once the API has refused all settlements of this many tasks in a row.
_MAX_UNSETTLED = 3
#: A worker that stops tries for _RELEASE_SECONDS to release its task. Of this time, the last log lines and chunks may
#: take _LAST_OUTPUT_SECONDS.
_RELEASE_SECONDS, _LAST_OUTPUT_SECONDS = 5.0, 2.0
#: The API's limits for the code and the message of a failure.
_CODE = re.compile(r"[a-z][a-z0-9_.-]{0,99}")
_MAX_MESSAGE = 2000
#: The message of a log line, and its traceback, have at most this many characters each.
_MAX_TEXT = 65_536
#: The levels of a log line. A log line has at most _MAX_FIELDS fields.
_LEVELS = ("debug", "info", "warning", "error", "critical")
_MAX_FIELDS = 32
#: Seconds between two requests that send the log lines and chunks of a task.
_OUTPUT_SECONDS = 0.5
#: The API's limit for the wait before the next attempt.
_MAX_RETRY_AFTER = timedelta(days=7)


class Refused(LeaseholdError):
    """The API refused a request, or the answer did not come from the API. `status`: HTTP status. `code`: the error's
    code.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


@dataclass
class Task:
    """A leased task. `claim`: the task as the API's answer to the claim describes it. `_request`: sends a request to
    the API. `_store`: the HTTP client for the store's signed URLs. `cancelled`: a cancel of the run was requested.
    `lost`: the lease is lost.
    """

    claim: dict[str, Any]
    _request: Callable[..., Awaitable[dict[str, Any]]] = field(repr=False)
    _store: httpx2.AsyncClient = field(repr=False)
    cancelled: bool = False
    lost: bool = False
    sent: dict[str, str] = field(default_factory=dict)  # {name: SHA-256} of the files that `write` has uploaded

    def __post_init__(self) -> None:
        self._lines = OutputBuffer(partial(self._send_items, "logs", "lines"))
        self._chunks = OutputBuffer(partial(self._send_items, "stream", "chunks"))
        self._has_logged_loss = False  # whether a log line reports that the API has refused output of this attempt

    @property
    def id(self) -> str:
        return str(self.claim["task_id"])

    @property
    def step(self) -> str:
        return str(self.claim["step"])

    @property
    def payload(self) -> dict[str, Any]:
        """The run's payload."""
        payload: dict[str, Any] = self.claim["payload"]
        return payload

    @property
    def results(self) -> dict[str, Any]:
        """The results of the steps that this step needs, as {step: result}."""
        results: dict[str, Any] = self.claim["results"]
        return results

    @property
    def files(self) -> list[dict[str, Any]]:
        """The files of the steps that this step needs: step, name, size, sha256, content_type, and a signed `url`."""
        files: list[dict[str, Any]] = self.claim["files"]
        return files

    async def read(self, name: str, step: str | None = None) -> bytes:
        """Read a file that a needed step has stored. `step`: needed only if files of several steps have this name.

        Raises KeyError for an unknown file. Raises Retryable `file_unreadable` if the store refuses or does not answer,
        and Retryable `file_corrupt` if the store sends other bytes than were stored.
        """
        for file in self.files:
            if file["name"] == name and step in (None, file["step"]):
                try:
                    return await read_object(self._store, file["url"], size=file["size"], sha256=file["sha256"])
                except OtherBytes as error:
                    raise Retryable(
                        f"the bytes of {name} are not those that were stored", code="file_corrupt"
                    ) from error
                except httpx2.HTTPError as error:
                    raise Retryable(f"{_failure_of_store(error)} for {name}", code="file_unreadable") from error
        raise KeyError(name)

    async def write(self, name: str, data: bytes, content_type: str = "application/octet-stream") -> None:
        """Upload a file. Other steps and clients see it once the task is completed. Raises LeaseLost, Refused, and
        Retryable `file_unwritable` if the store refuses or does not answer.
        """
        file = {"name": name, "size": len(data), "content_type": content_type}
        (ticket,) = (await self.post("files", files=[file]))["files"]
        try:
            answer = await self._store.put(ticket["url"], content=data, headers=ticket["headers"])
            # The file exists already if this attempt has written it before. For example, the store's answer was lost,
            # and the handler tried again. The API verifies the bytes when the task is completed.
            if answer.status_code != _EXISTS_ALREADY:
                check_answer(answer)
        except httpx2.HTTPError as error:
            raise Retryable(f"{_failure_of_store(error)} for {name}", code="file_unwritable") from error
        self.sent[name] = hashlib.sha256(data).hexdigest()

    async def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """Send a request about this task, under its lease. `verb`: the path's last part. Raises LeaseLost, Refused."""
        return await self._request(f"/v1/external/tasks/{self.id}/{verb}", epoch=self.claim["epoch"], **body)

    async def progress(self, percent: float, summary: str = "") -> None:
        """Report how far the step is, 0 to 100. Raises LeaseLost, Refused."""
        await self.post("progress", percent=percent, summary=summary)

    def log(self, message: str, *, level: str = "info", trace: str = "", **fields: Any) -> None:
        """Add a line to the run's log. The line is sent within a second, and before the task is settled. If too many
        lines already wait to be sent, the line is dropped. A later line says how many were dropped.

        `level`: debug, info, warning, error or critical. `trace`: a traceback. `fields`: JSON; only the first 32
        are sent. Raises ValueError for another level, and TypeError and ValueError for fields that are not JSON.
        """
        if level not in _LEVELS:
            raise ValueError(f"the level of a log line is one of {', '.join(_LEVELS)}, not {level!r}")
        self._add_line(message, level, trace, dict(list(fields.items())[:_MAX_FIELDS]))

    def log_failure(self, message: str, trace: str) -> None:
        """Do the same as `log` at the level error, but keep the line, however many lines wait, because this line says
        why the attempt failed.
        """
        self._add_line(message, "error", trace, beyond_bounds=True)

    def _add_line(
        self,
        message: str,
        level: str,
        trace: str = "",
        fields: dict[str, Any] | None = None,
        *,
        beyond_bounds: bool = False,
    ) -> None:
        """Keep the line for the next request. `beyond_bounds`: keep it even if the buffer is full. Raises TypeError and
        ValueError for fields that are not JSON.
        """
        line = {"message": _sendable(message)[:_MAX_TEXT], "level": level, "logger": self.step, "fields": fields or {},
                "traceback": _sendable(trace)[-_MAX_TEXT:], "at": datetime.now(UTC).isoformat()}  # fmt: skip
        self._lines.add(line, len(_encode_json(line)), beyond_bounds=beyond_bounds)

    def emit(self, chunk: Any) -> bool:
        """Append a chunk (a text, or another JSON value) to the run's stream, which clients follow. Returns False if
        the chunk is dropped. This has one of two reasons. Either the attempt has emitted too much, so that the API
        accepts no more of its chunks. Or too many chunks already wait to be sent, and a later line of the log says how
        many were dropped.

        NUL characters are removed from a text. Raises ValueError for any other JSON value that contains a NUL
        character, and TypeError and ValueError for a value that is not JSON.
        """
        if isinstance(chunk, str):
            chunk = chunk.replace("\x00", "")
        encoded = _encode_json(chunk)
        # In JSON, a NUL is `\u0000`. But `\\u0000` is a backslash and the text `u0000`. So each `\\` is removed before
        # the search.
        if "\\u0000" in encoded.replace("\\\\", ""):
            raise ValueError("a chunk cannot hold a NUL character")
        return self._chunks.add(chunk, len(encoded))

    async def flush(self) -> None:
        """Send the log lines and chunks that were not sent yet. Those that the API refuses are dropped, and a log line
        reports this. Another log line reports how many items `log` and `emit` have dropped.

        Raises httpx2.HTTPError while the API does not answer. A later call then sends the same items again. Raises
        LeaseLost, and Refused if the API refuses the API key.
        """
        for output in (self._chunks, self._lines):  # the lines last, because a line may report a refused chunk
            while not await self._has_flushed(output):
                pass
        line_count, chunk_count = self._lines.take_dropped_count(), self._chunks.take_dropped_count()
        if line_count or chunk_count:
            message = (
                f"{line_count} lines and {chunk_count} chunks of this attempt were dropped before this line: a worker "
                f"keeps at most {MAX_ITEMS} of each, and {MAX_CHARACTERS} characters, until the API accepts them."
            )
            self._add_line(message, "warning", beyond_bounds=True)
            while not await self._has_flushed(self._lines):
                pass

    async def _has_flushed(self, output: OutputBuffer) -> bool:
        """Send the items of `output`. Returns False if the API has refused a request, so that `output` may have further
        items.
        """
        try:
            await output.flush()
        except Refused as error:
            if error.status in _KEY_REFUSED:
                raise
            is_lost = output.refuse(divide=error.status in _BODY_REFUSED)
            if is_lost and not self._has_logged_loss:  # only once, because the API may refuse this line, too
                self._has_logged_loss = True
                message = f"The API has refused output of this attempt: {error}"
                self._add_line(message, "warning", beyond_bounds=True)
            return False
        return True

    async def _send_items(self, verb: str, name: str, first: int, items: list[Any]) -> bool:
        """Send the items in the field `name` of the request. `first`: the position of items[0] among all such
        items of the attempt. Returns True if the API accepts no more items of this attempt.
        """
        answer = await self.post(verb, first=first, **{name: items})
        return bool(answer["cut"])

    def checkpoint(self) -> None:
        """Raises Cancelled once a cancel of the run was requested, and LeaseLost once the lease is lost."""
        self.check_lease()
        if self.cancelled:
            raise Cancelled

    def check_lease(self) -> None:
        """Raises LeaseLost once the lease is lost."""
        if self.lost:
            raise LeaseLost


def _failure_of_store(error: httpx2.HTTPError) -> str:
    """What failed, without the signed URL. A network error is named by its type, because its message may be empty."""
    if isinstance(error, httpx2.HTTPStatusError):  # raised by `check_answer`
        return str(error)
    return f"the store did not answer ({type(error).__name__})"


#: The program's function that works on a task, and returns the result of the step.
Handler = Callable[[Task], Awaitable[dict[str, Any] | None]]


class ExternalWorker:
    """A worker outside of the platform; use it with `async with`.

    `lease_seconds`: how long a lease lasts without a heartbeat. The worker sends three heartbeats in this time. Raises
    ClientError for a malformed URL or key.
    """

    def __init__(self, url: str, key: str, *, queues: Sequence[str], lease_seconds: float = 60.0) -> None:
        # Check the URL and the key here. `serve` mistakes each error of the HTTP library for an outage. So with a
        # malformed URL or key it would try again for ever.
        url = url_of(url)
        auth = KeyAuth(url, key_of(key))
        self.id = uuid4().hex  # a new id for each start
        self._queues = list(queues)
        self._lease_seconds = lease_seconds
        #: The refused settlements, one for each task since the last task that this worker could settle.
        self._unsettled: list[Refused] = []
        # `mounts=DIRECT`: requests to this machine use no proxy.
        self._store = httpx2.AsyncClient(timeout=60.0, mounts=DIRECT)  # without the API key, for signed URLs
        self._http = httpx2.AsyncClient(base_url=url, auth=auth, timeout=60.0, mounts=DIRECT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()
        await self._store.aclose()

    async def serve(self, handle: Handler) -> None:
        """Work on one task at a time, until the caller cancels `serve`. Then release the current task, whose attempt
        does not count. While the API does not answer, or is overloaded, wait and try again. Wait also after a task that
        the API does not let this worker settle, and after an answer without a task that came immediately.

        Raises Refused if the API refuses the API key or the queues, and if it refuses all settlements of three tasks in
        a row. For example, if a proxy lets only the claims through, the worker would run each task of the queue for
        nothing.
        """
        self._unsettled.clear()
        while True:
            unsettled_before = len(self._unsettled)
            claimed_at = monotonic()
            try:
                had_task = await self.work_once(handle, wait=_WAIT_SECONDS)
                if not had_task and monotonic() - claimed_at < _OUTAGE_SECONDS:
                    await asyncio.sleep(_OUTAGE_SECONDS)  # a proxy, or an API that stops, may answer without a wait
            except httpx2.HTTPError:
                await asyncio.sleep(_OUTAGE_SECONDS)
            if len(self._unsettled) >= _MAX_UNSETTLED:
                raise self._unsettled[-1]
            if len(self._unsettled) > unsettled_before:
                await asyncio.sleep(_OUTAGE_SECONDS)

    async def work_once(self, handle: Handler, *, wait: float = 0.0) -> bool:
        """Claim a task, run the handler and settle the task. Returns False if no task became due within `wait` seconds
        (at most 30).
        """
        answer = await self._request(
            "/v1/external/claim", queues=self._queues, wait=wait, lease_seconds=self._lease_seconds
        )
        for claim in answer["tasks"]:
            await self._work_on(handle, Task(claim, self._request, self._store))
        return bool(answer["tasks"])

    async def _work_on(self, handle: Handler, task: Task) -> None:
        heartbeat_task = asyncio.create_task(self._send_heartbeats(task))
        output_task = asyncio.create_task(self._send_output(task))
        try:
            await self._run(handle, task)
        except LeaseLost:
            return  # another claim has the task, so nobody will read this attempt's result
        finally:
            await cancel_and_wait(heartbeat_task, output_task)

    async def _send_output(self, task: Task) -> None:
        """Send what the task logs and emits while its handler works."""
        while not task.lost:
            await asyncio.sleep(_OUTPUT_SECONDS)
            with suppress(httpx2.HTTPError, Refused, LeaseLost):  # `_settle` flushes again
                await task.flush()

    async def _run(self, handle: Handler, task: Task) -> None:
        # Run the handler, and settle the task by what the handler returns or raises.
        try:
            result = await handle(task)
            _encode_json(result)  # raises for a result that is not JSON, so that the attempt fails
        except (Exception, BaseExceptionGroup, Cancelled, asyncio.CancelledError) as raised:  # noqa: BLE001 - a handler may raise anything
            await self._settle_error(task, deciding(raised), raised)
        else:
            files = [{"name": name, "sha256": sha256} for name, sha256 in task.sent.items()]
            await self._settle(task, "complete", result=result, files=files)

    async def _settle_error(self, task: Task, error: BaseException, raised: BaseException) -> None:
        """Settle the task after its handler has raised `raised`. `error`: the same error; if `raised` is a group, the
        error in the group that decides how the attempt ends. Raises `error` if it ends the attempt without a
        settlement.
        """
        if isinstance(error, Cancelled):
            if task.cancelled:
                await self._settle(task, "acknowledge-cancel")
                return
            message = "the handler raised Cancelled, but nobody has cancelled the run"
            await self._fail(task, Permanent("handler_cancelled", message), raised)
        elif isinstance(error, asyncio.CancelledError):
            if being_cancelled():
                await self._release(task)
                raise error
            # The handler awaited something that was cancelled. The worker must go on with the next task.
            message = "the handler let a CancelledError out, but nobody has cancelled the worker"
            await self._fail(task, Retryable(message, code="handler_error"), raised)
        elif isinstance(error, LeaseLost) or not isinstance(error, Exception):
            raise error
        else:
            await self._fail(task, error, raised)

    async def _fail(self, task: Task, error: Exception, cause: BaseException) -> None:
        """Report that the attempt failed with `error`. `cause`: what the handler raised."""
        task.log_failure(text_of(error), "".join(traceback.format_exception(cause)))
        await self._settle(task, "fail", **_failure_of(error))

    async def _release(self, task: Task) -> None:
        """Release the task, because this worker stops. Another worker may claim it immediately, and the attempt does
        not count. If the API does not answer, the lease expires later.
        """
        with suppress(httpx2.HTTPError, TimeoutError, Refused, LeaseLost):
            async with asyncio.timeout(_RELEASE_SECONDS):
                with suppress(httpx2.HTTPError, TimeoutError):
                    async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                        await task.flush()
                await task.post("release")

    async def _settle(self, task: Task, verb: str, **body: Any) -> None:
        """Settle the task. If the API refuses the settlement, report the refusal as the attempt's failure. If the
        refused settlement was itself a failure, this sends the failure again, with the refusal as its message. If the
        API refuses the second request, too, the lease is left to expire, because the worker must go on with the next
        task.

        Raises LeaseLost, and Refused if the API refuses the API key.
        """
        refusal = await self._refusal_of(task, verb, **body)
        if refusal is not None:
            failure = _failure_of(Retryable(str(refusal), code=refusal.code))
            if verb == "fail":  # keep `retryable`, because a Permanent must not become an attempt that is repeated
                failure = body | {"message": failure["message"]}
            refusal = await self._refusal_of(task, "fail", **failure)
        if refusal is None:
            self._unsettled.clear()
        else:
            _log.warning("task %s cannot be settled, and is left to the end of its lease: %s", task.id, refusal)
            self._unsettled.append(refusal)

    async def _refusal_of(self, task: Task, verb: str, **body: Any) -> Refused | None:
        """Send the task's log lines and chunks, and then settle the task. While the API does not answer, try again.
        This is safe, because the heartbeats keep the lease, and the API answers a repeated settlement as it answered
        the first. If this worker stops before the API has answered, it releases the task. This is safe, too, because
        the API refuses the release if the settlement did arrive.

        Returns the API's refusal of this settlement. Raises LeaseLost, and Refused if the API refuses the API key.
        """
        try:
            while True:
                try:
                    await task.flush()
                    await task.post(verb, **body)
                except httpx2.HTTPError:
                    task.check_lease()
                    await asyncio.sleep(_OUTAGE_SECONDS)
                except Refused as error:
                    if error.status in _KEY_REFUSED:
                        raise
                    return error
                else:
                    return None
        except asyncio.CancelledError:
            await self._release(task)
            raise

    async def _send_heartbeats(self, task: Task) -> None:
        """Send a heartbeat every third of the lease, until the lease is lost. If a heartbeat has no answer within a
        third of the lease, stop waiting for it, because the next heartbeat may reach another process of the API.
        """
        third = self._lease_seconds / 3
        due = monotonic() + third
        while True:
            await asyncio.sleep(due - monotonic())
            due = monotonic() + third
            try:
                async with asyncio.timeout(third):
                    answer = await task.post("heartbeat", lease_seconds=self._lease_seconds)
                task.cancelled = bool(answer["cancel_requested"])
            except LeaseLost:
                task.lost = True
                return
            except (httpx2.HTTPError, TimeoutError, Refused):
                continue  # try again, because the lease may last longer than the outage

    async def _request(self, path: str, **body: Any) -> dict[str, Any]:
        # Returns the JSON object of the answer. Raises httpx2.HTTPError while the API is away or overloaded. Raises
        # LeaseLost or Refused if the API refuses the request.
        answer = await self._http.post(path, json={"worker_id": self.id} | body)
        if answer.is_success:
            return _object_of(answer)
        if answer.is_server_error or answer.status_code == _TOO_MANY:
            answer.raise_for_status()
        problem = problem_of(answer)
        if answer.status_code == _CONFLICT and problem.get("code") == "lease_lost":
            raise LeaseLost
        code = str(problem.get("code", f"http_{answer.status_code}"))
        raise Refused(answer.status_code, code, str(problem.get("detail", "The API gave no reason.")))


class _Fields(dict[str, Any]):
    """The JSON object of an answer. A missing field raises Refused when it is read, because the answer is probably not
    the API's.
    """

    def __init__(self, fields: dict[str, Any], answer: httpx2.Response) -> None:
        super().__init__(fields)
        self._answer = answer

    def __missing__(self, name: str) -> NoReturn:
        raise _foreign_answer(self._answer, f"with JSON that has no {name!r}")


def _foreign_answer(answer: httpx2.Response, how: str) -> Refused:
    """The error for an answer that cannot be the API's, such as a proxy's page."""
    return Refused(answer.status_code, "answer_not_understood", f"{answer.url} answered {how}: is it a Leasehold API?")


def _object_of(answer: httpx2.Response) -> _Fields:
    """The answer's JSON object. Raises Refused if the answer is not a JSON object."""
    try:
        fields = answer.json()
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise _foreign_answer(answer, "without a JSON object")
    return _Fields(fields, answer)


def _encode_json(value: Any) -> str:
    """The value's JSON, as the HTTP library sends it. Raises TypeError and ValueError for a value that is not JSON."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    encoded.encode()  # raises for half of a surrogate pair
    return encoded


def _sendable(text: str) -> str:
    """The text without what the API cannot store: NUL, and characters that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode().replace("\x00", "")


def _failure_of(error: Exception) -> dict[str, Any]:
    """The failure of an attempt in which the handler raised `error`, as the API accepts it."""
    code, message = "handler_error", text_of(error)
    retry_after: float | None = None
    if isinstance(error, StepError):
        message = error.message
        if _CODE.fullmatch(error.code):
            code = error.code
    if isinstance(error, Retryable) and error.after is not None:
        retry_after = min(max(error.after, timedelta(0)), _MAX_RETRY_AFTER).total_seconds()
    readable = _sendable(message.replace("\x00", "\N{REPLACEMENT CHARACTER}"))  # a NUL in a message stays visible
    return {
        "code": code,
        "message": readable[:_MAX_MESSAGE],
        "retryable": not isinstance(error, Permanent),
        "retry_after": retry_after,
    }
