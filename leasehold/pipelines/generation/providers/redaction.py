"""Wraps a provider so that its error messages hold no secret: a provider's message may quote the request, with its
credential and the queries of its URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.pipelines.generation.provider import Provider, ProviderError
from leasehold.pipelines.generation.wrapped import Wrapped

_QUERY = re.compile(r"(https?://[^\s?#]+)[?#]\S*")
#: A shorter part of a credential is not hidden: such letters are in every sentence.
_MIN_PART_CHARACTERS = 4
#: A message is cut here: the search for URLs may cost the square of its length.
_MAX_CHARACTERS = 2000
_HIDDEN = "***"


def without_secrets(provider: Provider) -> Provider:
    """A provider whose errors hold no secret."""
    return Wrapped(provider, lambda _operation, credential: _redacting(credential))


@contextmanager
def _redacting(credential: str) -> Iterator[None]:
    try:
        yield
    except ProviderError as error:
        error.message = redacted(error.message, credential)
        error.args = (error.message,)
        if error.fail_code is not None:
            error.fail_code = redacted(error.fail_code, credential)
        raise


def redacted(text: str, credential: str) -> str:
    """The text without the credential, without each half of an `access key:secret key`, and without queries of URLs."""
    parts = {part for part in credential.split(":") if len(part) >= _MIN_PART_CHARACTERS} | {credential}
    for part in sorted(parts - {""}, key=len, reverse=True):
        text = _without_cut(text.replace(part, _HIDDEN), part)
    return _QUERY.sub(r"\1", text[:_MAX_CHARACTERS])


def _without_cut(text: str, part: str) -> str:
    """Hide the first characters of `part` if the text ends with them: a provider's module may have cut a long message
    in the middle of `part`.
    """
    for length in range(len(part) - 1, _MIN_PART_CHARACTERS - 1, -1):
        if text.endswith(part[:length]):
            return text[:-length] + _HIDDEN
    return text
