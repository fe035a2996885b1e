"""One request to a provider, and what its answer's form alone says: one table for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Self

import orjson

from leasehold.pipelines.generation.provider import OutcomeUnknown, ProviderError, Rejected, TryLater
from leasehold.security.egress import AnswerTooLarge, Egress, EgressFailed, EgressRefused
from leasehold.settings import Settings

_MAX_ANSWER = 4 * 1024 * 1024
_SECONDS = 30.0
_KEPT_CONNECTIONS = 20
_MAX_TEXT = 500
_MAX_AFTER = 86_400.0
_REJECTED = {401: "provider_unauthorized", 402: "provider_payment_required", 403: "provider_unauthorized"}
_TOO_MANY, _UNAVAILABLE = 429, 503


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer that could be read. `said` is None where its body is no JSON."""

    status: int
    said: Any
    after: float | None

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP statuses

    def stopped(self) -> bool:
        """Of a request to cancel: False says that it is too late for that. Raises TryLater, OutcomeUnknown."""
        if self.status == _TOO_MANY or self.status >= 500:  # noqa: PLR2004 - HTTP statuses
            raise self.refusal()
        return self.good

    def refusal(self, message: str = "", fail_code: str | None = None) -> ProviderError:
        """What a status that is not good means. `message`: the provider's own, if it gave one."""
        told = f"The provider answered {self.status}" + (f": {message[:_MAX_TEXT]}" if message else ".")
        if self.status == _TOO_MANY or (self.status == _UNAVAILABLE and self.after is not None):
            return TryLater("provider_busy", told, fail_code=fail_code, after=self.after)
        if self.good or self.status >= 500 or self.status == 408:  # noqa: PLR2004 - HTTP statuses
            return OutcomeUnknown("provider_error", told, fail_code=fail_code)
        return Rejected(_REJECTED.get(self.status, "provider_refused"), told, fail_code=fail_code)


class Asker:
    """`kept` connections may have died unnoticed, and then nobody knows whether the request arrived: what buys
    something goes over a new one.
    """

    def __init__(self, kept: Egress, fresh: Egress) -> None:
        self._kept = kept
        self._fresh = fresh

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings) -> AsyncIterator[Self]:
        keeping = Egress.from_settings(settings, keepalive=_KEPT_CONNECTIONS)
        async with keeping as kept, Egress.from_settings(settings) as fresh:
            yield cls(kept, fresh)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        buys: bool = False,
        seconds: float = _SECONDS,
    ) -> Heard:
        """Raises TryLater when the request surely did not arrive, OutcomeUnknown when nobody knows, Rejected when the
        address is not to be asked.
        """
        sent = {"accept": "application/json", "user-agent": "leasehold", **headers}
        if body:
            sent.setdefault("content-type", "application/json")
        egress = self._fresh if buys else self._kept
        try:
            answer = await egress.request(
                method, url, headers=sent, content=body, max_bytes=_MAX_ANSWER, timeout=seconds
            )
        except EgressRefused as error:
            if error.code == "host_unknown":  # it may come back
                raise TryLater("provider_unreachable", str(error)) from None
            raise Rejected(error.code, str(error)) from None
        except AnswerTooLarge as error:
            raise OutcomeUnknown("provider_bad_answer", str(error)) from None
        except EgressFailed as error:
            if not error.sent:
                raise TryLater("provider_unreachable", "The provider could not be reached.") from None
            raise OutcomeUnknown("provider_no_answer", f"The provider gave {error}.") from None
        return Heard(answer.status, _json(answer.body), _retry_after(answer.headers.get("retry-after", "")))


def bad_answer(what: str) -> OutcomeUnknown:
    """An answer that says it is good and is not what was documented."""
    return OutcomeUnknown("provider_bad_answer", f"The provider's answer {what}.")


def no_files() -> Rejected:
    return Rejected("provider_no_files", "The provider says that it is done, and names no file.")


def as_mapping(said: Any) -> Mapping[str, Any]:
    """Raises OutcomeUnknown for anything else."""
    if not isinstance(said, dict):
        raise bad_answer("is no JSON object")
    return said


def text_at(said: Mapping[str, Any], name: str) -> str:
    """Raises OutcomeUnknown when there is no text of that name."""
    found = said.get(name)
    if not isinstance(found, str) or not found:
        raise bad_answer(f"has no {name}")
    return found


def urls_in(found: Any) -> tuple[str, ...]:
    """The file links in what a provider calls its output: a text, a list of them, or objects with `url`.

    Other texts are no links (Ark tells of a refused picture of several beside the others' links). No recursion: how
    deep an answer is nested is the other side's choice.
    """
    urls: list[str] = []
    rest = [found]
    while rest:
        one = rest.pop()
        if isinstance(one, str) and one.startswith(("https://", "http://")):
            urls.append(one)
        elif isinstance(one, dict):
            rest += [one["url"]] if "url" in one else reversed(one.values())
        elif isinstance(one, list):
            rest += reversed(one)
    return tuple(urls)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _retry_after(said: str) -> float | None:
    """Seconds, or an HTTP date (RFC 9110, 10.2.3), within a day."""
    try:
        seconds = float(said) if said.isdecimal() else parsedate_to_datetime(said).timestamp() - time()
    except (TypeError, ValueError, OverflowError):  # some years are beyond the clock
        return None
    return min(max(seconds, 0.0), _MAX_AFTER)
