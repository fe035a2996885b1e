"""clients/typescript in Chromium: a browser's `fetch` is stricter than Node's."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Route

from leasehold.embedded.process import EmbeddedError
from tests.client.test_typescript import FOLDER
from tests.support.chromium import browsing
from tests.support.not_here import not_here

#: The page's own origin: nothing listens there, and the test answers each request.
ORIGIN = "https://jobs.example.com"
RUN = {"id": "7", "status": "succeeded", "result": {"made": 1}}
#: Does what each module of the client asks `fetch` for: API requests, a stream, and a file of the object store.
USES = """async (origin) => {
  const { Leasehold } = await import("/src/index.js");
  const { Task } = await import("/src/worker.js");
  const leasehold = new Leasehold({ url: origin, key: "lh_x_y", timeout: 1 });
  const run = await leasehold.submit({ template: "t" });
  const events = [];
  for await (const event of leasehold.events(run.id)) events.push(event.seq);
  const sha256 = "d7a8fbb307d7809469ca9abcb0082e4f8d5651e46d3cdb762d02d0bf37c9e592";
  const file = { step: "made", name: "fox", size: 43, sha256, content_type: "text/plain", url: `${origin}/store/fox` };
  const ask = async () => ({ files: [{ url: `${origin}/store/new`, headers: {} }] });
  const task = new Task({ task_id: "1", step: "used", epoch: 1, files: [file] }, ask, globalThis.fetch);
  await task.write("new", "bytes");
  const read = new TextDecoder().decode(await task.read("fox"));
  return { result: await leasehold.result(run.id), events, read, sent: task.sent.length };
}"""


async def answer(route: Route) -> None:
    path = urlsplit(route.request.url).path
    if path.startswith("/src/"):
        await route.fulfill(path=FOLDER / path.removeprefix("/"), content_type="text/javascript")
    elif path.endswith("/events"):
        again = route.request.headers.get("last-event-id") == "1"
        await route.fulfill(content_type="text/event-stream", body="" if again else 'id: 1\ndata: {"seq": 1}\n\n')
    elif path == "/store/fox":
        await route.fulfill(body="The quick brown fox jumps over the lazy dog")
    elif path == "/":
        await route.fulfill(content_type="text/html", body="")
    else:
        await route.fulfill(json=RUN)


async def test_a_page_of_the_apis_origin_submits_follows_and_uses_files() -> None:
    """A browser's `fetch` throws a TypeError when it is called as the method of an object of one's own. The client took
    it for a lost connection.
    """
    try:
        async with browsing() as browser:
            page = await browser.new_page()
            await page.route("**", answer)
            await page.goto(ORIGIN)
            used: dict[str, Any] = await page.evaluate(USES, ORIGIN)
    except EmbeddedError as error:
        not_here(f"Chromium, in which the TypeScript client runs: {error}")
    text = "The quick brown fox jumps over the lazy dog"
    assert used == {"result": {"made": 1}, "events": [1], "read": text, "sent": 1}
