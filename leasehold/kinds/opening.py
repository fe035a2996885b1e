"""Opens the objects that kinds of work name in their hook `Kind.opens`. A process opens each object once, and closes it
when the process stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load
from leasehold.settings import Settings


async def open_all(kinds: Iterable[Kind], settings: Settings, stack: AsyncExitStack) -> Mapping[str, Any]:
    """Open the objects of all `kinds`. Returns the objects by the names of their kinds. `stack` closes the objects.

    A hook must not fail because another service is down.
    """
    return {
        kind.name: await stack.enter_async_context(load(kind.opens)(settings))
        for kind in kinds
        if kind.opens is not None
    }
