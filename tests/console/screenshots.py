"""`scripts/screenshots` starts an installation, gives it work, and takes the pictures of the console for the docs."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import httpx2
from PIL import Image
from playwright.async_api import Page

from leasehold.cli.installation import Installation
from tests.support.chromium import browsing

FOLDER = Path(__file__).parents[2] / "docs/images"
PICTURE = Path(__file__).parents[2] / "leasehold/cli/picture.jpg"
#: By the picture's name: the page, its width, and the theme.
PAGES = {
    "console-overview": ("/", 1280, "light"),
    "console-jobs": ("/jobs", 1280, "light"),
    "console-job": ("/jobs/{job}", 1280, "light"),
    "console-jobs-dark": ("/jobs", 1280, "dark"),
    "console-phone": ("/jobs", 390, "light"),
}
_SETTLE_SECONDS = 10.0


async def send(client: httpx2.AsyncClient, content: bytes, **tags: str) -> str:
    file = {"content_type": "image/jpeg", "file_name": "a.jpg", "content_length": len(content)}
    ticket = (await client.post("/upload-url", json=file)).json()
    async with httpx2.AsyncClient() as plain:
        put = await plain.put(ticket["upload_url"], content=content, headers={"Content-Type": "image/jpeg"})
        put.raise_for_status()
    named = {"media_id": ticket["media_id"], "original_key": ticket["original_key"], "tags": tags}
    answer = await client.post("/complete-upload", json=named)
    answer.raise_for_status()
    job_id: str = answer.json()["job_id"]
    return job_id


async def furnish(client: httpx2.AsyncClient) -> str:
    """Give the installation work of several kinds. Returns the job whose page is shown."""
    content = PICTURE.read_bytes()
    steps = [{"id": "collect", "queue": "reports"}, {"id": "render", "queue": "reports", "needs": ["collect"]}]
    await client.post("/v1/templates", json={"type": "nightly-report", "steps": steps})
    for customer in ("harbour", "miller", "north"):
        body = {"template": "nightly-report", "scope": "user", "scope_id": customer, "tags": {"customer": customer}}
        (await client.post("/v1/runs", json=body)).raise_for_status()
        await send(client, content, customer=customer)
    for _ in range(2):
        await send(client, content[:300] + bytes(len(content) - 300), customer="miller")
    await client.post("/v1/runs", json={"template": "demo_long_task", "payload": {"seconds": 300}})
    shown = await send(client, content, customer="harbour")
    await asyncio.sleep(_SETTLE_SECONDS)
    return shown


async def take(page: Page, name: str) -> None:
    """As WebP: a tenth of the size of a PNG of the same."""
    picture = Image.open(io.BytesIO(await page.screenshot()))
    FOLDER.mkdir(exist_ok=True)
    picture.save(FOLDER / f"{name}.webp", quality=82, method=6)


async def run() -> None:
    async with Installation() as installation, browsing() as browser:
        headers = {"Authorization": f"Bearer {installation.api_key}"}
        async with httpx2.AsyncClient(base_url=installation.api_url, headers=headers, timeout=60) as client:
            job_id = await furnish(client)
        for name, (path, width, theme) in PAGES.items():
            context = await browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if theme == "dark" else "light",
                timezone_id="UTC",
            )
            page = await context.new_page()
            address = installation.console_url(path.format(job=job_id))
            assert address is not None
            await page.goto(address)
            await page.wait_for_load_state("networkidle")
            await take(page, name)
            await context.close()
            sys.stdout.write(f"docs/images/{name}.webp\n")


if __name__ == "__main__":
    asyncio.run(run())
