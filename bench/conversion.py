"""`conversion`: the time and the memory to convert a model of ResNet-50's size, and to send the result to the client.

One worker has one child with one thread, so it uses one core. The time of a step is from its claim to its completion,
by the database's clock, with its downloads and uploads. The memory is the child's largest resident memory during the
steps.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpx2

from bench.figure import Figure, Goal
from bench.http import until_ready
from bench.processes import main_processes_of
from bench.resnet import pictures, resnet
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.guard import descendants
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key
from leasehold.storage.store import ObjectStore
from leasehold.worker.sandbox.fences import peak, usage

_WAIT_SECONDS = 300.0
_SAMPLE_SECONDS = 0.05
_MB = 1_000_000
_FORM = {"user_id": "bench", "model_id": "40000", "version": "0001", "platform": "720"}
_TIMES = """
SELECT step, extract(epoch FROM finished_at - started_at)::float8 AS seconds FROM task ORDER BY position
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion. Times are in seconds, memory is in bytes, and speeds are in bytes a second."""

    steps: dict[str, float]
    child_bytes: int
    upload_growth: int  # of the API's memory
    download_growth: int
    result_speed: float  # of a download through the API
    store_speed: float
    agreement: float  # the share of images for which float and int8 have the same first class
    silence: float  # the longest time without progress

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    model = await asyncio.to_thread(resnet, scale.model_width)
    images = await asyncio.to_thread(pictures, scale.model_images)
    load, runs = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        runs.append(await _run(testbed, scale, model, images))
    details = {
        "model_bytes": len(model),
        "images": len(images),
        "step_seconds": {name: round(median(run.steps[name] for run in runs), 2) for name in runs[0].steps},
        "result_mb_s": [round(run.result_speed / _MB) for run in runs],
        "store_mb_s": [round(run.store_speed / _MB) for run in runs],
    }

    def figure(name: str, unit: str, goal: Goal, values: Iterator[float], **details: Any) -> Figure:
        return Figure(f"conversion, {name}", unit, tuple(values), tuple(load), goal, details)

    return [
        figure("three steps", "s", Goal(20), (run.seconds for run in runs), **details),
        figure("child, most resident", "MB", Goal(1200), (run.child_bytes / _MB for run in runs)),
        figure("longest without progress", "s", Goal(5), (run.silence for run in runs)),
        figure("upload, API grows by", "MB", Goal(32), (run.upload_growth / _MB for run in runs)),
        figure("/result, API grows by", "MB", Goal(32), (run.download_growth / _MB for run in runs)),
        figure(
            "/result to the store's own speed", "%", Goal(80, at_least=True),
            (100 * run.result_speed / run.store_speed for run in runs),
        ),
        figure(
            "top-1 agreement of float and int8", "%", Goal(95, at_least=True), (100 * run.agreement for run in runs)
        ),
    ]  # fmt: skip


async def _run(testbed: Testbed, scale: Scale, model: bytes, images: list[bytes]) -> Run:
    async with testbed.installation() as installation:
        port = free_port()
        await installation.start("api", api_port=port)
        await installation.start_worker(worker_queues="conversion", worker_children=1)
        await until_ready(port)
        (api,), (worker,) = main_processes_of("api"), main_processes_of("worker")
        async with installation.connection() as connection:
            key = await create_key(
                connection, tenant_id="bench", client_id="bench", scopes=("conversion:read", "conversion:write")
            )
            client = httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {key.text}"},
                timeout=_WAIT_SECONDS,
            )
            async with client:
                with _growth(api) as uploading:
                    path = await _send(client, model, images)
                watched = asyncio.create_task(_watch(worker))
                job, silence = await _finished(client, path)
                watched.cancel()
                child_bytes = max(await watched)
                steps = {row["step"]: row["seconds"] for row in await connection.fetch(_TIMES)}
                with _growth(api) as downloading:
                    from_store, through_api = await _speeds(installation, scale, port, key.text, path, job)
        outputs = job["metadata"]["bie"]["outputs"].values()
        return Run(
            steps, child_bytes, uploading[0], downloading[0], through_api, from_store,
            min(output["top1_agreement"] for output in outputs), silence,
        )  # fmt: skip


async def _send(client: httpx2.AsyncClient, model: bytes, images: list[bytes]) -> str:
    files = [("model", ("resnet.onnx", model))]
    files += [("ref_images[]", (f"{number}.png", image)) for number, image in enumerate(images)]
    answer = (await client.post("/api/v1/jobs", data=_FORM, files=files)).raise_for_status()
    return str(answer.headers["Location"])


async def _finished(client: httpx2.AsyncClient, path: str) -> tuple[dict[str, Any], float]:
    """The finished job, and the longest time during which its `stage_progress` did not change."""
    last_progress, since, longest = None, perf_counter(), 0.0
    async with asyncio.timeout(_WAIT_SECONDS):
        while True:
            job = (await client.get(path)).raise_for_status().json()
            now = perf_counter()
            if (job["stage"], job["stage_progress"]) != last_progress:
                longest = max(longest, now - since)
                last_progress, since = (job["stage"], job["stage_progress"]), now
            if job["status"] in ("completed", "failed"):
                break
            await asyncio.sleep(0.1)
    if job["status"] != "completed":
        raise RuntimeError(f"the model was refused: {job['error']}")
    return job, longest


@contextmanager
def _growth(pid: int) -> Iterator[list[int]]:
    """Measure the process during the block. Yields a list with one item: after the block it is the growth of the
    process's peak memory, in bytes.
    """
    with suppress(OSError):  # the kernel cannot reset the peak: then it counts since the process began
        Path(f"/proc/{pid}/clear_refs").write_bytes(b"5")
    before, growth = usage(pid).resident, [0]
    yield growth
    growth[0] = max(peak(pid) - before, 0)


async def _watch(worker: int) -> list[int]:
    """Until cancelled, sample the resident bytes of each child of the worker. Returns all samples."""
    sizes = [0]
    try:
        while True:
            for pid in await asyncio.to_thread(descendants, worker):
                with suppress(OSError):  # the process has just ended
                    sizes.append(usage(pid).resident)
            await asyncio.sleep(_SAMPLE_SECONDS)
    except asyncio.CancelledError:
        return sizes


async def _speeds(
    installation: Installation, scale: Scale, port: int, key: str, path: str, job: dict[str, Any]
) -> tuple[float, float]:
    """Bytes a second of downloads from the store itself, and through the API, measured in turns."""
    store = ObjectStore.from_settings(installation.settings)
    await store.open()
    signed = store.sign_get(job["result_object_keys"]["onnx"], seconds=600)
    await store.close()
    through_api, from_store = [], []
    for _ in range(scale.model_downloads):
        from_store.append(await asyncio.to_thread(_download, signed, ""))
        url = f"http://127.0.0.1:{port}{path}/result?artifact=onnx"
        through_api.append(await asyncio.to_thread(_download, url, key))
    return median(from_store), median(through_api)


def _download(url: str, key: str) -> float:
    """Bytes a second of one GET by a bare socket."""
    address = urlsplit(url)
    lines = [f"GET {address.path}?{address.query} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    began = perf_counter()
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        buffer, received = bytearray(1024 * 1024), 0
        head = connection.recv(65_536)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the download was refused: {head[:100]!r}")
        while count := connection.recv_into(buffer):
            received += count
    return (received + len(head)) / (perf_counter() - began)
