"""The interface of every provider (a service that makes images or videos): its methods, their answers and errors.

An object that implements `Provider` is a client of the provider's HTTP service. It keeps no state. The steps write into
the task's note what the next attempt must know. A method fails with one of the errors below. The messages of these
errors contain no credential, and their URLs lack the query (the part after `?`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A picture that the generation starts from. `url`: the address from which the provider fetches it."""

    url: str
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """A request to make images or a video. `token`: the idempotency token. All attempts of a generation send the same
    token, and no other generation sends it.

    `extra`: further fields for this provider, by the provider's own names. `callback`: the address that the provider
    may call when the state of the order changes.
    """

    kind: Kind
    token: str
    prompt: str
    model: str | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    sample_strength: float | None = None
    images: tuple[SourceImage, ...] = ()
    is_pro: bool = False
    duration_ms: int | None = None
    ratio: str | None = None
    deadline_seconds: int | None = None  # the time until the job's deadline, for providers that accept a deadline
    extra: Mapping[str, object] | None = None
    callback: str | None = None

    @property
    def whole_seconds(self) -> int | None:
        """The duration for a provider that counts in seconds: rounded, and at least 1; None: the client named no
        duration.
        """
        return None if self.duration_ms is None else max(1, round(self.duration_ms / 1000))


@dataclass(frozen=True, slots=True)
class Accepted:
    """The provider works on the order. `ref`: the provider's id of the order, by which `poll` and `cancel` name it."""

    ref: str


@dataclass(frozen=True, slots=True)
class Working:
    """The order is not finished. `state`: the provider's own word. `after`: the seconds to wait, if the provider names
    a number.
    """

    state: str
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The order is finished. `urls`: at least one link to a file. The links expire."""

    urls: tuple[str, ...]


class ProviderError(Exception):
    """A failed request to a provider. `code` is stable, and `message` is for the client. `fail_code`: the provider's
    own code, if the answer has one.
    """

    def __init__(self, code: str, message: str, *, fail_code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fail_code = fail_code


class Rejected(ProviderError):
    """The provider refuses the request for good, because the order is invalid, the provider refuses the content, or the
    generation failed. A submit that was rejected has bought nothing.
    """


class NoAccess(ProviderError):
    """This installation has no access to the provider, because the credential is missing or refused, the account cannot
    pay, or the settings forbid the request. An operator can change that. This request has bought nothing. But an order
    that the provider accepted before the error may still be finished, and is paid for.
    """


class TryLater(ProviderError):
    """The provider is busy, over a limit, or was down before the request went out. This request has bought nothing.

    `after`: the seconds to wait, if the provider names a number.
    """

    def __init__(self, code: str, message: str, *, fail_code: str | None = None, after: float | None = None) -> None:
        super().__init__(code, message, fail_code=fail_code)
        self.after = after


class OutcomeUnknown(ProviderError):
    """The request may have arrived, but no readable answer came back. If the request was a submit, it may have bought
    something.
    """


class Provider(Protocol):
    """The client of a provider. `honours_token`: whether a repeated submit with the same token buys nothing more, and
    returns the `Accepted` of the first submit.
    """

    @property
    def name(self) -> str: ...

    @property
    def honours_token(self) -> bool: ...

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        """Send the order. Raises Rejected, NoAccess, TryLater or OutcomeUnknown."""

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        """Ask for the state of the order. Raises Rejected (the order failed, expired or is unknown), NoAccess, TryLater
        or OutcomeUnknown. After each of the last three, poll again.
        """

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        """Ask the provider to stop the order. Returns True if the order is stopped, and False if the provider cannot
        stop it. Raises Rejected, NoAccess, TryLater or OutcomeUnknown. After each of the last three, ask again.
        """
