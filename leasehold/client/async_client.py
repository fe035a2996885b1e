"""`AsyncClient`: the API for programs with an event loop. It has the methods of `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

import httpx2

from leasehold.client import calls, models
from leasehold.client.calls import Call, Feed, Id, Listing
from leasehold.client.errors import ApiError, Unavailable
from leasehold.client.following import Following
from leasehold.client.requests import (
    DIRECT,
    KeyAuth,
    form_of,
    key_of,
    next_cursor_of,
    options_of,
    parse_answer,
    result_of,
    url_of,
)
from leasehold.client.retrying import Tries
from leasehold.client.uploading import OnProgress, async_pieces
from leasehold.client.waiting import HOLD_SECONDS, Waiting

#: A function that opens the files of a form, and lets the ExitStack close them. It returns the options with which the
#: HTTP library sends the form.
MakeForm: TypeAlias = Callable[[ExitStack], dict[str, Any]]
P = ParamSpec("P")  # the parameters of a function of `calls`
T = TypeVar("T")  # the result of a call, or an item of a listing or a feed
#: How long one try of a request may take, in seconds. The API never holds a request this long before it answers.
_REQUEST_SECONDS = 60.0


def _sends(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make a method with the parameters of `make`. The method sends the call that `make` builds, and returns the
    result.
    """

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(make(*args, **kwargs))

    return update_wrapper(method, make)


