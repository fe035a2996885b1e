"""Makes finished conversions, which can be promoted. It claims and settles their steps by the worker's statements."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from uuid import UUID, uuid4

import httpx2

from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import claims, settlements
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.settlements import Completion, Output

_FORM = {"model_id": "40000", "version": "0001", "platform": "720"}
_STEPS = {"onnx": "out.onnx", "bie": "out.bie", "nef": "out.nef"}
_MODEL = bytes(100_000)
_TERMS = LeaseTerms(uuid4(), 30.0, 5.0, 5)


async def finish(settings: Settings, port: int, key: str, count: int) -> None:
    """Make `count` finished conversions, each for another user: `user-0`, `user-1`, ..."""
    store = ObjectStore.from_settings(settings)
    await store.open()
    connection = await connect(settings, "bench")
    try:
        for number in range(count):
            job_id = await _submit_conversion(port, key, f"user-{number}")
            for step, name in _STEPS.items():
                await _settle(connection, store, job_id, step, name)
    finally:
        await connection.close()
        await store.close()


async def _submit_conversion(port: int, key: str, user: str) -> UUID:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as http:
        answer = await http.post("/api/v1/jobs", data=_FORM | {"user_id": user}, files={"model": ("model.onnx", b"x")})
    if answer.status_code != HTTPStatus.CREATED:
        raise RuntimeError(f"a model was answered {answer.status_code}: {answer.text[:200]}")
    return UUID(answer.json()["job_id"])


async def _settle(connection: Connection, store: ObjectStore, job_id: UUID, step: str, name: str) -> None:
    task = await connection.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = $2", job_id, step)
    (claimed,) = await claims.claim(connection, _TERMS, [task])
    key = f"jobs/{job_id}/output/{name}"
    await store.put(key, _MODEL, content_type="application/octet-stream", metadata={})
    output = Output(f"output/{name}", key, len(_MODEL), hashlib.sha256(_MODEL).hexdigest(), "application/octet-stream")
    await settlements.complete(connection, [Completion(claimed.lease, [output])])
