"""Decides when a client sends a request again, and when it stops and raises an error.

The module does no input or output, so `Client` and `AsyncClient` both use it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import httpx2

from leasehold.client.calls import Call
from leasehold.client.errors import ApiError, Unavailable

#: With these statuses the API, or a proxy in front of the API, says that it cannot answer now.
AWAY_STATUSES = frozenset({502, 503, 504})
TOO_MANY = 429
_CONFLICT = 409
#: Another cell (one of several installations that share the tenants) serves the tenant of the key.
_WRONG_CELL = 421
#: The error code of the answer while the API still works on an earlier try of the same request.
_IN_FLIGHT = "idempotency_key_in_flight"
#: Seconds: the bound of the pause after the first failure, and of the longest pause. The bound doubles with each
#: failure.
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0
#: For this many seconds after the caller's deadline, a client still waits for the answer to a try.
_ANSWER_SECONDS = 10.0
#: After this many doublings the bound is higher than _LAST_PAUSE, so the exponent stops there. Without this limit, many
#: tries would end in an error, because 2.0 ** 1024 is too large for a float.
_MAX_DOUBLINGS = 10
#: These errors mean that the request has not been sent.
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class Tries:
    """The tries of one call. No try begins after `seconds`. `within`: the number of seconds for which the caller waits.
    If it is smaller than `seconds`, no try begins after `within`. `url`: the server, for error messages. `unexplained`:
    the message of the error if an answer gives no reason for its refusal.
    """

    def __init__(
        self,
        call: Call[Any],
        url: str,
        seconds: float,
        *,
        within: float | None = None,
        unexplained: str = "The API gave no reason.",
    ) -> None:
        seconds = seconds if within is None else min(seconds, within)
        self._call = call
        self._url = url
        self._unexplained = unexplained
        self._seconds = seconds
        self._is_waited_for = within is not None  # whether the caller waits only for `within` seconds
        now = monotonic()
        self._deadline = now + seconds
        self._waits_until = None if within is None else now + within
        self._failures = 0
        self._has_changed_cell = False
        self._may_be_done = False  # whether the API may have carried out an earlier try

    def request_seconds(self, at_most: float) -> float:
        """How long the next try may take: `at_most` seconds. With `within`, the try must also end at most
        _ANSWER_SECONDS after the deadline.
        """
        if not self._is_waited_for:
            return at_most
        return min(at_most, max(0.0, self._deadline - monotonic()) + _ANSWER_SECONDS)

    def next_call(self) -> Call[Any]:
        """The call as the next try sends it. A call may have the parameter `wait`: for at most this many seconds the
        API waits for a change before it answers. With `within`, this method shortens `wait`, so that the API does not
        wait longer than the caller. The API also answers at least half of _ANSWER_SECONDS before the try's time
        (`request_seconds`) is over, so that the answer arrives in time.
        """
        if self._waits_until is None or "wait" not in self._call.params:
            return self._call
        now = monotonic()
        longest = max(0.0, self._deadline - now) + _ANSWER_SECONDS / 2
        wait = min(self._call.params["wait"], longest, max(0.0, self._waits_until - now))
        return replace(self._call, params={**self._call.params, "wait": wait})

    def after_error(self, error: httpx2.TransportError) -> float:
        """Seconds until the next try. Raises Unavailable if no try may follow."""
        # A call is `repeatable` if sending it twice does the same as sending it once.
        if not (self._call.repeatable or isinstance(error, NOT_SENT)):
            reason = str(error) or type(error).__name__
            raise Unavailable(self._url, seconds=None, reason=reason, key=self._call.key, may_be_done=True) from error
        self._may_be_done |= not isinstance(error, NOT_SENT)
        pause = self._pause_before_next_try(None)
        if pause is None:
            raise self._unavailable(str(error) or type(error).__name__) from error
        return pause

    def after_answer(self, answer: httpx2.Response) -> float | None:
        """Seconds until the next try; None: the request has succeeded. Raises ApiError or Unavailable if no try may
        follow. A redirect is not followed, and is no success.
        """
        if answer.is_success:
            return None
        if answer.status_code == _WRONG_CELL and self._call.files and not self._has_changed_cell:
            # KeyAuth (the `auth` of both clients) has read the right cell's address from this answer. KeyAuth itself
            # repeats a request without files. A form with files goes to that address with the next try.
            self._has_changed_cell = True
            return 0.0
        problem = problem_of(answer)
        is_away = answer.status_code in AWAY_STATUSES
        # The API has not begun this request, or still works on an earlier try of it.
        is_busy = answer.status_code == TOO_MANY or is_in_flight(answer.status_code, problem)
        api_error = ApiError(answer.status_code, problem or {"detail": self._unexplained}, self._call.key)
        if not is_busy and not (is_away and self._call.repeatable):
            raise api_error
        # A proxy may have lost the API's answer, or the API may have lost its connection to the database.
        self._may_be_done |= is_away
        pause = self._pause_before_next_try(seconds_of_header(answer.headers.get("Retry-After")))
        if pause is not None:
            return pause
        if is_away or self._is_waited_for:  # `Client.wait` makes its TimeoutError from an Unavailable
            raise self._unavailable(str(api_error))
        raise api_error

    def have_done(self, refusal: ApiError) -> bool:
        """Whether the API refuses this try because an earlier try, whose answer was lost, has done the request. Some
        calls name the code of such a refusal (`done_code`).
        """
        return self._may_be_done and refusal.code == self._call.done_code

    @classmethod
    def of_upload(cls, call: Call[None], seconds: float) -> Tries:
        """The tries of an upload to the object store. The store explains a refusal in XML or not at all."""
        refusal = "The object store refused the upload. Its signed URL may have expired: try again."
        return cls(call, "the object store", seconds, unexplained=refusal)

    def _pause_before_next_try(self, least_seconds: float | None) -> float | None:
        """Seconds until the next try: `least_seconds` (the API's Retry-After), plus a random part whose bound doubles
        with each failure. Returns None if the next try would come after the deadline.
        """
        self._failures += 1
        pause = (least_seconds or 0.0) + pause_after(self._failures)
        return pause if monotonic() + pause < self._deadline else None

    def _unavailable(self, reason: str) -> Unavailable:
        return Unavailable(self._url, self._seconds, reason, self._call.key)


def pause_after(failures: int) -> float:
    """Seconds until the next try, after this number of failures in a row. The pause is random: between half of a bound
    and the bound, which doubles with each failure.
    """
    longest_pause = min(_LAST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 1, _MAX_DOUBLINGS))
    return random.uniform(longest_pause / 2, longest_pause)  # noqa: S311 - no secret


def problem_of(answer: httpx2.Response) -> dict[str, Any]:
    """The problem (RFC 9457) in an answer that is an error; empty if the answer is not from the API."""
    try:
        problem = answer.json()
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def is_in_flight(status: int, problem: Mapping[str, Any]) -> bool:
    """Whether the API refuses the request because it still works on an earlier try with the same idempotency key."""
    return status == _CONFLICT and problem.get("code") == _IN_FLIGHT


def seconds_of_header(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After. Returns None without this header, or if it has a date (the API sends no date)."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
