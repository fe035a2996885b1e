"""The examples of the guide: a web shop, files of a data pipeline, and an agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
import pytest

from examples import agent, sales, web_shop
from leasehold import App
from leasehold.db.database import connected
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob, submit
from tests.support.http_server import serving_http

SECONDS = 60.0
ROOT = Path(__file__).parents[2]
Running = Callable[[App], AbstractAsyncContextManager[None]]


@pytest.fixture
def running(settings: Settings, tmp_path: Path) -> Running:
    @asynccontextmanager
    async def run(app: App) -> AsyncIterator[None]:
        quick = settings.model_copy(update={"work_dir": str(tmp_path), "poll_seconds": 0.1, "tenant": "me"})
        app.use(quick)
        async with asyncio.timeout(SECONDS), app.serving():
            yield
        app.close()

    return run


async def test_the_web_shops_order_and_receipt_are_one_transaction(
    running: Running, settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_DATABASE_URL", database_url.replace("postgresql://", "postgresql+asyncpg://"))
    transport = httpx2.ASGITransport(app=web_shop.web, raise_app_exceptions=False)
    async with (
        running(web_shop.app),
        web_shop.lifespan(web_shop.web),
        httpx2.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        placed = await client.post("/orders", json={"email": "me@home", "pieces": 1})
        assert placed.status_code == 201
        receipt = await client.get(f"/receipts/{placed.json()['run']}")
        assert receipt.json() == f"receipt {placed.json()['order']} is on its way to me@home"
        assert (await client.post("/orders", json={"email": "me@home", "pieces": 0})).status_code == 500
    async with connected(settings, "test") as connection:
        assert await connection.fetchval("SELECT count(*) FROM job") == 1
        assert await connection.fetchval("SELECT count(*) FROM shop_order") == 1


async def test_a_day_of_sales_is_summed_file_by_file(running: Running, settings: Settings) -> None:
    rows = ["tea,3", "cake,2", "tea,4", "cake,5", "tea,1"]
    job = NewJob(sales.sales, tenant_id="me", params={"csv": "\n".join(["product,amount", *rows]), "rows_per_file": 2})
    async with running(sales.app), connected(settings, "test") as connection:
        await submit(connection, [job])
        while await connection.fetchval("SELECT status FROM job WHERE id = $1", job.id) != "succeeded":
            await asyncio.sleep(0.02)
        total = await connection.fetchval(
            "SELECT value FROM result JOIN task ON task.id = task_id WHERE job_id = $1 AND step = 'total'", job.id
        )
        parts = await connection.fetchval("SELECT count(*) FROM task WHERE step LIKE 'part.%'")
    assert total == {"tea": 8, "cake": 7}
    assert parts == 3


class Model(BaseHTTPRequestHandler):
    """A model with a script: for each number of messages what it answers. `failures`: how many requests fail first."""

    script: dict[int, list[dict[str, Any]]]
    seen: list[list[dict[str, str]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(body["messages"])
        if len(self.seen) == 1:
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        for chunk in self.script[len(body["messages"])]:
            self.wfile.write(json.dumps(chunk, ensure_ascii=False).encode() + b"\n")

    def log_message(self, *_: object) -> None: ...


async def test_the_agent_calls_tools_streams_its_answer_and_survives_an_error_of_the_model(
    running: Running, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {
        1: [{"tool": "weather", "arguments": {"city": "Bern"}}],
        3: [{"tool": "add", "arguments": {"a": 2, "b": 3}}],
        5: [{"tool": "sing", "arguments": {}}],
        7: [{"token": "Take\u2028"}, {"token": "a coat."}],  # a line separator of Unicode, and none of this stream
    }
    seen: list[list[dict[str, str]]] = []
    with serving_http(Model, script=script, seen=seen) as url:
        monkeypatch.setenv("MODEL_URL", url)
        async with running(agent.app):
            run = await agent.answer.asubmit("What do I wear in Bern?")
            assert await run == "Take\u2028a coat."
    assert [message["text"] for message in seen[-1] if message["role"] == "tool"] == [
        "it rains in Bern", "5", "there is no tool sing"
    ]  # fmt: skip
    assert [len(messages) for messages in seen] == [1, 1, 3, 5, 7]  # the failed one was asked again, and no other
    async with connected(settings, "test") as connection:
        chunks = await connection.fetch("SELECT * FROM job_stream WHERE job_id = $1", run.id)
    assert "a coat." in str([dict(row) for row in chunks])


@pytest.mark.parametrize("name", ["web_shop", "sales", "agent", "django_shop"])
def test_the_guide_prints_the_examples_as_they_are(name: str) -> None:
    code = (ROOT / f"examples/{name}.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "docs/guides/examples.md").read_text()
