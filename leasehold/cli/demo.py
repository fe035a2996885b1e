"""`leasehold demo`: a picture goes in, READY comes out, through the public HTTP API and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.table import Table

from leasehold.cli.installation import Installation
from leasehold.domain.errors import LeaseholdError
from leasehold.pipelines.media.kinds import HEAD_BYTES, sniff

SHIPPED = Path(__file__).with_name("picture.jpg")
_WAIT_SECONDS = 120.0
_UNKNOWN = "image/jpeg"  # what we call a file of no kind we know: the API says what it thinks of it


class DemoFailed(LeaseholdError):
    """A picture did not become READY."""


@dataclass
class Sent:
    """One picture on its way."""

    path: Path
    view: dict[str, Any]
    saved: Path | None = None


async def run(pictures: Sequence[Path], *, out: Path, **where: Any) -> None:
    """Raises DemoFailed, after all were tried, when a picture did not become READY."""
    console = Console()
    started = monotonic()
    with console.status("starting PostgreSQL, an S3 server, the API and a worker"):
        installation = Installation(patient=False, **where)
        await installation.__aenter__()
    try:
        console.print(
            f"up after {monotonic() - started:.1f} s at {installation.api_url}; broker: {installation.broker}"
        )
        if installation.isolation == "best_effort":
            console.print(f"fences: {installation.fences}")
        sent = [Sent(path, {"status": "INIT", "steps": []}) for path in (pictures or [SHIPPED])]
        headers = {"Authorization": f"Bearer {installation.api_key}"}
        async with httpx2.AsyncClient(base_url=installation.api_url, headers=headers, timeout=60) as client:
            with Live(_table(sent), console=console, refresh_per_second=10) as live:
                await asyncio.gather(*(_follow(client, one, out, lambda: live.update(_table(sent))) for one in sent))
        for one in sent:
            _report(console, one)
    finally:
        await installation.__aexit__(None, None, None)
    console.print(f"everything is stopped; {monotonic() - started:.1f} s in all")
    if failed := [str(one.path) for one in sent if one.view["status"] != "READY"]:
        raise DemoFailed(f"not READY: {', '.join(failed)}")


async def _follow(client: httpx2.AsyncClient, one: Sent, out: Path, show: Any) -> None:
    data = await asyncio.to_thread(one.path.read_bytes)
    kind = sniff(data[:HEAD_BYTES]) or _UNKNOWN
    wanted = {"content_type": kind, "file_name": one.path.name, "content_length": len(data)}
    asked = await _said(client.post("/upload-url", json=wanted))
    async with httpx2.AsyncClient(timeout=60) as plain:  # the signed URL is all that the store asks for
        (await plain.put(asked["upload_url"], content=data, headers={"Content-Type": kind})).raise_for_status()
    named = {"media_id": asked["media_id"], "original_key": asked["original_key"]}
    accepted = await client.post("/complete-upload", json=named)
    if accepted.is_error:
        problem = accepted.json()
        one.view = {**one.view, "status": "FAILED", "error": {"code": problem["code"], "message": problem["detail"]}}
        show()
        return
    async with asyncio.timeout(_WAIT_SECONDS):
        while one.view["status"] not in ("READY", "FAILED"):
            one.view = await _said(client.get(f"/media/{asked['media_id']}", params={"wait": 5}))
            show()
    if one.view["status"] == "READY":
        one.saved = await _save(one, out)


async def _said(asking: Any) -> dict[str, Any]:
    answer = await asking
    if answer.is_error:
        raise DemoFailed(
            f"{answer.request.method} {answer.request.url.path} answered {answer.status_code}: {answer.text}"
        )
    said: dict[str, Any] = answer.json()
    return said


async def _save(one: Sent, out: Path) -> Path:
    async with httpx2.AsyncClient(timeout=60) as plain:
        final = await plain.get(one.view["final_url"])
        final.raise_for_status()
    saved = out / f"{one.path.stem}.webp"
    await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(saved.write_bytes, final.content)
    return saved


def _table(sent: Sequence[Sent]) -> Table:
    table = Table("picture", "status", "steps")
    for one in sent:
        steps = "  ".join(f"{step['name']} {step['status'].lower()}" for step in one.view["steps"])
        table.add_row(one.path.name, one.view["status"], steps)
    return table


def _report(console: Console, one: Sent) -> None:
    console.print(f"\n{one.path.name}: {one.view['status']}", style="bold", highlight=False)
    for step in one.view["steps"]:
        if step.get("duration_ms") is not None:
            console.print(f"  {step['name']:<10} {step['duration_ms']:>7.0f} ms")
    if error := one.view.get("error"):
        console.print(f"  {error['code']}: {error['message']}", highlight=False)
    if one.saved is not None:
        console.print(f"  final_url  {one.view['final_url']}", highlight=False, soft_wrap=True)
        sizes = f"{one.saved.stat().st_size:,} bytes; the original has {one.path.stat().st_size:,}"
        console.print(f"  saved      {one.saved} ({sizes})", highlight=False)
