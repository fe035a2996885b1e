"""Keeps the log lines and chunks of an external worker's task until the API has them. external.py uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

#: The most items of one request.
_ITEMS_PER_REQUEST = 500


class OutputBuffer:
    """The items of one attempt that the API does not have yet: the lines of its log, or the chunks of its stream.

    `send(first, items)`: sends the items, and returns whether the attempt is cut (the API accepts no more items of it).
    `first`: the number of `items[0]` in the attempt, from 1. By this number the API recognises a request that is sent
    again after an outage.
    """

    def __init__(self, send: Callable[[int, list[Any]], Awaitable[bool]]) -> None:
        self._send = send
        self._items: list[Any] = []
        self._answered_count = 0  # items of the requests that the API has accepted or refused
        self._unanswered_count = 0  # items of the request that has no answer yet
        self._most_items = _ITEMS_PER_REQUEST  # of the next request
        self._is_cut = False
        self._lock = asyncio.Lock()

    def add(self, item: Any) -> bool:
        """Keep an item for the next request. False: the API accepts no more, and the item is dropped."""
        if not self._is_cut:
            self._items.append(item)
        return not self._is_cut

    async def flush(self) -> None:
        """Send all items. Raises what `send` raises; the next `flush` then begins with the same request."""
        async with self._lock:
            while self._items:
                # A request that has no answer yet is sent again with the same items.
                self._unanswered_count = self._unanswered_count or min(len(self._items), self._most_items)
                self._is_cut = await self._send(self._answered_count + 1, self._items[: self._unanswered_count])
                self._forget_request()
                self._most_items = min(2 * self._most_items, _ITEMS_PER_REQUEST)  # `refuse` may have reduced it
                if self._is_cut:
                    self._items.clear()

    def refuse(self, *, divide: bool) -> bool:
        """Note that the API has refused the last request. The next request then has half of the refused items, so that
        one bad item does not cost the others. Exception: if the request had a single item, or without `divide`, the
        items of the request are dropped. Returns whether items are dropped.
        """
        if divide and self._unanswered_count > 1:
            self._most_items = self._unanswered_count // 2
            self._unanswered_count = 0
            return False
        self._forget_request()
        return True

    def _forget_request(self) -> None:
        self._answered_count += self._unanswered_count
        del self._items[: self._unanswered_count]
        self._unanswered_count = 0
