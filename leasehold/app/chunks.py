"""Turns a page of a run's stream into the chunks that `Run.stream` yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.client.models import Chunk

#: A page (one read of the stream) has at most this many items. `Run.stream` yields one or two chunks for an item.
AT_MOST = 500
#: Seconds between two reads of a stream that has nothing new.
PAUSE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Chunks:
    """One read of a stream. `after`: the number of its last chunk. The next read begins after this chunk. `is_end`:
    whether the run has ended, and no chunk follows.
    """

    items: Sequence[Chunk]
    after: int
    is_end: bool


def chunks_of(page: Sequence[Mapping[str, Any]], after: int, *, ended: bool) -> Chunks:
    """The chunks of a page, which was read with at most AT_MOST items after the number `after`. `ended`: whether the
    run had ended before the page was read.
    """
    items = [chunk for item in page for chunk in _chunks_of_item(item)]
    return Chunks(items, page[-1]["n"] if page else after, ended and len(page) < AT_MOST)


def _chunks_of_item(item: Mapping[str, Any]) -> Iterator[Chunk]:
    """The chunks that `Run.stream` yields for one item of the page. If the item has `restarts`, it is the first chunk
    of an attempt that starts its step's stream anew. For this item, `Run.stream` yields a chunk with the event
    `restart`, and then the item's own chunk. An item with `cut` stands for all later chunks of an attempt that has
    emitted too much.
    """
    source = {name: item[name] for name in ("step", "attempt", "epoch")}
    if item["restarts"]:
        yield Chunk(event="restart", **source)
    yield Chunk(event="cut" if "cut" in item else "chunk", n=item["n"], chunk=item.get("chunk"), **source)
