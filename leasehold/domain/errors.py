"""Every error of the platform, by meaning.

LeaseholdError
├── RequestError                what a caller asked for cannot be done: has a stable code; api/http/problems.py maps it
│   ├── Unauthenticated         401  no key, a bad key, a revoked key
│   ├── Forbidden               403  the key lacks the scope
│   ├── NotFound                404  not there, or somebody else's
│   ├── Conflict                409  not in this state
│   ├── Gone                    410  it was there, and has expired
│   ├── BodyTooSlow             408  the body did not arrive in time
│   ├── BodyTooLarge            413  more bytes than the address takes
│   ├── Unsupported             415  a kind that this installation cannot take
│   ├── Invalid                 422  well-formed, but not acceptable
│   ├── TooMany                 429  a limit: try again later
│   ├── BadGateway              502  a service that we act for the caller with did not do its part
│   └── Unavailable             503  something we need is down: try again
├── BadSetting                  a LEASEHOLD_* variable that cannot be used: refused at start-up
├── DeclarationError            a pipeline is declared wrongly: refused at start-up
├── LeaseLost                   a write carried a lease that is no longer the task's
├── StepError                   how an attempt at a step ended badly
│   ├── Retryable               worth another attempt, now or `after`
│   │   └── Unforeseen          an isolated handler raised what is none of these: worth one more attempt, soon
│   ├── Permanent               cannot succeed: fails the job at once
│   ├── StepTimeout             ran past its time limit
│   └── ChildCrashed            the child process died by a signal or its memory limit: poison, two at most
├── StoreError                  the object store
│   ├── StoreAbsent             there is none: LEASEHOLD_OBJECT_STORE=none
│   ├── ObjectMissing           no such object
│   ├── ObjectExists            a create-only put met an object with other bytes
│   ├── ObjectCorrupt           size or sha256 differ from what the row says
│   ├── ObjectTooLarge          more bytes than the reader allows
│   └── StoreUnavailable        timeouts, 5xx, refused connections: try again
└── BrokerUnavailable           not connected, or a publish was not confirmed

Cancelled(BaseException)        the job was cancelled; `except Exception` in user code must not swallow it
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from datetime import timedelta
from math import ceil


class LeaseholdError(Exception):
    """The root: catch it to catch everything the platform raises on purpose."""


class BadSetting(LeaseholdError):
    """`name`: the variable; `sentence`: what is wrong, without a secret in it."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}.")
        self.name = name


class RequestError(LeaseholdError):
    """A request that cannot be done. `code` is stable and machine-readable; the message is for people. `headers`: what
    an answer over HTTP says besides.
    """

    def __init__(
        self, code: str, message: str, *, retry_after: float | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after  # seconds
        self.headers = headers or {}


class Unauthenticated(RequestError):
    pass


class Forbidden(RequestError):
    pass


class NotFound(RequestError):
    pass


class Conflict(RequestError):
    pass


class Gone(RequestError):
    pass


class BodyTooLarge(RequestError):
    pass


class BodyTooSlow(RequestError):
    pass


class Unsupported(RequestError):
    pass


class Invalid(RequestError):
    pass


class TooMany(RequestError):
    """`policy` names the limit, `most` is what it allows (in `window` seconds, where it is a rate). An answer says both
    as RateLimit fields.
    """

    def __init__(
        self, code: str, message: str, *, policy: str, most: int, retry_after: float, window: int | None = None
    ) -> None:
        per = "" if window is None else f";w={window}"
        fields = {
            "RateLimit-Policy": f'"{policy}";q={most}{per}',
            "RateLimit": f'"{policy}";r=0;t={max(1, ceil(retry_after))}',
        }
        super().__init__(code, message, retry_after=retry_after, headers=fields)


class BadGateway(RequestError):
    pass


class Unavailable(RequestError):
    pass


class DeclarationError(LeaseholdError):
    """A pipeline, step or handler is declared wrongly."""


class LeaseLost(LeaseholdError):
    """The task is no longer ours: another claim, a cancel or the sweeper took it. Write nothing more."""


class StepError(LeaseholdError):
    """An attempt failed. `code` is stable; the message is shown to the job's owner, so it holds no secrets."""

    retryable: bool = True

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Retryable(StepError):
    """Worth another attempt. `after` overrides the retry ladder's next delay."""

    def __init__(self, message: str, *, code: str = "retryable", after: timedelta | None = None) -> None:
        super().__init__(code, message)
        self.after = after


class Unforeseen(Retryable):
    """An isolated handler raised something that it did not mean to: same input, same code, same end. One more attempt
    tells a fault of the machine from one of the code.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="handler_error")


class Permanent(StepError):
    """Cannot succeed however often it is tried: the job fails at once."""

    retryable = False


class StepTimeout(StepError):
    """The step ran longer than its `timeout`; its child was killed."""


class ChildCrashed(StepError):
    """The child process died by a signal or ran out of its memory limit."""


class StoreError(LeaseholdError):
    """The object store said no, or nothing."""


class StoreAbsent(StoreError):
    """This installation has no object store, and says so."""


class ObjectMissing(StoreError):
    pass


class ObjectExists(StoreError):
    pass


class ObjectCorrupt(StoreError):
    pass


class ObjectTooLarge(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class BrokerUnavailable(LeaseholdError):
    """Not connected, or a publish was not confirmed: the message may or may not have been sent."""


class Cancelled(BaseException):
    """Raised inside a handler at its next checkpoint once its job is being cancelled."""


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or our share of it, has no more room: that says nothing of the work."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
