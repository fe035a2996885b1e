"""`image`: the wall time of the media pipeline for one large JPEG, compared with direct calls of its three steps.

Both are warm and take turns, so that other work of the machine affects both. The pipeline's time is from just before
`POST /complete-upload` to the job's end, by the database's clock, with every download, upload and commit.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import httpx2

from bench.bare import Bare, process
from bench.figure import Figure, Goal
from bench.http import until_ready
from bench.picture import photograph
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.ports import free_port
from leasehold.embedded.process import Server
from leasehold.pipelines.media.pipeline import media
from leasehold.security.credentials import create_key

_GOAL = Goal(1.08)
_KIND = "image/jpeg"
_WAIT_SECONDS = 120.0

_TIMES = """
SELECT extract(epoch FROM j.finished_at)::float8 AS finished, t.step,
       extract(epoch FROM t.finished_at - t.started_at)::float8 AS seconds,
       (SELECT o.sha256 FROM output o WHERE o.job_id = j.id AND o.name = 'final.webp') AS final_sha256
FROM media m JOIN job j ON j.id = m.job_id JOIN task t ON t.job_id = j.id
WHERE m.id = $1::uuid ORDER BY t.position
"""


@dataclass(frozen=True, slots=True)
class Processed:
    """One picture that went through the platform. `steps`: the seconds of each step from claim to completion."""

    seconds: float
    steps: dict[str, float]
    final_sha256: str


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    picture = await asyncio.to_thread(photograph, scale.picture_width, scale.picture_height)
    load, runs = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        runs.append(await _turns(testbed, scale, picture))
    details = {
        "megapixels": scale.picture_width * scale.picture_height / 1e6,
        "picture_bytes": len(picture),
        "pictures_a_run": scale.picture_rounds,
        "pipeline_step_ms": _step_ms([picture_run for run in runs for picture_run, _ in run]),
        "bare_step_ms": _step_ms([picture_run for run in runs for _, picture_run in run]),
    }
    pipeline = tuple(1000 * median(picture_run.seconds for picture_run, _ in run) for run in runs)
    bare = tuple(1000 * median(picture_run.seconds for _, picture_run in run) for run in runs)
    ratios = tuple(ours / theirs for ours, theirs in zip(pipeline, bare, strict=True))
    return [
        Figure("image, pipeline to bare steps", "ratio", ratios, tuple(load), _GOAL, details),
        Figure("image, pipeline", "ms", pipeline, tuple(load)),
        Figure("image, bare steps", "ms", bare, tuple(load)),
    ]


@dataclass(frozen=True, slots=True)
class Platform:
    """A new installation with an API and a worker, a client of its media endpoints, and a database connection."""

    installation: Installation
    worker: Server
    client: httpx2.AsyncClient
    connection: asyncpg.Connection[asyncpg.Record]


@asynccontextmanager
async def serving(testbed: Testbed) -> AsyncIterator[Platform]:
    async with testbed.installation() as installation:
        port = free_port()
        await installation.start("api", api_port=port)
        worker = await installation.start_worker()
        await until_ready(port)
        async with installation.connection() as connection:
            scopes = ("media:read", "media:write")
            key = await create_key(connection, tenant_id="bench", client_id="bench", scopes=scopes)
            headers = {"Authorization": f"Bearer {key.text}"}
            async with httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=_WAIT_SECONDS
            ) as client:
                yield Platform(installation, worker, client, connection)


async def _turns(testbed: Testbed, scale: Scale, picture: bytes) -> list[tuple[Processed, Bare]]:
    """One run: open a new installation, warm up the pipeline and the bare steps, then measure them in turns."""
    async with serving(testbed) as platform:
        with _bare_process(picture) as bare:
            await _through_platform(platform, picture)
            await bare()
            return [await _turn(platform, picture, bare) for _ in range(scale.picture_rounds)]


async def _turn(platform: Platform, picture: bytes, bare: Any) -> tuple[Processed, Bare]:
    processed, bare_result = await _through_platform(platform, picture), await bare()
    if processed.final_sha256 != bare_result.final_sha256:
        raise RuntimeError("the pipeline and the bare steps made different pictures")
    return processed, bare_result


@contextmanager
def _bare_process(picture: bytes) -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(1, mp_context=spawn) as process_pool:
        original = Path(directory) / "original.jpg"
        original.write_bytes(picture)
        call = partial(process, original, Path(directory))
        yield lambda: asyncio.get_running_loop().run_in_executor(process_pool, call)


async def _through_platform(platform: Platform, picture: bytes) -> Processed:
    client, connection = platform.client, platform.connection
    upload_body = await uploaded(client, picture)
    began = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    await ok(client.post("/complete-upload", json=upload_body))
    async with asyncio.timeout(_WAIT_SECONDS):
        while (
            status := (await ok(client.get(f"/media/{upload_body['media_id']}?wait=10"))).json()["status"]
        ) != "READY":
            if status == "FAILED":
                raise RuntimeError("the picture was refused")
    rows = await connection.fetch(_TIMES, upload_body["media_id"])
    steps = {row["step"]: row["seconds"] for row in rows}
    return Processed(rows[0]["finished"] - began, steps, rows[0]["final_sha256"])


async def uploaded(client: httpx2.AsyncClient, picture: bytes) -> dict[str, str]:
    """Upload the picture. Returns the body for `POST /complete-upload`."""
    upload_request = {"content_type": _KIND, "file_name": "a.jpg", "content_length": len(picture)}
    ticket = (await ok(client.post("/upload-url", json=upload_request))).json()
    async with httpx2.AsyncClient(timeout=_WAIT_SECONDS) as store:
        await ok(store.put(ticket["upload_url"], content=picture, headers={"Content-Type": _KIND}))
    return {"media_id": ticket["media_id"], "original_key": ticket["original_key"]}


async def ok(request: Any) -> httpx2.Response:
    answer: httpx2.Response = await request
    return answer.raise_for_status()


def _step_ms(runs: list[Processed] | list[Bare]) -> dict[str, float]:
    """The median of each step, and of the time between the steps."""
    seconds_by_step = {step.name: [picture_run.steps[step.name] for picture_run in runs] for step in media.steps}
    seconds_by_step["between"] = [picture_run.seconds - sum(picture_run.steps.values()) for picture_run in runs]
    return {name: round(1000 * median(seconds), 1) for name, seconds in seconds_by_step.items()}
