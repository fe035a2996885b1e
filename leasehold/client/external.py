"""A reference client for external workers: takes tasks over HTTP, keeps their leases, and settles them.

    worker = ExternalWorker("https://jobs.example.com", "lh_...", queues=["reports"])
    await worker.serve(handle)         # handle(task) -> dict | None

What `docs/guides/runs.md` shows with curl, in Python. It needs nothing of the platform but its address.
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

_CONFLICT, _THERE_ALREADY = 409, 412
_AWAY_SECONDS = 2.0


class Refused(LeaseholdError):
    """The platform said no; `code` says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


@dataclass
class Task:
    """A leased task. `payload`: the run's."""

    said: dict[str, Any]
    _ask: Callable[..., Awaitable[dict[str, Any]]] = field(repr=False)
    _store: httpx2.AsyncClient = field(repr=False)
    cancelled: bool = False
    lost: bool = False
    sent: dict[str, str] = field(default_factory=dict)  # the files that `write` has sent, and their SHA-256

    @property
    def id(self) -> str:
        return str(self.said["task_id"])

    @property
    def step(self) -> str:
        return str(self.said["step"])

    @property
    def payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = self.said["payload"]
        return payload

    @property
    def results(self) -> dict[str, Any]:
        """What the steps that this one needs said, by their names."""
        results: dict[str, Any] = self.said["results"]
        return results

    @property
    def files(self) -> list[dict[str, Any]]:
        """What they made: step, name, size, sha256, content_type, and a signed `url` to read it from."""
        files: list[dict[str, Any]] = self.said["files"]
        return files

    async def read(self, name: str, step: str | None = None) -> bytes:
        """A file that a step before this one made; `step`: where several have made one of that name.

        Raises KeyError where there is none, Retryable where its bytes are not those that were stored.
        """
        for file in self.files:
            if file["name"] == name and step in (None, file["step"]):
                answer = await self._store.get(file["url"])
                answer.raise_for_status()
                if hashlib.sha256(answer.content).hexdigest() != file["sha256"]:
                    raise Retryable(f"{name} came with other bytes than were stored", code="file_corrupt")
                return answer.content
        raise KeyError(name)

    async def write(self, name: str, data: bytes, content_type: str = "application/octet-stream") -> None:
        """Hand in a file; it counts once the task is completed. Raises LeaseLost, Refused."""
        asked = {"name": name, "size": len(data), "content_type": content_type}
        (ticket,) = (await self.tell("files", files=[asked]))["files"]
        answer = await self._store.put(ticket["url"], content=data, headers=ticket["headers"])
        if answer.status_code != _THERE_ALREADY:  # sent before, and its answer was lost: the completion compares it
            answer.raise_for_status()
        self.sent[name] = hashlib.sha256(data).hexdigest()

    async def tell(self, verb: str, **body: Any) -> dict[str, Any]:
        """Raises LeaseLost, Refused."""
        return await self._ask(f"/v1/external/tasks/{self.id}/{verb}", epoch=self.said["epoch"], **body)

    async def progress(self, percent: float, summary: str = "") -> None:
        await self.tell("progress", percent=percent, summary=summary)

    def checkpoint(self) -> None:
        """Raises Cancelled once the run was asked to stop, LeaseLost once the task is another's."""
        if self.lost:
            raise LeaseLost
        if self.cancelled:
            raise Cancelled


Handler = Callable[[Task], Awaitable[dict[str, Any] | None]]


class ExternalWorker:
    """`lease_seconds`: how long a task stays ours without a heartbeat; one is sent each third of it."""

    def __init__(self, url: str, key: str, *, queues: Sequence[str], lease_seconds: float = 60.0) -> None:
        self.id = uuid4().hex  # fresh for every start
        self._queues = list(queues)
        self._lease_seconds = lease_seconds
        self._store = httpx2.AsyncClient(timeout=60.0)  # signed URLs are asked without the key
        self._http = httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()
        await self._store.aclose()

    async def serve(self, handle: Handler) -> None:
        """Work for ever, a task at a time; a platform that is away is waited for."""
        while True:
            try:
                await self.work_once(handle, wait=30.0)
            except httpx2.HTTPError:
                await asyncio.sleep(_AWAY_SECONDS)

    async def work_once(self, handle: Handler, *, wait: float = 0.0) -> bool:
        """Take a task, if one comes within `wait` seconds (30 at most), and see it through. False: none came."""
        said = await self._ask("/v1/external/claim", queues=self._queues, wait=wait, lease_seconds=self._lease_seconds)
        for one in said["tasks"]:
            await self._see_through(handle, Task(one, self._ask, self._store))
        return bool(said["tasks"])

    async def _see_through(self, handle: Handler, task: Task) -> None:
        beating = asyncio.create_task(self._beat(task))
        try:
            await self._run(handle, task)
        except LeaseLost:
            return  # another has it: whatever we made is nobody's
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating

    async def _run(self, handle: Handler, task: Task) -> None:
        try:
            result = await handle(task)
        except Cancelled:
            await task.tell("acknowledge-cancel")
        except Permanent as error:
            await task.tell("fail", code=error.code, message=error.message, retryable=False)
        except Retryable as error:
            after = None if error.after is None else error.after.total_seconds()
            await task.tell("fail", code=error.code, message=error.message, retry_after=after)
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything: the attempt failed
            await task.tell("fail", code="handler_error", message=f"{type(error).__name__}: {error}"[:2000])
        else:
            files = [{"name": name, "sha256": sha256} for name, sha256 in task.sent.items()]
            await task.tell("complete", result=result, files=files)

    async def _beat(self, task: Task) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            try:
                said = await task.tell("heartbeat", lease_seconds=self._lease_seconds)
            except LeaseLost:
                task.lost = True
                return
            except httpx2.HTTPError:
                continue  # the lease may outlive it
            task.cancelled = bool(said["cancel_requested"])

    async def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self._http.post(path, json={"worker_id": self.id} | body)
        if answer.is_success:
            said: dict[str, Any] = answer.json()
            return said
        if answer.is_server_error:
            answer.raise_for_status()
        problem = answer.json()
        if answer.status_code == _CONFLICT and problem["code"] == "lease_lost":
            raise LeaseLost
        raise Refused(answer.status_code, problem["code"], problem["detail"])
