"""Decides, for a client that waits for a run's end, when the next request follows and when the wait is over.

`Client` and `AsyncClient` both use this module. They send the requests and pause. This module does no input or output.
"""

from __future__ import annotations

from time import monotonic
from typing import NoReturn

from leasehold.client.calls import Id
from leasehold.client.errors import Unavailable
from leasehold.client.models import Run
from leasehold.client.retrying import pause_after

#: How long the API holds a request that waits for a change, in seconds. Then the client sends the request again.
HOLD_SECONDS = 20.0
#: An answer counts as immediate if it takes less than this many seconds. The API has not held the request of such an
#: answer.
_AT_ONCE_SECONDS = 0.5


class Waiting:
    """One wait for the end of a run. `timeout`: for how many seconds the caller waits; None: as long as it takes.
    `client_timeout`: for how many seconds the client repeats a request that gets no answer.
    """

    def __init__(self, run_id: Id, timeout: float | None, client_timeout: float) -> None:
        self._run_id = run_id
        self._timeout = timeout
        self._client_timeout = client_timeout
        self._deadline = None if timeout is None else monotonic() + timeout
        self._sent_at = 0.0
        self._left: float | None = None  # the seconds for which the caller still waited when the request began
        self._run: Run | None = None  # as the last answer described it
        self._idle_answers = 0  # how many answers in a row were immediate and said nothing new

    def next_request(self) -> float | None:
        """Begin the next request. Returns for how many seconds the caller still waits; None: as long as it takes."""
        self._sent_at = monotonic()
        self._left = None if self._deadline is None else max(0.0, self._deadline - self._sent_at)
        return self._left

    def after_answer(self, run: Run) -> float | None:
        """Seconds until the next request; None: the run has ended. Raises TimeoutError if the caller waits no longer.

        The API answers when the run has changed, or when it has held the request for as long as it was asked to. But a
        proxy may drop the parameter `wait`, and an API holds no request while it stops. So the pause grows with each
        answer in a row that is immediate and says nothing new.
        """
        if run.ended:
            return None
        now = monotonic()
        if self._deadline is not None and now >= self._deadline:
            raise TimeoutError(f"run {self._run_id} has not ended after {self._timeout} s: it is {run.status}")
        is_idle = run == self._run and now - self._sent_at < _AT_ONCE_SECONDS
        self._run = run
        if not is_idle:
            self._idle_answers = 0
            return 0.0
        self._idle_answers += 1
        pause = pause_after(self._idle_answers)
        return pause if self._deadline is None else min(pause, self._deadline - now)

    def after_error(self, error: Unavailable) -> NoReturn:
        """Raises `error`, or TimeoutError if the caller's time was shorter than the client's `timeout`."""
        if self._left is None or self._left >= self._client_timeout:
            raise error
        raise TimeoutError(
            f"it is unknown whether run {self._run_id} has ended after {self._timeout} s: {error}"
        ) from error
