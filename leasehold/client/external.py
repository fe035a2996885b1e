"""A reference client for external workers. It claims tasks over HTTP, renews their leases, and settles them.

    worker = ExternalWorker("https://jobs.example.com", "lh_...", queues=["reports"])
    await worker.serve(handle)         # handle(task) -> dict | None

It sends the requests of `docs/guides/external-workers.md`. It needs only the API's URL and an API key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

import httpx2

from leasehold.domain.errors import Cancelled, LeaseholdError, LeaseLost, Permanent, Retryable

_CONFLICT, _EXISTS_ALREADY = 409, 412
#: The pause after the API did not answer.
_OUTAGE_SECONDS = 2.0


class Refused(LeaseholdError):
    """The API refused a request. `status`: of HTTP. `code`: the problem's code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


@dataclass
class Task:
    """A leased task. `claim`: the task as the API's answer to the claim describes it."""

    claim: dict[str, Any]
    _ask: Callable[..., Awaitable[dict[str, Any]]] = field(repr=False)
    _store: httpx2.AsyncClient = field(repr=False)
    cancelled: bool = False
    lost: bool = False
    sent: dict[str, str] = field(default_factory=dict)  # {name: SHA-256} of the files that `write` has uploaded

    @property
    def id(self) -> str:
        return str(self.claim["task_id"])

    @property
    def step(self) -> str:
        return str(self.claim["step"])

    @property
    def payload(self) -> dict[str, Any]:
        """The run's payload."""
        payload: dict[str, Any] = self.claim["payload"]
        return payload

    @property
    def results(self) -> dict[str, Any]:
        """{step: result} of the steps that this step needs."""
        results: dict[str, Any] = self.claim["results"]
        return results

    @property
    def files(self) -> list[dict[str, Any]]:
        """The files of those steps: step, name, size, sha256, content_type, and a signed `url` to read from."""
        files: list[dict[str, Any]] = self.claim["files"]
        return files

    async def read(self, name: str, step: str | None = None) -> bytes:
        """Read a file that a needed step has stored. `step`: that step, if several have a file of this name.

        Raises KeyError for an unknown file, and Retryable `file_corrupt` for bytes with another SHA-256.
        """
        for file in self.files:
            if file["name"] == name and step in (None, file["step"]):
                answer = await self._store.get(file["url"])
                answer.raise_for_status()
                if hashlib.sha256(answer.content).hexdigest() != file["sha256"]:
                    raise Retryable(f"the bytes of {name} are not those that were stored", code="file_corrupt")
                return answer.content
        raise KeyError(name)

    async def write(self, name: str, data: bytes, content_type: str = "application/octet-stream") -> None:
        """Upload a file. Others see it once the task is completed. Raises LeaseLost, Refused."""
        file = {"name": name, "size": len(data), "content_type": content_type}
        (ticket,) = (await self.post("files", files=[file]))["files"]
        answer = await self._store.put(ticket["url"], content=data, headers=ticket["headers"])
        # An earlier try may have stored the file without its answer arriving. The completion verifies the bytes.
        if answer.status_code != _EXISTS_ALREADY:
            answer.raise_for_status()
        self.sent[name] = hashlib.sha256(data).hexdigest()

    async def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """Send a request about this task, under its lease. Raises LeaseLost, Refused."""
        return await self._ask(f"/v1/external/tasks/{self.id}/{verb}", epoch=self.claim["epoch"], **body)

    async def progress(self, percent: float, summary: str = "") -> None:
        """Report how far the step is, 0 to 100. Raises LeaseLost, Refused."""
        await self.post("progress", percent=percent, summary=summary)

    def checkpoint(self) -> None:
        """Raises Cancelled once a cancel of the run was requested, and LeaseLost once the lease is lost."""
        if self.lost:
            raise LeaseLost
        if self.cancelled:
            raise Cancelled


Handler = Callable[[Task], Awaitable[dict[str, Any] | None]]


class ExternalWorker:
    """A worker outside of the platform; use it with `async with`.

    `lease_seconds`: how long a lease lasts without a heartbeat. A heartbeat is sent three times in that time.
    """

    def __init__(self, url: str, key: str, *, queues: Sequence[str], lease_seconds: float = 60.0) -> None:
        self.id = uuid4().hex  # a new id for each start
        self._queues = list(queues)
        self._lease_seconds = lease_seconds
        self._store = httpx2.AsyncClient(timeout=60.0)  # signed URLs must not get the API key
        self._http = httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()
        await self._store.aclose()

    async def serve(self, handle: Handler) -> None:
        """Work until cancelled, one task at a time. While the API does not answer, wait and try again."""
        while True:
            try:
                await self.work_once(handle, wait=30.0)
            except httpx2.HTTPError:
                await asyncio.sleep(_OUTAGE_SECONDS)

    async def work_once(self, handle: Handler, *, wait: float = 0.0) -> bool:
        """Claim a task, do it and settle it. False: none was due within `wait` seconds, which are 30 at most."""
        answer = await self._ask(
            "/v1/external/claim", queues=self._queues, wait=wait, lease_seconds=self._lease_seconds
        )
        for claim in answer["tasks"]:
            await self._do(handle, Task(claim, self._ask, self._store))
        return bool(answer["tasks"])

    async def _do(self, handle: Handler, task: Task) -> None:
        heartbeats = asyncio.create_task(self._beat(task))
        try:
            await self._run(handle, task)
        except LeaseLost:
            return  # another claim has the task: nobody will read this attempt's result
        finally:
            heartbeats.cancel()
            with suppress(asyncio.CancelledError):
                await heartbeats

    async def _run(self, handle: Handler, task: Task) -> None:
        try:
            result = await handle(task)
        except Cancelled:
            await task.post("acknowledge-cancel")
        except Permanent as error:
            await task.post("fail", code=error.code, message=error.message, retryable=False)
        except Retryable as error:
            after = None if error.after is None else error.after.total_seconds()
            await task.post("fail", code=error.code, message=error.message, retry_after=after)
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything: the attempt failed
            await task.post("fail", code="handler_error", message=f"{type(error).__name__}: {error}"[:2000])
        else:
            files = [{"name": name, "sha256": sha256} for name, sha256 in task.sent.items()]
            await task.post("complete", result=result, files=files)

    async def _beat(self, task: Task) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            try:
                answer = await task.post("heartbeat", lease_seconds=self._lease_seconds)
            except LeaseLost:
                task.lost = True
                return
            except httpx2.HTTPError:
                continue  # try again: the lease may last longer than the outage
            task.cancelled = bool(answer["cancel_requested"])

    async def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self._http.post(path, json={"worker_id": self.id} | body)
        if answer.is_success:
            fields: dict[str, Any] = answer.json()
            return fields
        if answer.is_server_error:
            answer.raise_for_status()
        problem = answer.json()
        if answer.status_code == _CONFLICT and problem["code"] == "lease_lost":
            raise LeaseLost
        raise Refused(answer.status_code, problem["code"], problem["detail"])
