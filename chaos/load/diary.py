"""The diary of a run: the requests of all clients with their answers. It also gives each client random numbers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpx2

from chaos.evidence import Bound, ExternalLease, Operation, Request
from chaos.load.client import ANSWER_SECONDS, Client, Outcome
from chaos.stack import Installation
from leasehold.domain.ids import new_id
from leasehold.runtime.gather import cancel_and_wait

WORDS = ("to", "be", "or", "not")
#: Sends one request of a tenant, and writes its outcome into the diary.
Sender = Callable[[str], Coroutine[Any, Any, None]]
_random: ContextVar[random.Random] = ContextVar("random")
#: The share of requests with a key that are sent once more after their answer.
_SENT_TWICE = 0.3


@dataclass
class Diary:
    """`requests`: in the order of their ends. `streams`: job -> each cursor with the numbers of the events after it."""

    installation: Installation
    seed: int
    requests: list[Request] = field(default_factory=list)
    streams: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)
    leases: list[ExternalLease] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._followers: set[asyncio.Task[None]] = set()
        self._http = httpx2.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx2.Limits(max_connections=400))

    async def close(self) -> None:
        await cancel_and_wait(*self._followers)
        await self._http.aclose()

    def seed_random(self, name: str) -> None:
        """Give the current asyncio task random numbers of its own, from the run's seed and `name`: the timing of other
        tasks does not change them.
        """
        _random.set(random.Random(f"load {self.seed} {name}"))  # noqa: S311 - to be repeated, not to be secret

    @property
    def rng(self) -> random.Random:
        return _random.get()

    def client(self, tenant: str) -> Client:
        urls = [f"http://127.0.0.1:{port}" for port in self.installation.ports.values()]
        return Client(self._http, self.rng.sample(urls, len(urls)), self.installation.keys[tenant])

    def follow(self, client: Client, job: str, path: str) -> None:
        """Read the job's events in the background: some jobs end long after the load. `streams` gets the numbers."""
        pieces = self.streams.setdefault(job, [])
        self._followers.add(asyncio.create_task(client.follow(path, pieces)))

    async def wait_for_followers(self, seconds: float) -> None:
        """Wait until all events of the followed jobs are read. Stop the followers that need longer than `seconds`."""
        if self._followers:
            await asyncio.wait(self._followers, timeout=seconds)
        await cancel_and_wait(*self._followers)

    def key(self) -> str:
        return new_id().hex

    def words(self) -> dict[str, str]:
        return {"text": self.rng.choice(WORDS)}

    def is_sent_twice(self) -> bool:
        """Whether to send the next request once more after its answer."""
        return self.rng.random() < _SENT_TWICE

    def record(
        self, kind: str, tenant: str, key: str, outcome: Outcome, *, job: str = "", endpoint: str = "",
        answers: tuple[tuple[str, ...], ...] = (), jobs_requested: int = 1, answer: str = "",
    ) -> None:  # fmt: skip
        """Record the outcome of a request over HTTP. `answer`: given if the status of the outcome does not show it."""
        self.requests.append(
            Request(kind, tenant, key, outcome.asked_at, outcome.answered_at, answer or outcome.answer, job,
                    outcome.tries, endpoint, answers, jobs_requested)
        )  # fmt: skip

    def record_direct(
        self, kind: str, tenant: str, key: str, asked_at: float, answer: str, job: str, tries: int
    ) -> None:
        """Record the outcome of a request of a client that writes into the database without the API."""
        self.requests.append(Request(kind, tenant, key, asked_at, time.time(), answer, job, tries))
