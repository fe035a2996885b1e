"""`Run`: what a program gets when it submits a call of a task. With it the program waits for the result, cancels the
run, sends signals and reads the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

import orjson
from pydantic_core import PydanticSerializationError, to_jsonable_python

from leasehold.domain.errors import Invalid, TaskFailed
from leasehold.domain.sentences import full_stop
from leasehold.domain.storable import NotStorable, encode_storable, storable_text
from leasehold.domain.workflow_names import NAME_RULE, is_name

if TYPE_CHECKING:
    from leasehold.app.chunks import Chunks
    from leasehold.app.connection import Connections
    from leasehold.app.link import Outcome
    from leasehold.app.results import Results
    from leasehold.client.models import Chunk

R = TypeVar("R")  # the type of the task's result

#: The greatest length of the reason for a cancel, in characters. A longer reason is cut off, because the API would
#: refuse it.
_MAX_REASON = 500


class Run(Generic[R]):
    """One run of a task. `await run` gives its result. Each method except `status_and_code` exists twice. For example,
    `result` is for code without an event loop, and `aresult` is for code in a loop. (The second form of `wait` is
    `awaited`.)
    """

    def __init__(self, run_id: UUID, task: str, results: Results, connections: Connections) -> None:
        self.id = run_id
        self.task = task  # the name of the task
        self._results = results
        self._connections = connections

    def __repr__(self) -> str:
        return f"<run {self.id} of {self.task}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __await__(self) -> Generator[Any, Any, R]:
        return self.aresult().__await__()

    # --- without a loop

    def status(self) -> str:
        """The status: pending, queued, running, cancel_requested, succeeded, failed, cancelled or expired.

        Every method of a Run raises NotFound if there is no such run, and Unreachable if PostgreSQL does not answer
        within LEASEHOLD_SUBMIT_SECONDS. After `app.use_api`, every method raises Unavailable in place of Unreachable.
        """
        return self._connections.call(self._outcome()).status

    def status_and_code(self) -> tuple[str, str | None]:
        """The status as `status` returns it, and the code of the error with which the run ended. The code is None if
        the run has not ended, or has ended without an error.
        """
        outcome = self._connections.call(self._outcome())
        return outcome.status, None if outcome.error is None else outcome.error[0]

    def wait(self, timeout: float | None = None) -> Run[R]:
        """Wait until the run ends, for at most `timeout` seconds. Returns the run. Raises TimeoutError after
        `timeout` seconds, and the errors of `status`. But an outage that begins during the wait raises no error. The
        wait goes on, up to `timeout`.
        """
        self._refuse_in_loop("wait", "awaited")
        self._connections.call(self._wait(timeout))
        return self

    def result(self, timeout: float | None = None) -> R:
        """Wait until the run ends, and return its result. Raises TaskFailed if the run did not succeed, and the errors
        of `wait`.
        """
        self._refuse_in_loop("result", "aresult")
        return self._result_of(self._connections.call(self._outcome_at_end(timeout)))

    def cancel(self, reason: str = "") -> str:
        """Request the cancel. Returns the run's status after the request. It is `cancel_requested` if a worker still
        runs an attempt, or if the run's workflow must still handle the cancel. Otherwise it is `cancelled`, or the
        status with which the run had ended before.
        """
        return self._connections.call(self._cancel(reason))

    def signal(self, name: str, payload: Any = None) -> None:
        """Send a signal to the run's workflow. `payload` is JSON or a pydantic model.

        Raises NotFound, Conflict `run_ended` and TooMany `too_many_signals`. Raises Invalid `invalid_payload` for a
        payload that cannot be stored. Raises the same error if the run waits for the signal and expects another type of
        payload. Raises Invalid `payload_too_large` for more than 256 KiB, and Invalid `invalid_name` for a name that no
        signal may have. Raises Unreachable if PostgreSQL does not answer. Then the signal may or may not be stored.
        """
        self._connections.call(self._signal(name, payload))

    def stream(self) -> Iterator[Chunk]:
        """The chunks that the run emits, as the worker writes them, until the run ends. A chunk with the event
        `restart` voids the step's earlier chunks. Raises NotFound, and Unreachable as `status` does.
        """
        self._refuse_in_loop("stream", "astream")
        last_number, is_end = 0, False  # the number of the last chunk that was read
        while not is_end:
            chunks = self._connections.call(self._chunks(last_number))
            yield from chunks.items
            last_number, is_end = chunks.after, chunks.is_end

    # --- in a loop

    async def astatus(self) -> str:
        """The same as `status`, for code in an event loop."""
        return (await self._connections.acall(self._outcome())).status

    async def awaited(self, timeout: float | None = None) -> Run[R]:
        """The same as `wait`, for code in an event loop."""
        await self._connections.acall(self._wait(timeout))
        return self

    async def aresult(self, timeout: float | None = None) -> R:
        """The same as `result`, for code in an event loop."""
        return self._result_of(await self._connections.acall(self._outcome_at_end(timeout)))

    async def acancel(self, reason: str = "") -> str:
        """The same as `cancel`, for code in an event loop."""
        return await self._connections.acall(self._cancel(reason))

    async def asignal(self, name: str, payload: Any = None) -> None:
        """The same as `signal`, for code in an event loop."""
        await self._connections.acall(self._signal(name, payload))

    async def astream(self) -> AsyncIterator[Chunk]:
        """The same as `stream`, for code in an event loop."""
        last_number, is_end = 0, False  # the number of the last chunk that was read
        while not is_end:
            chunks = await self._connections.acall(self._chunks(last_number))
            for chunk in chunks.items:
                yield chunk
            last_number, is_end = chunks.after, chunks.is_end

    # --- in the event loop of the link, which runs in the link's own thread
    # (The link is the app's way to PostgreSQL or to the API.)

    async def _chunks(self, after: int) -> Chunks:
        return await (await self._connections.link()).chunks(self.id, after)

    async def _outcome(self) -> Outcome:
        return await (await self._connections.link()).outcome(self.id)

    async def _wait(self, timeout: float | None) -> None:
        if not await (await self._connections.link()).wait(self.id, timeout):
            raise TimeoutError(f"run {self.id} of {self.task} has not ended after {timeout} s")

    async def _outcome_at_end(self, timeout: float | None) -> Outcome:
        """Wait for the end of the run, and read its outcome. If a failed run is retried between its end and this read,
        wait for its next end.
        """
        ends_at = None if timeout is None else monotonic() + timeout
        seconds = timeout
        while True:
            await self._wait(seconds)
            outcome = await self._outcome()
            if outcome.ended:
                return outcome
            seconds = None if ends_at is None else max(0.0, ends_at - monotonic())

    async def _signal(self, name: str, payload: Any) -> None:
        if not is_name(name):
            raise Invalid("invalid_name", f"The name of a signal has {NAME_RULE}.")
        await (await self._connections.link()).signal(self.id, name, _storable(payload))

    async def _cancel(self, reason: str) -> str:
        # `storable_text` removes characters that PostgreSQL cannot store, because an odd reason must not prevent the
        # cancel.
        return await (await self._connections.link()).cancel(self.id, storable_text(reason)[:_MAX_REASON])

    def _result_of(self, outcome: Outcome) -> R:
        if outcome.error is not None:
            raise TaskFailed(*outcome.error)
        if outcome.large is not None:  # the JSON of a large result, which was in the object store
            encoded = outcome.large
        else:  # the result is wrapped: {"value": ...}
            encoded = orjson.dumps(None if outcome.value is None else outcome.value.get("value"))
        result: R = self._results.decoded(encoded)
        return result

    def _refuse_in_loop(self, name: str, async_name: str) -> None:
        """Raises RuntimeError in an event loop. `async_name`: the method to use there."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(f"run.{name}() would block the event loop that runs here: await run.{async_name}()")


def _storable(payload: Any) -> Any:
    """The payload of a signal as JSON. Raises Invalid `invalid_payload` if JSON or PostgreSQL cannot hold it."""
    try:
        as_json = to_jsonable_python(payload)
        encode_storable(as_json)
    except NotStorable as error:
        place = error.path or "its root"
        raise Invalid(
            "invalid_payload", full_stop(f"The payload cannot be stored: at {place}, {error.reason}")
        ) from None
    except (PydanticSerializationError, ValueError) as error:  # pydantic raises a ValueError for a circular list
        raise Invalid("invalid_payload", full_stop(f"The payload is not JSON: {error}")) from None
    return as_json
