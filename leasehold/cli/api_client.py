"""The HTTP client of the commands that call the API. It turns refusals into messages for the terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, NoReturn, Self

import httpx2
import typer

from leasehold.cli.running import failure_printed
from leasehold.cli.terminal import harmless
from leasehold.client.calls import Call
from leasehold.client.requests import DIRECT, KeyAuth
from leasehold.client.retrying import (
    AWAY_STATUSES,
    NOT_SENT,
    TOO_MANY,
    is_in_flight,
    problem_of,
    seconds_of_header,
)
from leasehold.client.sse import ServerEvent, events_of
from leasehold.domain.errors import LeaseholdError
from leasehold.domain.sentences import full_stop

_NO_CONTENT = 204
#: The message of a refusal names at most this many wrong values.
_MAX_ERRORS = 5
#: The shortest pause before a request is sent again, in seconds.
_PAUSE_SECONDS = 1.0
#: When the answer to a request with an idempotency key is lost, the request is sent again for this many seconds.
_REPEAT_SECONDS = 20.0


class Refused(LeaseholdError):
    """The API refused the request, or did not answer. The message is for the terminal."""


class Interrupted(Refused):
    """The API does not answer, a stream broke, or the API (or a proxy in front of it) says that it cannot answer now.
    The caller may send the same request again.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0, may_be_done: bool = True) -> None:
        """`retry_after`: for how many seconds the API asked to wait. `may_be_done`: whether the API may have done the
        request.
        """
        super().__init__(message)
        self.may_be_done = may_be_done
        #: The pause before the request is sent again, in seconds.
        self.pause_seconds = max(_PAUSE_SECONDS, retry_after)


class Fields(dict[str, Any]):
    """A JSON object of an answer. If a command reads a field that the object lacks, the command prints an error and
    ends, because the answer is probably not from Leasehold. `Fields` does not raise Refused for this, because nobody
    would catch it: commands also read answers after the `with` block of `answers.api_client`, which catches Refused.
    """

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        """`source`: the beginning of the error's text, with the address that answered, and the status."""
        super().__init__(fields)
        self._source = source

    def __missing__(self, name: str) -> NoReturn:
        raise failure_printed(f"{self._source} with JSON that has no {name!r}: is it a Leasehold API?")


