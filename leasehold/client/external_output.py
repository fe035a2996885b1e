"""Keeps the log lines and chunks of an external worker's task until the API has them. external.py uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

#: A request has at most this many items.
_ITEMS_PER_REQUEST = 500
#: One buffer keeps at most this many items, with at most this many characters of JSON. With the default settings, the
#: API stores fewer items of an attempt than this.
MAX_ITEMS, MAX_CHARACTERS = 20_000, 8 * 2**20


class OutputBuffer:
    """The items of one attempt that the API does not have yet: the lines of its log, or the chunks of its stream.

    `send(first, items)`: sends the items, and returns whether the attempt is cut (the API accepts no more items of it).
    `first`: the number of `items[0]` in the attempt, from 1. By this number the API recognises a request that is sent
    again after an outage.

    Items beyond MAX_ITEMS or MAX_CHARACTERS are dropped and counted. Otherwise they could fill the memory during an
    outage.
    """

    def __init__(self, send: Callable[[int, list[Any]], Awaitable[bool]]) -> None:
        self._send = send
        self._items: list[Any] = []
        self._sizes: list[int] = []  # the size of each item, in the order of `_items`
        self._total_size = 0
        self._dropped_count = 0
        self._answered_count = 0  # items of the requests that the API has accepted or refused
        self._unanswered_count = 0  # items of the request that has no answer yet
        self._most_items = _ITEMS_PER_REQUEST  # the next request has at most this many items
        self._is_cut = False
        self._lock = asyncio.Lock()

    def add(self, item: Any, size: int, *, beyond_bounds: bool = False) -> bool:
        """Keep an item for the next request. `size`: the characters of its JSON. `beyond_bounds`: keep the item even if
        the buffer is full. Returns False if the item is dropped, because the API accepts no more items or because the
        buffer is full.
        """
        if self._is_cut:
            return False
        is_full = len(self._items) >= MAX_ITEMS or self._total_size + size > MAX_CHARACTERS
        if is_full and not beyond_bounds:
            self._dropped_count += 1
            return False
        self._items.append(item)
        self._sizes.append(size)
        self._total_size += size
        return True

    def take_dropped_count(self) -> int:
        """How many items were dropped since the last call of this method, because the buffer was full."""
        count, self._dropped_count = self._dropped_count, 0
        return count

    async def flush(self) -> None:
        """Send all items. Raises the errors of `send`. After an error, the next `flush` begins with the same request,
        unless `refuse` is called in between.
        """
        async with self._lock:
            while self._items:
                # A request that has no answer yet is sent again with the same items.
                self._unanswered_count = self._unanswered_count or min(len(self._items), self._most_items)
                self._is_cut = await self._send(self._answered_count + 1, self._items[: self._unanswered_count])
                self._forget_request()
                self._most_items = min(2 * self._most_items, _ITEMS_PER_REQUEST)  # `refuse` may have reduced it
                if self._is_cut:
                    self._forget(len(self._items))

    def refuse(self, *, divide: bool) -> bool:
        """Note that the API has refused the last request. `divide`: whether the refusal was because of the items. If
        so, the next request has only half of the refused items, so that one bad item does not cost the others. If not,
        or if the request had a single item, this method drops the items of the request. Returns whether it drops items.
        """
        if divide and self._unanswered_count > 1:
            self._most_items = self._unanswered_count // 2
            self._unanswered_count = 0
            return False
        self._forget_request()
        return True

    def _forget_request(self) -> None:
        self._answered_count += self._unanswered_count
        self._forget(self._unanswered_count)
        self._unanswered_count = 0

    def _forget(self, count: int) -> None:
        """Forget the first `count` items."""
        self._total_size -= sum(self._sizes[:count])
        del self._items[:count], self._sizes[:count]
