"""Wraps a provider (a service that makes images or videos), so that its errors contain no secret and PostgreSQL can
store them. A provider's message may quote the request, with the credential and with URLs whose queries contain secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.domain.storable import storable_text
from leasehold.pipelines.generation.provider import Provider, ProviderError
from leasehold.pipelines.generation.wrapped import Wrapped

#: A URL with a query or a fragment. Group 1 is the URL without them.
_QUERY = re.compile(r"(https?://[^\s?#]+)[?#]\S*")
#: A part of a credential that has fewer characters than this is not hidden, because it also occurs in harmless text.
_MIN_PART_CHARACTERS = 4
#: A message is cut to this length, because the time of the search for URLs may grow with the square of the length.
_MAX_CHARACTERS = 2000
_HIDDEN = "***"


def without_secrets(provider: Provider) -> Provider:
    """A provider whose errors contain no secret."""
    return Wrapped(provider, lambda _operation, credential: _redacted_request(credential))


@contextmanager
def _redacted_request(credential: str) -> Iterator[None]:
    try:
        yield
    except ProviderError as error:
        # A step writes the message and the code into its note. If PostgreSQL could not store the note, an order that is
        # paid for would fail.
        error.message = redacted(storable_text(error.message), credential)
        error.args = (error.message,)
        if error.fail_code is not None:
            error.fail_code = redacted(storable_text(error.fail_code), credential)
        raise


def redacted(text: str, credential: str) -> str:
    """The text without the credential, and without the queries of URLs. If the credential has the form `access
    key:secret key`, each of the two halves is also removed.
    """
    parts = {part for part in credential.split(":") if len(part) >= _MIN_PART_CHARACTERS} | {credential}
    for part in sorted(parts - {""}, key=len, reverse=True):
        text = _without_cut_end(text.replace(part, _HIDDEN), part)
    return _QUERY.sub(r"\1", text[:_MAX_CHARACTERS])


def _without_cut_end(text: str, part: str) -> str:
    """Hide the end of the text if it is the beginning of `part`. The provider, or the code that made the message, may
    have cut the text in the middle of `part`.
    """
    for length in range(len(part) - 1, _MIN_PART_CHARACTERS - 1, -1):
        if text.endswith(part[:length]):
            return text[:-length] + _HIDDEN
    return text
