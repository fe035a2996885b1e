"""The clients of a run, and their journal: what was asked, what was answered, and when.

A client whose request got no answer asks again with the same key, for a while; what it never learns is `unknown`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any
from uuid import UUID

import asyncpg
import httpx2

from bench.picture import photograph
from chaos.history import Request
from chaos.pipelines import KINDS, STOPPABLE
from chaos.settings import TENANTS
from chaos.stack import CLIENT, Installation
from leasehold.db.database import connect
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.states import JobState
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.transitions.jobs import NewJob, request_cancel, submit

PICTURE_TYPE = "image/jpeg"
WORDS = ("to", "be", "or", "not")
#: Asks for one thing in the name of a tenant, and writes down what came of it.
Ask = Callable[[str], Coroutine[Any, Any, None]]
_PATIENCE = 25.0  # how long a client repeats what was not answered
_FOLLOW_SECONDS = 120.0  # longer than a run's faults: whoever follows to the end must see every event (I20)
_ANSWER_SECONDS = 4.0
_AGAIN_SECONDS = 0.3
_PAUSES = {"media": 1.2, "short": 0.15, "long": 0.8, "fork": 0.6, "parked": 0.8, "flaky": 0.9, "hopeless": 2.0,
           "wrong": 0.8, "poison": 5.0, "unlike": 0.8, "cancel": 0.8, "scheduled": 0.8}  # fmt: skip
# Of its ticks only the one that is given falls into a run.
_SCHEDULE = """
INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority, overlap,
                      catch_up, catch_up_seconds, next_run_at)
VALUES ($1::uuid, $2, 'short', '0 0 29 2 *', 'UTC', $3::jsonb, 'chaos', $1::uuid::text, 1, 'allow_all', 'one', 3600,
        clock_timestamp() + make_interval(secs => $4))
ON CONFLICT DO NOTHING
"""


def picture() -> bytes:
    return photograph(400, 300)


class Load:
    """Runs one client a kind for `seconds`; the journal is `requests`."""

    def __init__(self, installation: Installation, seed: int) -> None:
        self.requests: list[Request] = []
        self.streams: dict[str, list[tuple[int, list[int]]]] = {}
        self._installation = installation
        self._rng = random.Random(f"load {seed}")  # noqa: S311 - to be repeated, not to be secret
        self._picture = picture()
        self._turn = 0

    async def run(self, seconds: float) -> None:
        kinds: dict[str, Ask] = {"media": self._send_picture}
        for pipeline in KINDS:
            kinds[pipeline.name] = self._submitter(pipeline)
        kinds["cancel"] = self._cancel_one
        kinds["scheduled"] = self._schedule_one
        async with asyncio.TaskGroup() as clients:
            for name, ask in kinds.items():
                clients.create_task(self._repeat(ask, _PAUSES[name], seconds))

    async def _repeat(self, ask: Ask, pause: float, seconds: float) -> None:
        """Begin a new request every so often, whether or not the last one was answered."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as asked:
            while time.monotonic() < until:
                asked.create_task(ask(self._rng.choice(TENANTS)))
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.5))

    def _note(self, kind: str, tenant: str, key: str, asked_at: float, answer: str, job: str, tries: int) -> None:
        self.requests.append(Request(kind, tenant, key, asked_at, time.time(), answer, job, tries))

    # --- jobs by the transition, in the client's own transaction

    def _submitter(self, pipeline: Pipeline) -> Ask:
        async def ask(tenant: str) -> None:
            job = NewJob(pipeline, tenant, {"text": self._rng.choice(WORDS)}, id=new_id())
            asked_at, tries = time.time(), 0
            answer = "unknown"
            while answer == "unknown" and time.time() - asked_at < _PATIENCE:
                tries += 1
                answer = await self._try_submit(job)
            accepted = str(job.id) if answer == "accepted" else ""
            self._note(pipeline.name, tenant, str(job.id), asked_at, answer, accepted, tries)

        return ask

    async def _try_submit(self, job: NewJob) -> str:
        """Its hints are left to the relay: this client knows no broker."""
        try:
            connection = await connect(self._installation.settings(CLIENT), "client")
            try:
                await submit(connection, [job])
            finally:
                connection.terminate()
        except asyncpg.UniqueViolationError:
            return "accepted"  # by an earlier try, whose answer was lost
        except TRY_AGAIN:
            await asyncio.sleep(_AGAIN_SECONDS)
            return "unknown"
        return "accepted"

    async def _cancel_one(self, tenant: str) -> None:
        """Ask for a job, and a little later for its end: before it starts, while it runs, or too late."""
        job = NewJob(self._rng.choice(STOPPABLE), tenant, {"text": self._rng.choice(WORDS)}, id=new_id())
        asked_at = time.time()
        while await self._try_submit(job) == "unknown":
            if time.time() - asked_at > _PATIENCE:
                return  # nobody learnt whether it is there: it is not this client's to cancel
        self._note(job.pipeline.name, tenant, str(job.id), asked_at, "accepted", str(job.id), 1)
        await asyncio.sleep(self._rng.uniform(0.0, 1.5))
        asked_at, tries = time.time(), 0
        answer = "unknown"
        while answer == "unknown" and time.time() - asked_at < _PATIENCE:
            tries += 1
            answer = await self._try_cancel(job)
        self._note("cancel", tenant, f"cancel {job.id}", asked_at, answer, str(job.id), tries)

    async def _try_cancel(self, job: NewJob) -> str:
        """`accepted`: it was cancelled there and then. What only was asked to stop may still end in time."""
        try:
            connection = await connect(self._installation.settings(CLIENT), "client")
            try:
                cancels = await request_cancel(connection, [job.id], job.tenant_id, reason="chaos", by="client")
            finally:
                connection.terminate()
        except TRY_AGAIN:
            await asyncio.sleep(_AGAIN_SECONDS)
            return "unknown"
        return "accepted" if cancels.states.get(job.id) == JobState.CANCELLED else "refused"

    # --- jobs by the clock

    async def _schedule_one(self, tenant: str) -> None:
        """Have a run made in a moment, by whichever scheduler lives then."""
        schedule, asked_at, tries = new_id(), time.time(), 0
        words, moment = {"text": self._rng.choice(WORDS)}, self._rng.uniform(0.0, 5.0)
        answer = "unknown"
        while answer == "unknown" and time.time() - asked_at < _PATIENCE:
            tries += 1
            answer = await self._try_schedule(schedule, tenant, words, moment)
        self._note("scheduled", tenant, str(schedule), asked_at, answer, "", tries)

    async def _try_schedule(self, schedule: UUID, tenant: str, words: dict[str, str], moment: float) -> str:
        try:
            connection = await connect(self._installation.settings(CLIENT), "client")
            try:
                await connection.execute(_SCHEDULE, schedule, tenant, words, moment)
            finally:
                connection.terminate()
        except TRY_AGAIN:
            await asyncio.sleep(_AGAIN_SECONDS)
            return "unknown"
        return "accepted"

    # --- pictures through the API

    async def _send_picture(self, tenant: str) -> None:
        key, asked_at = new_id().hex, time.time()
        client = _MediaClient(self._installation, self._installation.keys[tenant], key)
        job = await client.send(self._picture)
        answer = "accepted" if job else "unknown"
        self._note("media", tenant, key, asked_at, answer, job, client.tries)
        if job:
            self.streams[job] = await client.follow()


