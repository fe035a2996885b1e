"""A branch is one coroutine of a workflow: the workflow's function (branch ''), or a coroutine in a `gather`.

Each branch numbers its calls. The place of a call in the journal (a row for each call) is its branch and its number.
When the code runs again from its top (a replay), each call finds its result at its place.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Coroutine
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.workflows.pending import Pending


class Branch(Pending[Any]):
    """A coroutine, and how far it has come. A branch is also a Pending (something that a workflow can await). Its
    result is what the coroutine returns or raises.

    `path`: the branch's name in the journal. `number`: the number of the last call. `now`: the time of the newest
    result that the coroutine has got. `patches`: the answers of `ctx.patched` so far. `waits_for`: the Pending (a call
    of the context) that the coroutine awaits now. `has_awaited`: whether the coroutine has ever awaited a Pending.
    `cancelled`: whether Cancelled was raised in the coroutine. `gather_count`: how many gathers the coroutine has
    begun. `uuid_count`, `random_count`: how many times it has called `uuid` and `random` of the context.
    """

    __slots__ = (
        "cancelled",
        "coroutine",
        "gather_count",
        "has_awaited",
        "now",
        "number",
        "patches",
        "path",
        "random_count",
        "uuid_count",
        "waits_for",
    )

    def __init__(
        self, path: str, coroutine: Coroutine[Any, Any, Any], now: datetime, *, cancelled: bool = False
    ) -> None:
        super().__init__()
        self.path = path
        self.coroutine = coroutine
        self.now = now
        self.cancelled = cancelled
        self.number = 0
        self.gather_count = 0
        self.uuid_count = 0
        self.random_count = 0
        self.patches: dict[str, bool] = {}
        self.waits_for: Pending[Any] | None = None
        self.has_awaited = False

    def pass_time(self, at: datetime | None) -> None:
        """Move the branch's time forward to `at`, when a result came. If `at` is None, the time stays."""
        if at is not None:
            self.now = max(self.now, at)

    def uuid(self, run_id: UUID) -> UUID:
        """A new UUID at each call. A replay gives the same UUIDs in the same order."""
        self.uuid_count += 1
        digest = hashlib.sha256(f"{run_id}/{self.path}/uuid/{self.uuid_count}".encode()).digest()
        return UUID(bytes=digest[:16], version=4)

    def random(self, run_id: UUID) -> random.Random:
        """A new generator at each call. A replay gives generators with the same numbers."""
        self.random_count += 1
        return random.Random(f"{run_id}/{self.path}/random/{self.random_count}")  # noqa: S311 - it must be repeatable
