"""The errors that the clients raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leasehold.domain.errors import LeaseholdError
from leasehold.domain.sentences import full_stop


class ClientError(LeaseholdError):
    """The root of the errors that the clients raise."""


class ApiError(ClientError):
    """The API refused the request. `status`: the HTTP status. `code`: a stable code for programs. `errors`: the wrong
    values of the request, each with its place and the reason; empty if the API names none. `request_id`: the request's
    id in the logs of the API. `key`: the request's idempotency key, if it had one.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], key: str | None = None) -> None:
        self.status = status
        self.code = str(problem.get("code") or f"http_{status}")
        self.message = str(problem.get("detail") or problem.get("title") or "The API gave no reason.")
        errors = problem.get("errors")
        self.errors: list[Any] = list(errors) if isinstance(errors, (list, tuple)) else []
        self.request_id = problem.get("request_id")
        self.key = key
        super().__init__(f"{self.code}: {self.message}")


class Unavailable(ClientError):
    """The API did not answer within the client's `timeout`, or an answer was lost and the client must not repeat the
    request.

    `key`: the idempotency key. With the same key, the API does the request only once. None: the request had no key. A
    request that only reads is safe to repeat. Before you repeat another request, check whether the API has done it.
    """

    def __init__(
        self, url: str, seconds: float | None, reason: str, key: str | None, *, may_be_done: bool = False
    ) -> None:
        """`seconds`: how long the client tried the request; None: it tried once. `may_be_done`: the API may have
        done the request, and a repetition may do it twice.
        """
        outcome = "did not answer" if seconds is None else f"has not answered for {seconds:g} s"
        advice = "" if key is None else f" Try again with key={key!r}."
        if may_be_done:
            advice = " The request may have been done: check before you send it again."
        #: What happened, without the advice.
        self.what_happened = f"{url} {outcome}: {full_stop(reason)}"
        super().__init__(self.what_happened + advice)
        self.key = key


class RunFailed(ClientError):
    """The run that a caller waited for has not succeeded. `status`: failed, cancelled or expired. A cancelled run has
    no error, so its `code` is the status.
    """

    def __init__(self, run_id: object, status: str, code: str, message: str) -> None:
        super().__init__(f"run {run_id} {status}: {code}: {message}")
        self.run_id = run_id
        self.status = status
        self.code = code
        self.message = message