class ApiClient:
    """`with ApiClient(url, key) as api_client`. Each method that sends a request raises Refused if the API refuses the
    request, and Interrupted if the API does not answer or cannot answer now.
    """

    def __init__(self, url: str, key: str) -> None:
        # The timeout is longer than the API takes for any request, so that a slow answer does not look like no answer.
        self._http = httpx2.Client(base_url=url, auth=KeyAuth(url, key), timeout=40.0, mounts=DIRECT)
        self._is_away = False  # `_pause` has printed that the API is away, and no answer has come since then

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """`params`: the parameters of the URL. All methods leave out a parameter that is None."""
        return self._request("GET", path, params=without_none(params))

    def get_patiently(self, path: str, **params: Any) -> dict[str, Any]:
        """As `get`, but does not raise Interrupted: it sends the request again until the API answers."""
        while True:
            try:
                return self.get(path, **params)
            except Interrupted as error:
                self.pause_for(error)

    def pause_for(self, error: Interrupted) -> None:
        """Pause before a request is sent again. Use this for a request that may be tried for ever. The first pause
        prints to stderr why the command waits. Later pauses print nothing. When the API answers again, the command
        prints that it does, and the next pause counts as the first.
        """
        self._pause(error, "until the API answers")

    def _pause(self, error: Interrupted, how_long: str) -> None:
        """As `pause_for`. `how_long`: the words that say for how long the request is sent again."""
        if not self._is_away:
            self._is_away = True
            _print_to_stderr(f"{full_stop(str(error))} Trying again {how_long}.")
        time.sleep(error.pause_seconds)

    def _record_answer(self) -> None:
        if self._is_away:
            self._is_away = False
            _print_to_stderr("The API answers again.")

    def stream(self, path: str, *, last_event_id: str, **params: Any) -> Iterator[ServerEvent]:
        """Server-sent events until the API ends the stream. Raises Interrupted when the connection breaks."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last_event_id}
        with self._open_stream(path, params, headers) as answer:
            yield from events_of(answer.iter_text())

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._request("POST", path, json=body if body is not None else {})

    def post_once(self, path: str, body: dict[str, Any] | None = None, *, key: str | None) -> dict[str, Any]:
        """POST a request that makes something. It has an idempotency key, so the API does the request once, however
        often it is sent. `key`: the caller's own idempotency key; None: a new one.

        If the API may have done the request, but its answer is lost, this method sends the request again for
        _REPEAT_SECONDS, and prints to stderr as `pause_for` does. After that time it raises Interrupted, whose message
        has the idempotency key. Raises ClientError for a key that no request can have.
        """
        call = Call("POST", path, dict, keyed=True, key=key).with_key()
        deadline = monotonic() + _REPEAT_SECONDS
        may_be_done = False
        while True:
            try:
                return self._request("POST", path, json=body or {}, headers=dict(call.headers))
            except Interrupted as error:
                may_be_done = may_be_done or error.may_be_done
                if not may_be_done:
                    raise
                if monotonic() + error.pause_seconds >= deadline:
                    option = f"--idempotency-key {shlex.quote(call.headers['Idempotency-Key'])}"
                    advice = f"The request may be done. Try again with {option}: then nothing is done twice"
                    raise Interrupted(f"{full_stop(str(error))} {advice}") from error
                self._pause(error, f"for up to {_REPEAT_SECONDS:g} s")

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("PATCH", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._request("DELETE", path)

    def download(self, path: str, **params: Any) -> Iterator[bytes]:
        """The body of a GET, a piece at a time."""
        with self._open_stream(path, params) as answer:
            yield from answer.iter_bytes()

    @contextmanager
    def _open_stream(
        self, path: str, params: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx2.Response]:
        """Yields the answer to a GET before its body has arrived. The caller's `with` block reads the body. Raises
        Refused if the answer is an error, and Interrupted when the connection breaks.
        """
        try:
            with self._http.stream("GET", path, params=without_none(params), headers=headers) as answer:
                if not answer.is_success:
                    answer.read()
                    self._body_of(answer)  # raises Refused
                self._record_answer()
                yield answer
        except httpx2.HTTPError as error:
            raise self._interrupted_error(error) from error

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx2.HTTPError as error:
            raise self._interrupted_error(error) from error
        body = self._body_of(answer)
        self._record_answer()
        return body

    def _interrupted_error(self, error: httpx2.HTTPError) -> Interrupted:
        may_be_done = not isinstance(error, NOT_SENT)
        return Interrupted(f"{self._http.base_url} does not answer: {error}", may_be_done=may_be_done)

    def _body_of(self, answer: httpx2.Response) -> dict[str, Any]:
        """The JSON of the answer; {} for an answer without content. Raises Refused for an error, and for an answer that
        is not Leasehold's. Raises Interrupted if the request may be sent again.
        """
        if answer.status_code == _NO_CONTENT:
            return {}
        if not answer.is_success:
            self._check_availability(answer)
        try:
            body = answer.json(object_hook=partial(Fields, source=self._source(answer)))
        except ValueError as error:
            raise self._other_program_error(answer, "without JSON") from error
        if not isinstance(body, Fields):
            raise self._other_program_error(answer, "with JSON that is not an object")
        if not answer.is_success:
            raise Refused(_refusal(body, answer.status_code))
        return body

    def _check_availability(self, answer: httpx2.Response) -> None:
        """Raises Interrupted if the API, or a proxy in front of it, says that it cannot answer now. Also raises
        Interrupted if the API has not finished an earlier request with the same idempotency key.
        """
        problem = problem_of(answer)
        is_busy = answer.status_code == TOO_MANY  # the API has not begun the request
        if is_busy or answer.status_code in AWAY_STATUSES or is_in_flight(answer.status_code, problem):
            raise Interrupted(
                _refusal(problem, answer.status_code),
                retry_after=seconds_of_header(answer.headers.get("Retry-After")) or 0.0,
                may_be_done=not is_busy,
            )

    def _other_program_error(self, answer: httpx2.Response, how: str) -> Refused:
        """The error for an answer that is not Leasehold's. `how`: the form of the answer, such as `without JSON`."""
        return Refused(f"{self._source(answer)} {how}: is it a Leasehold API?")

    def _source(self, answer: httpx2.Response) -> str:
        return f"{self._http.base_url} answered {answer.status_code}"


def _print_to_stderr(sentence: str) -> None:
    # typer.echo writes to `sys.stderr`. While Rich shows bars, it replaces `sys.stderr`, so that lines stand above the
    # bars.
    typer.echo(harmless(f"leasehold: {sentence}"), err=True)


def _refusal(problem: Mapping[str, Any], status: int) -> str:
    """The problem as a sentence, with the first _MAX_ERRORS wrong values that it names."""
    errors = problem.get("errors")
    errors = [error for error in errors if isinstance(error, dict)][:_MAX_ERRORS] if isinstance(errors, list) else []
    wrong_values = [f"{error.get('parameter') or error.get('pointer')}: {error.get('detail')}" for error in errors]
    return "; ".join([f"{problem.get('code', status)}: {problem.get('detail', 'no reason given')}", *wrong_values])


def without_none(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}
