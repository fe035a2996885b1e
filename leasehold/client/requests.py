"""Converts a Call into a request of the HTTP library, and reads the answer. The sync and the async client use it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import httpx2

from leasehold.client.calls import Call
from leasehold.client.errors import ClientError, RunFailed
from leasehold.client.models import Run
from leasehold.client.uploading import OnProgress, ReportedFile
from leasehold.domain.errors import WrongCell

T = TypeVar("T")  # the result of a call

#: The `mounts` of each client of the HTTP library. With them, requests to this machine use no proxy. The environment
#: may name a proxy (HTTP_PROXY), and a proxy does not reach the servers of this machine.
DIRECT: Mapping[str, None] = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
# HTTP statuses.
_NO_CONTENT = 204
_WRONG_CELL = 421


class KeyAuth(httpx2.Auth):
    """Adds the API key to each request, and sends the request to the cell that serves the key's tenant. (A cell is one
    of several installations that divide the tenants among them.)

    A cell that does not serve the tenant answers 421 (WrongCell), with the address of the cell that does. KeyAuth then
    repeats the request once at that address, and sends all later requests there. Exception: if `url` is https, KeyAuth
    ignores an http address, because the key would be sent unencrypted.
    """

    def __init__(self, url: str, key: str) -> None:
        self._header = f"Bearer {key}"
        self._configured_base = httpx2.URL(url)
        self._base = self._configured_base  # the address of the cell that gets the next request

    # The HTTP library calls this for each request, and sends the requests that it yields.
    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers["Authorization"] = self._header
        path = request.url.raw_path.removeprefix(self._configured_base.raw_path.rstrip(b"/"))
        self._set_address(request, path)
        answer = yield request  # the HTTP library sends the request, and gives its answer
        if answer.status_code != _WRONG_CELL or not self._switch_to(answer.headers.get(WrongCell.HEADER, "")):
            return
        # KeyAuth does not repeat a form with files, because it cannot read the files twice. The client opens the files
        # again, and sends the form as its next try (retrying.Tries).
        if isinstance(request.stream, httpx2.ByteStream):
            self._set_address(request, path)
            yield request

    def _set_address(self, request: httpx2.Request, path: bytes) -> None:
        request.url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path)
        request.headers["Host"] = request.url.netloc.decode()

    def _switch_to(self, address: str) -> bool:
        """Send requests to `address` from now on. If `address` is no usable URL, change nothing and return False."""
        try:
            base = httpx2.URL(address)
        except httpx2.InvalidURL:
            return False
        schemes = {"https"} if self._configured_base.scheme == "https" else {"http", "https"}
        if not base.host or base.scheme not in schemes:
            return False
        self._base = base
        return True


def url_of(url: str | None) -> str:
    """The API's URL: `url`, else the variable LEASEHOLD_URL of the environment, else the URL of a local API. Raises
    ClientError for a text that is no URL of an API.
    """
    url = url or os.environ.get("LEASEHOLD_URL") or "http://127.0.0.1:8000"
    try:
        parsed_url = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ClientError(f"the API's URL {url!r} is not a URL: {error}") from None
    if parsed_url.scheme not in ("http", "https") or not parsed_url.host:
        raise ClientError(f"the API's URL {url!r} must begin with http:// or https:// and a host")
    return url


def key_of(key: str | None) -> str:
    """The API key: `key`, else the variable LEASEHOLD_API_KEY. Raises ClientError if it is missing or malformed."""
    key = key or os.environ.get("LEASEHOLD_API_KEY")
    if not key:
        raise ClientError("give an API key, or set LEASEHOLD_API_KEY to one (leasehold keys create)")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ClientError("the API key has characters that no key has: copy the whole key")
    return key


def options_of(call: Call[Any]) -> dict[str, Any]:
    """The options of the HTTP library's request."""
    options: dict[str, Any] = {"params": dict(call.params), "headers": dict(call.headers)}
    return options if call.body is None else options | {"json": dict(call.body)}


def form_of(call: Call[Any], on_progress: OnProgress | None, stack: ExitStack) -> dict[str, Any]:
    """The call's form. Its files are open until `stack` closes them, and each try of the request opens them again."""
    total_bytes = sum(path.stat().st_size for _, path in call.files)
    sent_bytes = [0]  # a list, because all ReportedFiles add to its one number
    files = [
        (field, (path.name, ReportedFile(stack.enter_context(path.open("rb")), on_progress, total_bytes, sent_bytes)))
        for field, path in call.files
    ]
    return {"data": dict(call.form or {}), "files": files}


def json_of(answer: httpx2.Response) -> Any:
    """The answer's JSON; None: the answer has no content. Raises ClientError for an answer that is not JSON."""
    if answer.status_code == _NO_CONTENT:
        return None
    try:
        return answer.json()
    except ValueError:
        raise ClientError(f"{answer.url} answered {answer.status_code} without JSON: is it a Leasehold API?") from None


def parse_answer(call: Call[T], answer: httpx2.Response) -> T:
    """The result of the call. Raises ClientError for an answer that cannot be the API's."""
    body = json_of(answer)
    try:
        return call.parse(body)
    except (LookupError, TypeError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        raise ClientError(
            f"{answer.url} answered {answer.status_code} with JSON of another form: is it a Leasehold API?"
        ) from error


def result_of(run: Run) -> dict[str, Any]:
    """The results of the steps in this answer, as {step: result}. Raises RunFailed if the run has not succeeded."""
    if run.status == "succeeded":
        return run.result or {}
    error = run.error  # None: the run was cancelled
    code, message = (run.status, "It has no error.") if error is None else (error.code, error.message)
    raise RunFailed(run.id, run.status, code, message)


def next_cursor_of(run: Run) -> str | None:
    """The cursor of the next page of the run's steps; None: the answer has the last page."""
    return None if run.progress is None else run.progress.next_cursor
