"""What an external worker's task logs and emits, until the API has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

#: The most items of one request.
_AT_MOST = 500


class Output:
    """The items of one attempt that the API has yet to get: the lines of its log, or the chunks of its stream.

    `send(first, items)`: sends items, of which `first` is the number of the first one in the attempt, and returns
    whether the attempt is cut. The API keeps a repeated request once: so after an outage the same items are sent again.
    """

    def __init__(self, send: Callable[[int, list[Any]], Awaitable[bool]]) -> None:
        self._send = send
        self._items: list[Any] = []
        self._sent = 0
        self._sending = 0  # items of the request that has got no answer
        self._is_cut = False
        self._lock = asyncio.Lock()

    def add(self, item: Any) -> bool:
        """Keep an item for the next request. False: the attempt is cut, and has no room for it."""
        if not self._is_cut:
            self._items.append(item)
        return not self._is_cut

    async def flush(self) -> None:
        """Send all items. Raises what `send` raises: then the next `flush` begins with the same request."""
        async with self._lock:
            while self._items:
                self._sending = self._sending or min(len(self._items), _AT_MOST)
                self._is_cut = await self._send(self._sent + 1, self._items[: self._sending])
                self.drop()
                if self._is_cut:
                    self._items.clear()

    def drop(self) -> None:
        """Forget the request that the API has answered or refused."""
        self._sent += self._sending
        del self._items[: self._sending]
        self._sending = 0