class _MediaClient:
    """One picture's way in, repeated step by step until each is answered."""

    def __init__(self, installation: Installation, api_key: str, key: str) -> None:
        self.tries = 0
        self._urls = [f"http://127.0.0.1:{port}" for port in installation.ports.values()]
        self._api_key = api_key
        self._key = key
        self._until = time.monotonic() + _PATIENCE
        self._media = ""

    async def send(self, content: bytes) -> str:
        """Returns the job's id, or "" when it was never learnt."""
        ticket = await self._ask(
            "/upload-url", {"content_type": PICTURE_TYPE, "file_name": f"{self._key}.jpg"}, HTTPStatus.CREATED
        )
        if ticket is None or not await self._upload(ticket["upload_url"], content):
            return ""
        self._media = ticket["media_id"]
        done = {"media_id": ticket["media_id"], "original_key": ticket["original_key"]}
        accepted = await self._ask("/complete-upload", done, HTTPStatus.ACCEPTED)
        return accepted["job_id"] if accepted else ""

    async def _ask(self, path: str, body: dict[str, Any], wanted: HTTPStatus) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {self._api_key}", "Idempotency-Key": self._key}
        return await self._until_answered(
            lambda http, url: http.post(f"{url}{path}", json=body, headers=headers), wanted
        )

    async def _upload(self, url: str, content: bytes) -> bool:
        headers = {"Content-Type": PICTURE_TYPE}
        said = await self._until_answered(
            lambda http, _: http.put(url, content=content, headers=headers), HTTPStatus.OK
        )
        return said is not None

    async def _until_answered(
        self, send: Callable[[httpx2.AsyncClient, str], Awaitable[httpx2.Response]], wanted: HTTPStatus
    ) -> dict[str, Any] | None:
        while time.monotonic() < self._until:
            self.tries += 1
            async with httpx2.AsyncClient(timeout=_ANSWER_SECONDS) as http:
                try:
                    answer = await send(http, self._urls[self.tries % len(self._urls)])
                except httpx2.HTTPError:
                    answer = None
            if answer is not None and answer.status_code == wanted:
                return dict(answer.json()) if answer.content else {}
            await asyncio.sleep(_AGAIN_SECONDS)
        return None

    # --- the events, as a client sees them that is cut off again and again

    async def follow(self) -> list[tuple[int, list[int]]]:
        """Read the job's events in pieces, resuming; returns each cursor with the numbers that came after it."""
        pieces: list[tuple[int, list[int]]] = []
        cursor = 0
        until = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < until:
            try:
                seen, over = await self._read_some(cursor, most=3)
            except httpx2.HTTPError:
                seen, over = [], False
                await asyncio.sleep(_AGAIN_SECONDS)
            if seen:
                pieces.append((cursor, seen))
                cursor = seen[-1]
            if over:
                break
        return pieces

    async def _read_some(self, cursor: int, most: int) -> tuple[list[int], bool]:
        self.tries += 1
        url = f"{self._urls[self.tries % len(self._urls)]}/media/{self._media}/events"
        headers = {"Authorization": f"Bearer {self._api_key}", "Last-Event-ID": str(cursor)}
        seen: list[int] = []
        async with (
            httpx2.AsyncClient(timeout=_ANSWER_SECONDS) as http,
            http.stream("GET", url, headers=headers) as stream,
        ):
            if stream.status_code == HTTPStatus.NO_CONTENT:
                return seen, True
            if stream.status_code != HTTPStatus.OK:
                await asyncio.sleep(_AGAIN_SECONDS)
                return seen, False
            async for line in stream.aiter_lines():
                if line.startswith("id:"):
                    seen.append(int(line[3:]))
                    if len(seen) == most:
                        break
        return seen, False
