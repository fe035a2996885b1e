"""What every provider of generations can do, and how it says what came of it.

A provider is a client of somebody else's HTTP service. It keeps nothing: what must survive is in the task's note.
Whatever goes wrong is one of the errors below, whose texts hold no credential and no URL's query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A picture that the generation begins with. `url`: where the provider finds it."""

    url: str
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made. `token`: the same for every attempt at one generation, of another for no other.

    `extra`: what the caller says to this provider alone, by the provider's own names. `callback`: where the provider
    may say that it has news, if it can.
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
    deadline_seconds: int | None = None  # how long we will wait: providers that can, stop then
    extra: Mapping[str, object] | None = None
    callback: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The provider works on it. `ref`: its name there, and all that polling needs."""

    ref: str


@dataclass(frozen=True, slots=True)
class Working:
    """Not done. `state`: the provider's own word; `after`: seconds that it asked us to wait, if it did."""

    state: str
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """Done. `urls`: where the files are, for a while; at least one."""

    urls: tuple[str, ...]


class ProviderError(Exception):
    """`code` is stable; `message` is told to the caller; `fail_code`: the provider's own code, if it gave one."""

    def __init__(self, code: str, message: str, *, fail_code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fail_code = fail_code


class Rejected(ProviderError):
    """It will never do this: a bad order or credential, refused content, or it failed for good. Nothing was bought,
    or what was bought has failed.
    """


class TryLater(ProviderError):
    """Not now, and nothing was bought by this very request: busy, over a limit, or down before the request went out.

    `after`: seconds that the provider asked us to wait, if it did.
    """

    def __init__(self, code: str, message: str, *, fail_code: str | None = None, after: float | None = None) -> None:
        super().__init__(code, message, fail_code=fail_code)
        self.after = after


class OutcomeUnknown(ProviderError):
    """The request may have arrived, and no answer that can be read came back. After a submit: it may be bought."""


class Provider(Protocol):
    """`takes_token`: a submit repeated with the same token buys nothing more; it gives the first one's `Taken`."""

    @property
    def name(self) -> str: ...

    @property
    def takes_token(self) -> bool: ...

    async def submit(self, order: Order, credential: str) -> Taken | Made:
        """Raises Rejected, TryLater, OutcomeUnknown."""

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:
        """Raises Rejected (it failed, expired or is unknown there), TryLater, OutcomeUnknown (just ask again)."""

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        """Whether it will be stopped there; False where it cannot be. Raises TryLater, OutcomeUnknown."""
