"""Sends requests to providers (services that make images or videos), and reads texts, ids and links from their answers.
Turns the HTTP status of an answer into an error, by the same rules for all providers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import orjson

from leasehold.domain.json_pointer import value_at
from leasehold.domain.sentences import full_stop
from leasehold.domain.storable import storable_text
from leasehold.pipelines.generation.provider import NoAccess, OutcomeUnknown, ProviderError, Rejected, TryLater
from leasehold.security.egress import AnswerTooLarge, Egress, EgressFailed, EgressRefused
from leasehold.settings import Settings

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_TIMEOUT_SECONDS = 30.0
#: For reuse, a RequestSender keeps at most this many idle connections to one host.
_REUSED_CONNECTIONS = 20
_MAX_MESSAGE_CHARACTERS = 500
#: An HTTP status -> the code of NoAccess.
NO_ACCESS = {401: "provider_unauthorized", 402: "provider_payment_required", 403: "provider_unauthorized"}
_TOO_MANY, _UNAVAILABLE = 429, 503  # HTTP statuses
#: A provider answers a cancel with one of these statuses if the order has ended, is no longer known, or cannot be
#: cancelled.
_CANNOT_STOP = frozenset({400, 404, 405, 409, 410, 422})


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """An answer that arrived completely. `body`: its body, parsed as JSON; None if the body is not JSON. `after`: the
    header Retry-After in seconds, if the answer has this header.
    """

    status: int
    body: Any
    after: float | None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP statuses

    def stopped(self) -> bool:
        """Whether the order is stopped, according to this answer to a cancel. False: the provider answers that it
        cannot stop the order. For an answer that says neither, raises the error that `refusal` makes, because the order
        may go on and cost money.
        """
        if self.is_success or self.status in _CANNOT_STOP:
            return self.is_success
        raise self.refusal()

    def refusal(self, message: str = "", fail_code: str | None = None) -> ProviderError:
        """The error for this answer: TryLater if the provider is busy, NoAccess for a status in NO_ACCESS, Rejected for
        any other refusal. OutcomeUnknown if the answer does not say whether the provider has done what was asked. If
        the status is successful, call this only if the body is not as the provider documents it.

        `message`, `fail_code`: the provider's own message and code, if the answer has them.
        """
        text = f"The provider answered {self.status}" + (f": {message[:_MAX_MESSAGE_CHARACTERS]}" if message else ".")
        if self.status == _TOO_MANY or (self.status == _UNAVAILABLE and self.after is not None):
            return TryLater("provider_busy", text, fail_code=fail_code, after=self.after)
        # A redirect, for example to a page about maintenance, says nothing about an order that may run.
        if self.status < 400 or self.status >= 500 or self.status == 408:  # noqa: PLR2004 - HTTP statuses
            return OutcomeUnknown("provider_error", text, fail_code=fail_code)
        if self.status in NO_ACCESS:
            return NoAccess(NO_ACCESS[self.status], text, fail_code=fail_code)
        return Rejected("provider_refused", text, fail_code=fail_code)


class RequestSender:
    """Sends requests over reused connections. But a request that buys something gets a new connection, because a reused
    connection may be dead. Then nobody would know whether the request has arrived.
    """

    def __init__(self, reusing: Egress, not_reusing: Egress) -> None:
        self._reusing = reusing
        self._not_reusing = not_reusing

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings) -> AsyncIterator[Self]:
        with_keepalive = Egress.from_settings(settings, keepalive=_REUSED_CONNECTIONS)
        async with with_keepalive as reusing, Egress.from_settings(settings) as not_reusing:
            yield cls(reusing, not_reusing)

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        buys: bool = False,
        seconds: float = _TIMEOUT_SECONDS,
    ) -> ProviderAnswer:
        """Send the request. `buys`: the request may cost money.

        Raises TryLater if the request certainly did not arrive, and OutcomeUnknown if it may have arrived. Raises
        NoAccess if the rules for outgoing requests forbid the request (EgressRefused).
        """
        request_headers = {"accept": "application/json", "user-agent": "leasehold", **headers}
        if body:
            request_headers.setdefault("content-type", "application/json")
        egress = self._not_reusing if buys else self._reusing
        try:
            answer = await egress.request(
                method, url, headers=request_headers, content=body, max_bytes=_MAX_ANSWER_BYTES, timeout=seconds
            )
        except EgressRefused as error:
            if error.code == "host_unknown":  # DNS may work again later
                raise TryLater("provider_unreachable", str(error)) from None
            raise NoAccess(error.code, str(error)) from None
        except AnswerTooLarge as error:
            raise OutcomeUnknown("provider_bad_answer", str(error)) from None
        except EgressFailed as error:
            if not error.sent:
                raise TryLater("provider_unreachable", "The provider could not be reached.") from None
            raise OutcomeUnknown("provider_no_answer", full_stop(f"The provider gave {error}")) from None
        return ProviderAnswer(answer.status, _parsed_json(answer.body), answer.retry_after())


def bad_answer(complaint: str) -> OutcomeUnknown:
    """The error for an answer that has a successful status, but is not as the provider documents it. `complaint`: the
    end of the message, after "The provider's answer".
    """
    return OutcomeUnknown("provider_bad_answer", f"The provider's answer {complaint}.")


def no_files() -> Rejected:
    return Rejected("provider_no_files", "The provider reports success, but its answer has no link to a file.")


def as_mapping(body: Any) -> Mapping[str, Any]:
    """The body as an object. Raises OutcomeUnknown if the body is not an object."""
    if not isinstance(body, dict):
        raise bad_answer("is not a JSON object")
    return body


def text_at(body: Mapping[str, Any], name: str) -> str:
    """The text that the body has under `name`. Raises OutcomeUnknown if the value under `name` is no text, or is empty,
    or cannot be stored.
    """
    text = body.get(name)
    if not isinstance(text, str) or not text or not _is_storable(text):
        raise bad_answer(f"has no {name}")
    return text


def id_at(body: Any, pointer: str) -> str:
    """The id of an order at the pointer: a text or an integer. Raises OutcomeUnknown if there is no id at the pointer,
    or if the id cannot be stored.
    """
    found = value_at(body, pointer)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if not isinstance(found, str) or not found or not _is_storable(found):
        raise bad_answer(f"has no id at {pointer}")
    return found


def _is_storable(text: str) -> bool:
    """Whether PostgreSQL can store the text. If it could not store the id of an order, the step could not record an
    order that is paid for.
    """
    return storable_text(text) == text


def urls_in(output: Any) -> tuple[str, ...]:
    """The links in a provider's output. The output is a text, or an object with `url`, or a list or an object that has
    such values.

    A text that is not a link is skipped. For example, the provider Ark writes a message in place of a refused picture.
    A text that PostgreSQL cannot store is skipped, too. This function has a loop and no recursion, because the provider
    decides how deep its answer is nested.
    """
    urls: list[str] = []
    unread_values = [output]
    while unread_values:
        value = unread_values.pop()
        if isinstance(value, str):
            if value.startswith(("https://", "http://")) and _is_storable(value):
                urls.append(value)
        elif isinstance(value, dict):
            # Add the values in reverse order, because `pop` takes the last value. So the links keep the order of the
            # output.
            unread_values += [value["url"]] if "url" in value else reversed(value.values())
        elif isinstance(value, list):
            unread_values += reversed(value)
    return tuple(urls)


def _parsed_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
