"""What the clients raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leasehold.domain.errors import LeaseholdError


class ClientError(LeaseholdError):
    """The root of what the clients raise."""


class ApiError(ClientError):
    """The API refused the request. `status`: of HTTP. `code`: stable, for programs. `errors`: where the request is
    wrong, if the API says so. `key`: the request's idempotency key, if it had one.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], key: str | None = None) -> None:
        self.status = status
        self.code = str(problem.get("code", f"http_{status}"))
        self.message = str(problem.get("detail") or problem.get("title") or "The API gave no reason.")
        self.errors: list[Any] = list(problem.get("errors") or ())
        self.request_id = problem.get("request_id")
        self.key = key
        super().__init__(f"{self.code}: {self.message}")


class Unavailable(ClientError):
    """No answer within the client's `timeout`. `key`: the idempotency key of the request. Send the request again with
    it: what an earlier try has done is not done twice. None: the request has no key; look at what it has done first.
    """

    def __init__(self, url: str, seconds: float, reason: str, key: str | None) -> None:
        hint = "" if key is None else f" Try again with key={key!r}."
        super().__init__(f"{url} does not answer for {seconds:g} s: {reason}.{hint}")
        self.key = key


class RunFailed(ClientError):
    """A run that was waited for has not succeeded. `status`: failed, cancelled or expired."""

    def __init__(self, run_id: object, status: str, code: str, message: str) -> None:
        super().__init__(f"run {run_id} {status}: {code}: {message}")
        self.run_id = run_id
        self.status = status
        self.code = code
        self.message = message
