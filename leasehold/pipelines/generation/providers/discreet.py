"""What a provider says of an error may quote our own request: no credential and no URL's query goes any further."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.pipelines.generation.provider import Made, Order, Provider, ProviderError, Taken, Working

_QUERY = re.compile(r"(https?://[^\s?#]+)[?#]\S*")
#: A shorter part of a credential is no secret, and its letters are in every sentence.
_LEAST_PART = 4
#: What follows is not kept: a search in it may cost the square of its length.
_MAX_TOLD = 2000
_HIDDEN = "***"


class Discreet:
    """A provider, whose errors are told without what is secret."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def takes_token(self) -> bool:
        return self._provider.takes_token

    async def submit(self, order: Order, credential: str) -> Taken | Made:
        with _without(credential):
            return await self._provider.submit(order, credential)

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:
        with _without(credential):
            return await self._provider.poll(ref, order, credential)

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        with _without(credential):
            return await self._provider.cancel(ref, order, credential)


@contextmanager
def _without(credential: str) -> Iterator[None]:
    try:
        yield
    except ProviderError as error:
        error.message = told_without(error.message, credential)
        error.args = (error.message,)
        if error.fail_code is not None:
            error.fail_code = told_without(error.fail_code, credential)
        raise


def told_without(text: str, credential: str) -> str:
    """Neither the credential, nor a half of `access key:secret key`, nor the query of a URL."""
    parts = {part for part in credential.split(":") if len(part) >= _LEAST_PART} | {credential}
    for part in sorted(parts - {""}, key=len, reverse=True):
        text = text.replace(part, _HIDDEN)
    return _QUERY.sub(r"\1", text[:_MAX_TOLD])