def _lists(make: Callable[P, Listing[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Make a method with the parameters of `make`. The method yields the items of the listing, page after page."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        listing, cursor = make(*args, **kwargs), None
        while True:
            page = await self.send(listing.page(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    return update_wrapper(method, make)


def _gathers(make: Callable[P, Listing[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, list[T]]]:
    """Make a method with the parameters of `make`. The method returns the items of all pages of the listing in one
    list.
    """

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return [item async for item in _lists(make)(self, *args, **kwargs)]

    return update_wrapper(method, make)


def _follows(make: Callable[P, Feed[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Make a method with the parameters of `make`. The method yields the items of the feed as they come."""

    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._follow(make(*args, **kwargs))

    return update_wrapper(method, make)


class AsyncClient:
    """`async with AsyncClient(url, key) as client` opens a client. Its parameters, methods and errors are those of
    `Client`. Await a method that returns a value or a list. Iterate with `async for` over a method that yields items,
    such as `jobs`, `events` or `stream`. `timeout`: for how many seconds the client repeats a request that gets no
    answer. This time does not bound a single try.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout: float = 60.0) -> None:
        self._timeout = timeout
        url = url_of(url)
        auth = KeyAuth(url, key_of(key))
        self._http = httpx2.AsyncClient(base_url=url, auth=auth, timeout=_REQUEST_SECONDS, mounts=DIRECT)
        # Sends the requests to signed URLs. It has no API key, because the store must not get the key.
        self._store = httpx2.AsyncClient(timeout=_REQUEST_SECONDS, mounts=DIRECT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()
        await self._store.aclose()

    # --- runs
    submit = _sends(calls.submit)
    submit_many = _sends(calls.submit_many)
    get_run = _sends(calls.get_run)
    runs = _lists(calls.runs)
    rerun = _sends(calls.rerun)
    create_template = _sends(calls.create_template)
    signal = _sends(calls.signal)

    async def wait(self, run_id: Id, *, timeout: float | None = None) -> models.Run:
        """Wait until the run has ended, and return it. Raises TimeoutError after `timeout` seconds, whether the API
        answers or not. If the API keeps a connection open without an answer, the error may come up to 10 seconds later.
        Raises Unavailable if the API does not answer, and the client's own `timeout` ends first.
        """
        waiting = Waiting(run_id, timeout, self._timeout)
        while True:
            within = waiting.next_request()
            try:
                run = await self._send(calls.get_run(run_id, wait=HOLD_SECONDS), None, within)
            except Unavailable as error:
                waiting.after_error(error)
            pause = waiting.after_answer(run)
            if pause is None:
                return run
            await asyncio.sleep(pause)

    async def result(self, run_id: Id, *, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the run has succeeded, and return {step: result}. Raises RunFailed, TimeoutError."""
        run = await self.wait(run_id, timeout=timeout)
        results = result_of(run)
        while (cursor := next_cursor_of(run)) is not None:
            run = await self.get_run(run_id, cursor=cursor)
            results |= result_of(run)
        return results

    # --- jobs of every kind
    get_job = _sends(calls.get_job)
    jobs = _lists(calls.jobs)
    explain = _sends(calls.explain)
    cancel = _sends(calls.cancel)
    retry = _sends(calls.retry)
    delete = _sends(calls.delete)
    read_events = _sends(calls.read_events)
    read_logs = _sends(calls.read_logs)
    events = _follows(calls.events)
    logs = _follows(calls.logs)
    stream = _follows(calls.stream)

    # --- bulk operations
    operate = _sends(calls.operate)
    preview = _sends(calls.preview)
    get_operation = _sends(calls.get_operation)
    operations = _lists(calls.operations)
    refusals = _lists(calls.refusals)

    # --- dead letters, the fleet
    dead_letters = _lists(calls.dead_letters)
    dead_letter_groups = _sends(calls.dead_letter_groups)
    replay_dead_letters = _sends(calls.replay_dead_letters)
    queues = _gathers(calls.queues)
    workers = _gathers(calls.workers)

    # --- pictures, models, generations
    get_picture = _sends(calls.get_picture)
    generate = _sends(calls.generate)
    get_generation = _sends(calls.get_generation)

    async def upload_picture(
        self,
        path: Path | str,
        variants: Sequence[str] = (),
        *,
        content_type: str | None = None,
        priority: calls.Priority = "normal",
        tags: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> models.PictureAccepted:
        """Upload the picture at `path` and start its processing. `content_type`: the picture's content type; None: the
        client derives it from the file's extension.
        """
        path = Path(path)
        media_type = content_type or calls.content_type_of(path)
        ticket = await self.send(calls.upload_ticket(path, media_type))
        await self._put(calls.put_bytes(ticket, path, media_type), path, on_progress)
        return await self.send(calls.complete_upload(ticket, variants, priority=priority, tags=tags))

    async def convert(
        self,
        path: Path | str,
        *,
        user_id: str,
        model_id: int,
        version: str,
        platform: str,
        reference_images: Sequence[Path | str] = (),
        key: str | None = None,
        on_progress: OnProgress | None = None,
        **options: str,
    ) -> models.Conversion:
        """Upload the ONNX model (a neural network) at `path`, and begin to convert it for a chip. `platform`: the
        chip's number, for example "720". `options`: further fields of the form. `key`: the idempotency key.
        """
        call = calls.convert(
            path,
            user_id=user_id,
            model_id=model_id,
            version=version,
            platform=platform,
            reference_images=reference_images,
            options=options,
            key=key,
        )
        return await self._send(call, partial(form_of, call, on_progress))

    # --- the requests

    async def send(self, call: Call[T]) -> T:
        """Send a request of `leasehold.client.calls`. Repeat it while the API does not answer, but not beyond
        `timeout`.

        Raises ApiError, Unavailable.
        """
        return await self._send(call, None)

    async def _send(self, call: Call[T], form: MakeForm | None, within: float | None = None) -> T:
        """Do what `send` does. `form`: makes the form of the request, if it has one. `within`: how many seconds the
        caller waits, if it does not wait for the client's whole `timeout`.
        """
        call = call.with_key()
        tries = self._tries(call, within)
        while True:
            try:
                outcome = await self._try(call, form, tries)
            except ApiError as refusal:
                # `have_done`: the API refuses this try because an earlier try, whose answer was lost, has succeeded.
                if not tries.have_done(refusal):
                    raise
                return await self._result_of_done(call, refusal)
            # `outcome`: the API's answer, or the seconds until the next try.
            if not isinstance(outcome, float):
                return parse_answer(call, outcome)
            await asyncio.sleep(outcome)

    async def _result_of_done(self, call: Call[T], refusal: ApiError) -> T:
        """The result of a call that an earlier try has carried out. Raises `refusal` if the API does not return the
        result.
        """
        if call.read_done is None:
            return call.parse(None)
        try:
            return await self.send(call.read_done)
        except ApiError:  # for example, the API key may change the job but not read it
            raise refusal from None

    def _tries(self, call: Call[Any], within: float | None = None) -> Tries:
        return Tries(call, str(self._http.base_url), self._timeout, within=within)

    async def _try(self, call: Call[Any], form: MakeForm | None, tries: Tries) -> httpx2.Response | float:
        """Send the request once. Returns its answer, or the seconds until the next try."""
        with ExitStack() as stack:
            form_options = {} if form is None else form(stack)
            try:
                answer = await self._http.request(
                    call.method,
                    call.path,
                    timeout=tries.request_seconds(_REQUEST_SECONDS),
                    **options_of(tries.next_call()),
                    **form_options,
                )
            except httpx2.TransportError as error:
                return tries.after_error(error)
        pause = tries.after_answer(answer)
        return answer if pause is None else pause

    async def _put(self, call: Call[None], path: Path, on_progress: OnProgress | None) -> None:
        """Upload the file at `path` to the signed URL of the call. Each try reads the file from its beginning."""
        tries = Tries.of_upload(call, self._timeout)
        while True:
            content = async_pieces(path, on_progress)
            try:
                answer = await self._store.request("PUT", call.path, headers=call.headers, content=content)
                pause = tries.after_answer(answer)
            except httpx2.TransportError as error:
                pause = tries.after_error(error)
            if pause is None:
                return
            await asyncio.sleep(pause)

    async def _follow(self, feed: Feed[T]) -> AsyncIterator[T]:
        """Yield the items until the job ends. After a lost connection, a new connection resumes after the last item."""
        following = Following(feed, self._tries)
        while True:
            call = following.connect()
            try:
                async with self._http.stream("GET", call.path, params=call.params, headers=call.headers) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    # None: this answer brings the items.
                    pause = following.after_answer(answer)
                    if pause is None:
                        async for text in answer.aiter_text():
                            for item in following.items(text):
                                yield item
            except httpx2.TransportError as error:
                pause = following.after_error(error)
            if pause is None and not following.advanced:  # this connection brought no item, and perhaps no item is left
                if following.job_has_ended:
                    return
                pause = following.after_nothing(await self.send(calls.get_job(following.job_id)))
            if pause is not None:
                await asyncio.sleep(pause)
