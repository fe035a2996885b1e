"""clients/typescript under Node, against a real API behind a front that fails; and its types against the document."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.generate.typescript import subset
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.transitions import settlements
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.logs import append as append_log
from leasehold.transitions.settlements import Completion
from leasehold.transitions.streams import StreamChunk
from leasehold.transitions.streams import append as append_stream
from tests.api.conftest import Running
from tests.client.front import QUIET_SECONDS, fronting
from tests.client.stores import store_of
from tests.jobs.conftest import TENANT_SCOPES, Maker, client, client_with, maker, running
from tests.jobs.test_job_logs import line
from tests.runs.test_runs import add_steps
from tests.support.not_here import only_where

__all__ = ["client", "client_with", "maker", "running"]  # fixtures
HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "clients" / "typescript"
NODE = shutil.which("node")
OLDEST = 20


def node_version() -> int:
    if NODE is None:
        return 0
    printed = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)", printed)
    return int(found[1]) if found else 0


needs_node = only_where(node_version() >= OLDEST, f"there is no Node.js {OLDEST} or newer")


async def evaluated(script: str, *arguments: str) -> bytes:
    """What the module prints that Node evaluates."""
    process = await asyncio.create_subprocess_exec(
        str(NODE), "--input-type=module", "--eval", script, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        return (await process.communicate())[0]
    finally:
        if process.returncode is None:  # the test's time is up
            process.kill()


def test_the_document_is_that_of_the_api() -> None:
    wrong = "run scripts/reference, then `npm ci && npm run types` in clients/typescript"
    assert (FOLDER / "openapi.json").read_text() == subset(), wrong


def test_the_document_has_no_sentences_so_that_a_new_sentence_changes_no_type() -> None:
    document = json.loads((FOLDER / "openapi.json").read_text())
    assert list(sentences([document["paths"], document["components"]])) == []


def sentences(part: Any, name: str = "") -> Iterator[str]:
    """The descriptions, summaries and titles in a part of the document, but for those that are empty."""
    if isinstance(part, str) and name in ("description", "summary", "title") and part:
        yield part
    elif isinstance(part, dict):
        for inner_name, inner in part.items():
            yield from sentences(inner, inner_name)
    elif isinstance(part, list):
        for inner in part:
            yield from sentences(inner)


def test_the_types_are_generated_from_that_document() -> None:
    sha256 = hashlib.sha256((FOLDER / "openapi.json").read_bytes()).hexdigest()
    first = (FOLDER / "src/schema.d.ts").read_text().partition("\n")[0]
    assert first == f"// openapi.json: {sha256}", "run `npm ci && npm run types` in clients/typescript"


def test_the_declarations_have_each_public_method_of_the_client() -> None:
    source, declared = ((FOLDER / "src" / name).read_text() for name in ("index.js", "index.d.ts"))
    methods = set(re.findall(r"^  (?:async )?\*?([a-z]\w+)\(", source.partition("class Leasehold")[2], re.MULTILINE))
    methods -= {"constructor", "judge", "lost", "read"}  # and those of a class that is not exported
    assert len(methods) > 12
    assert {name for name in methods if not re.search(rf"^    {name}\(", declared, re.MULTILINE)} == set()


@needs_node
async def test_node_submits_follows_and_reads_whatever_the_network_does(
    maker: Maker, running: Running, rows: Connection
) -> None:
    job_id = await maker.make("run")
    lease = (await maker.claim(job_id)).lease
    await append_log(rows, [LogChunk(lease.task_id, 1, 1, n, [line(f"line {n}")]) for n in (1, 2, 3)])
    await append_stream(rows, [StreamChunk(lease, 1, [b'{"chunk":"a"}', b'{"chunk":{"b":1}}'], restarts=False)])
    await settlements.complete(rows, [Completion(lease, [], {"done": True})])
    await maker.succeed(job_id)
    failed = await maker.make("run")
    await maker.fail(failed)
    before = await rows.fetchval("SELECT count(*) FROM run")
    key = await create_key(rows, tenant_id="acme", client_id="node", scopes=sorted(TENANT_SCOPES))
    async with fronting(running.url) as front, asyncio.timeout(120):
        front.failures = ["lose", "503", "429", "pass", "lose"]  # of the submission; then of the batch
        environment = dict(os.environ) | {"LEASEHOLD_URL": front.url, "LEASEHOLD_API_KEY": key.text}
        process = await asyncio.create_subprocess_exec(
            str(NODE),
            str(HERE / "typescript_session.mjs"),
            str(job_id),
            str(failed),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        keys = [key for method, path, key in front.seen if (method, path) == ("POST", "/v1/runs")]
    assert (process.returncode, errors.decode()) == (0, "")
    printed = dict(json.loads(text) for text in output.decode().splitlines())
    events = printed.pop("events")
    assert events == list(range(1, len(events) + 1))
    assert printed == {
        "made": "outside",
        "listed": 120,
        "by tag": [True],
        "explained": True,
        "cancelled": "cancelled",
        "deleted": None,
        "gone": [410, "job_deleted"],
        "logs": ["line 2", "line 3"],
        "stream": [["chunk", "a"], ["chunk", {"b": 1}]],
        "result": {"a": {"done": True}, "b": {"done": True}},
        "failed": "broken",
        "without url": "new Leasehold({ url, key }) needs the URL of the API and an API key",
        "away": "string",
    }
    assert (len(keys), len(set(keys))) == (4, 1)
    assert await rows.fetchval("SELECT count(*) FROM run") == before + 121 - 1


#: Cancels a job and deletes it, each twice.
ENDS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const [url, key, job] = process.argv.slice(1);
const leasehold = new Leasehold({{ url, key }});
const said = (call) => call.catch((error) => error.code);
console.log(JSON.stringify(await said(leasehold.cancel(job))));
console.log(await said(leasehold.cancel(job)));
console.log(await said(leasehold.delete(job)));
console.log(await said(leasehold.delete(job)));
"""


@needs_node
async def test_a_cancel_or_a_delete_whose_answer_was_lost_has_succeeded(
    maker: Maker, running: Running, rows: Connection
) -> None:
    """The client repeats it by itself, and the API refuses the repetition."""
    job_id = await maker.make("run")
    key = await create_key(rows, tenant_id="acme", client_id="node", scopes=sorted(TENANT_SCOPES))
    async with fronting(running.url) as front, asyncio.timeout(60):
        front.failures = ["lose", "503", "pass", "pass", "429", "pass", "lose"]
        out = await evaluated(ENDS, front.url, key.text, str(job_id))
        assert front.failures == []
    cancelled, *others = out.decode().splitlines()
    assert json.loads(cancelled) == {"id": str(job_id), "status": "cancelled"}
    assert others == ["resource_invalid_state", "null", "job_deleted"]


@pytest.mark.parametrize("name", ["package.json", "tsconfig.json"])
def test_its_manifests_are_json(name: str) -> None:
    assert json.loads((FOLDER / name).read_text())


#: Sends a request to the URL of its argument, and prints the error.
ASKS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const leasehold = new Leasehold({{ url: process.argv[1], key: "lh_x_y", timeout: 0.1 }});
await leasehold.request("GET", "", {{ safe: true }}).catch((error) => console.log(error.name, error.code));
process.exit();
"""


@needs_node
@pytest.mark.parametrize(
    ("status", "head", "body", "error"),
    [
        ("200 OK", "", b"<html>a sign-in page</html>", "ApiError answer_not_understood"),
        ("200 OK", "", b"[]", "ApiError answer_not_understood"),
        ("200 OK", "", b"null", "ApiError answer_not_understood"),
        ("400 No", "", b"null", "ApiError http_400"),
        ("400 No", "", b"<html>a firewall</html>", "ApiError http_400"),
        ("200 OK", "Content-Length: 1000\r\n", b"{", "Unavailable undefined"),
    ],
    ids=["page", "list", "null", "refusing null", "refusing page", "half an answer"],
)
async def test_an_answer_that_is_not_the_apis_is_an_error_of_the_client(
    status: str, head: str, body: bytes, error: str
) -> None:
    """The worker survives such an error, and no other."""
    async with store_of(head, body, status=status) as url:
        out = await evaluated(ASKS, url)
    assert out.decode().strip() == error


#: Asks for what no request can hold, with a client that would try for an hour. A worker with it would try for ever.
REFUSED = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const tries = [];
const fetched = (...request) => tries.push(request) && fetch(...request);
const of = (url, key) => new Leasehold({{ url, key, timeout: 3600, fetch: fetched }});
const said = (call) => call().then(() => "nothing", (error) => `${{error.name}} ${{String(error).includes("lh_x")}}`);
const url = "http://127.0.0.1:1";
console.log(await said(async () => of(url, "lh_x_y").submit({{ template: "t" }}, {{ key: "Rechnung \\u2116 7" }})));
console.log(await said(async () => of(url, "lh_x\\ny").get("j")));
console.log(await said(async () => of(url, "lh_x\\u2116y").get("j")));
console.log(await said(async () => of("api.example.com", "lh_x_y").get("j")));
console.log(await said(async () => of("localhost:8000", "lh_x_y").get("j")));
console.log(await said(async () => of("http://me:lh_x_y@127.0.0.1:1", "lh_x_y").get("j")));
console.log(await said(async () => of(url, "lh_x_y").submit({{ template: "t", payload: {{ n: 1n }} }})));
console.log(tries.length);
const sees = (url, {{ headers }}) => Response.json({{ id: headers.get("Authorization") }});
console.log((await new Leasehold({{ url, key: "lh_x_y\\n", fetch: sees }}).get("j")).id);
"""


@needs_node
async def test_what_cannot_be_sent_is_an_error_at_once_that_does_not_show_the_key() -> None:
    """Of a wrong key, URL or payload, `fetch` says the same as of a lost connection. White space around a key, such
    as the newline of its file, is left out.
    """
    async with asyncio.timeout(60):
        out = await evaluated(REFUSED)
    assert out.decode().splitlines() == ["TypeError false"] * 7 + ["0", "Bearer lh_x_y"]


#: Asks the API and the object store with a `fetch` that refuses its receiver, as a browser's does.
AS_IN_A_BROWSER = f"""
globalThis.fetch = async function (url) {{
  if (this !== undefined && this !== globalThis) throw new TypeError("Illegal invocation");
  return String(url).includes("/v1/") ? Response.json({{ id: "7" }}) : new Response("");
}};
const {{ Leasehold }} = await import("{FOLDER / "src/index.js"}");
const {{ ExternalWorker }} = await import("{FOLDER / "src/worker.js"}");
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout: 0.1 }});
console.log((await leasehold.get("7")).id);
const url = "http://127.0.0.1:2";
const file = {{ step: "made", name: "a", size: 0, sha256: "{hashlib.sha256().hexdigest()}", url }};
const task = {{ task_id: "1", step: "used", epoch: 1, files: [file] }};
const request = async (_, path) => (path.endsWith("/files") ? {{ files: [{{ url }}] }} : {{ tasks: [task] }});
await new ExternalWorker({{ request }}, {{ queues: ["q"] }}).workOnce(async (task) => {{
  await task.write("b", "").then(() => console.log("written"), console.log);
  console.log((await task.read("a").catch((error) => error)).length);
}});
process.exit();
"""


@needs_node
async def test_a_fetch_that_refuses_a_receiver_is_called_without_one() -> None:
    """The client called it as its own method, and took the TypeError for a lost connection."""
    async with asyncio.timeout(60):
        out = await evaluated(AS_IN_A_BROWSER)
    assert out.decode().splitlines() == ["7", "written", "0"]


#: Follows the events of a job. Its connection ends when it was quiet for longer than the timeout.
FOLLOWS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const leasehold = new Leasehold({{ url: process.argv[1], key: process.argv[2], timeout: {QUIET_SECONDS / 2} }});
const statuses = [];
for await (const event of leasehold.events(process.argv[3])) statuses.push(event.status);
console.log(statuses.at(-1));
"""


@needs_node
async def test_a_feed_that_ended_with_its_job_while_it_was_quiet_has_the_last_events(
    maker: Maker, running: Running, rows: Connection
) -> None:
    """The client saw that the job had ended, and left out the events since the connection."""
    job_id = await maker.make("run")
    key = await create_key(rows, tenant_id="acme", client_id="node", scopes=sorted(TENANT_SCOPES))
    async with fronting(running.url) as front, asyncio.timeout(120):
        front.failures = ["quiet"]
        process = await asyncio.create_subprocess_exec(
            str(NODE), "--input-type=module", "--eval", FOLLOWS, front.url, key.text, str(job_id),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        while front.failures:
            await asyncio.sleep(0.01)
        await maker.succeed(job_id)
        out, _ = await process.communicate()
    assert out.decode().strip() == "succeeded"


#: Follows events. The connection breaks after an hour without any, by the script's clock.
BREAKS = f"""
import {{ mock }} from "node:test";
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
mock.timers.enable({{ apis: ["Date", "setTimeout"] }});
const turn = () => new Promise((resolve) => setImmediate(resolve));
let connection;
const quiet = new ReadableStream({{ start: (controller) => (connection = controller) }});
const answers = [new Response(quiet), new Response('id: 1\\ndata: {{"seq": 1}}\\n\\n')];
const fetch = async () => answers.shift();
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", fetch }});
let outcome;
leasehold.events("j").next().then(
  (event) => (outcome = event.value.seq),
  (error) => (outcome = error.name),
);
while (answers.length === 2) await turn();
mock.timers.tick(3_600_000);
connection.error(new TypeError("terminated"));
while (outcome === undefined) {{
  await turn();
  mock.timers.tick(100);
}}
console.log(outcome);
process.exit();
"""


@needs_node
async def test_a_feed_whose_connection_breaks_after_an_hour_of_quiet_is_resumed() -> None:
    """The client counted its timeout from the connection's begin, and gave up at once."""
    async with asyncio.timeout(60):
        out = await evaluated(BREAKS)
    assert out == b"1\n"


#: Asks with a signal, and with none: what the client makes of an abort, and whether a try has an end.
ABORTS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
setInterval(() => {{}}, 1000); // as a socket would: the timer of AbortSignal.timeout does not keep Node alive
const given = [];
const silent = (_, {{ signal }}) => {{
  given.push(signal);
  return new Promise((_resolve, reject) => {{
    if (signal.aborted) reject(signal.reason);
    signal.addEventListener("abort", () => reject(signal.reason));
  }});
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout: 3600, fetch: silent }});
const said = async (signal) =>
  leasehold.request("GET", "/", {{ safe: true, signal }}).catch((error) => error.message ?? error);
const own = new AbortController();
const asked = said(own.signal);
own.abort(new Error("enough"));
console.log(await asked, given.length);
const timed = leasehold.request("GET", "/", {{ safe: true, signal: AbortSignal.timeout(1) }});
console.log(await timed.catch((error) => error.name), given.length);
const events = leasehold.events("j", {{ signal: AbortSignal.abort("over") }});
console.log(await events.next().catch((error) => error), given.length);
leasehold.get("j");
console.log(given.at(-1) instanceof AbortSignal);
process.exit();
"""


#: Aborts a request and a feed while the client pauses after a 503, as long as the API asked for.
PAUSES = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
let stop;
const fetch = async () => {{
  setTimeout(() => stop.abort("over"));
  return new Response("", {{ status: 503, headers: {{ "Retry-After": "600" }} }});
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout: 3600, fetch }});
for (const ask of [
  (signal) => leasehold.request("GET", "/", {{ safe: true, signal }}),
  (signal) => leasehold.events("j", {{ signal }}).next(),
]) {{
  stop = new AbortController();
  console.log(await ask(stop.signal).catch((reason) => reason));
}}
"""


@needs_node
async def test_an_abort_ends_a_pause_between_two_tries() -> None:
    """It was noticed after the pause, with the next try. No timer of the pause keeps the process."""
    async with asyncio.timeout(60):
        out = await evaluated(PAUSES)
    assert out == b"over\nover\n"


#: Waits for a job with a client that would try for an hour. The API's answers are lost, or do not come.
WAITS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
setInterval(() => {{}}, 1000); // as a socket would
const limit = AbortSignal.timeout;
AbortSignal.timeout = (milliseconds) => {{
  limit.call(AbortSignal, milliseconds); // throws for what is no whole number
  return limit.call(AbortSignal, Math.ceil(milliseconds / 10)); // for a test that waits a tenth
}};
let tries = 0;
const lost = async () => {{
  tries++;
  throw new TypeError("fetch failed");
}};
const silent = (_, {{ signal }}) => {{
  tries++;
  return new Promise((_resolve, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}};
const busy = async () => {{
  tries++;
  return new Response('{{"code":"rate_limited"}}', {{ status: 429 }});
}};
for (const fetch of [lost, silent, busy]) {{
  const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout: 3600, fetch }});
  for (const timeout of [0, 0.5, 0.1001]) {{
    tries = 0;
    console.log(await leasehold.wait("j", {{ timeout }}).catch((error) => error.name), tries > 0);
  }}
}}
process.exit();
"""


@needs_node
async def test_who_waits_for_a_job_hears_in_time_that_the_api_does_not_answer() -> None:
    async with asyncio.timeout(60):
        out = await evaluated(WAITS)
    assert out.decode().splitlines() == ["Unavailable true"] * 9


#: Waits for jobs that do not end, by the script's clock, and prints how each wait ended and for how many seconds each
#: request has asked the API to hold it. The API holds it so long, or answers at once as behind a proxy.
HOLDS = f"""
import {{ mock }} from "node:test";
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
mock.timers.enable({{ apis: ["Date", "setTimeout"] }});
const turn = () => new Promise((resolve) => setImmediate(resolve));
Math.random = () => 1; // the pauses are 0.2 s, 0.4 s, ...
AbortSignal.timeout = (milliseconds) => {{
  const over = new AbortController();
  setTimeout(() => over.abort(new DOMException("over", "TimeoutError")), milliseconds);
  return over.signal;
}};
const asked = async (timeout, within, answer) => {{
  const waits = [];
  const fetch = (url, {{ signal }}) =>
    new Promise((resolve, reject) => {{
      const wait = Number(url.searchParams.get("wait"));
      waits.push(wait);
      signal.addEventListener("abort", () => reject(signal.reason));
      const [seconds, status, job] = answer(wait, waits.length);
      setTimeout(() => resolve(new Response(JSON.stringify(job), {{ status }})), seconds * 1000);
    }});
  const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout, fetch }});
  let outcome;
  leasehold.wait("j", {{ timeout: within }}).catch((error) => (outcome = error.message));
  while (outcome === undefined) {{
    await turn();
    mock.timers.tick(10);
  }}
  console.log(JSON.stringify([outcome, waits]));
}};
const job = {{ id: "j", status: "running" }};
await asked(5, 100, (wait) => [wait, 200, job]);
await asked(60, 30, (wait, n) => (n === 1 ? [14, 503, {{}}] : [wait, 200, job]));
await asked(60, 20, (wait, n) => [0, 200, {{ ...job, outputs: [{{ url: n }}] }}]);
await asked(60, 20, (wait, n) => [0, 200, {{ ...job, started: n > 5 }}]);
await asked(60, 20, (wait, n) => [1, 200, job]);
await asked(60, 20, (wait, n) => [0, 200, {{ ...job, tags: {{ n }} }}]);
process.exit();
"""


@needs_node
async def test_the_api_holds_the_requests_of_a_wait_as_long_as_the_client_waits_for_their_answers() -> None:
    async with asyncio.timeout(60):
        out = await evaluated(HOLDS)
    outcomes, waits = zip(*map(json.loads, out.decode().splitlines()), strict=True)
    assert outcomes == tuple(f"job j has not ended after {seconds} s" for seconds in (100, 30, 20, 20, 20, 20))
    short, failed, hasty, changed_once, slow, changing = waits
    assert (short[0], max(short)) == (10, 10)  # a try lasts for at most 15 s, of which 5 s are left for the answer
    assert (failed[0], failed[1] < 16) == (20, True)
    assert (len(hasty), len(changed_once)) == (9, 14)  # the pauses grow; after a change they begin anew
    assert 18 <= len(slow) <= 20  # without a pause: the answers take a second
    assert len(changing) > 1000


#: Reads the results of two runs.
READS_RESULTS = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const [url, key, ...runs] = process.argv.slice(1);
const leasehold = new Leasehold({{ url, key }});
for (const run of runs) console.log(JSON.stringify(await leasehold.result(run)));
"""


@needs_node
async def test_the_result_of_a_run_has_those_of_all_its_steps(maker: Maker, running: Running, rows: Connection) -> None:
    """It ended with the 1,000th step."""
    many, full = await maker.make("run"), await maker.make("run")
    await add_steps(rows, str(many), 1, 2500, contained=True, status="succeeded")
    await add_steps(rows, str(full), 1, 998, contained=True, status="succeeded")
    for job_id in (many, full):
        await maker.succeed(job_id)
    key = await create_key(rows, tenant_id="acme", client_id="node", scopes=sorted(TENANT_SCOPES))
    async with asyncio.timeout(60):
        out = await evaluated(READS_RESULTS, running.url, key.text, str(many), str(full))
    of_many, of_full = map(json.loads, out.decode().splitlines())
    own = {"a": {"done": True}, "b": {"done": True}}
    assert of_many == own | {f"step-{number}": f"step-{number}" for number in range(1, 2501)}
    assert of_full == own | {f"step-{number}": f"step-{number}" for number in range(1, 999)}


#: Follows a feed whose connections end at once, as a proxy may end them. Prints the pauses between them.
EMPTY = f"""
import {{ Leasehold }} from "{FOLDER / "src/index.js"}";
const times = [];
const fetch = async (url) => {{
  const isFeed = String(url).includes("/events");
  if (isFeed) times.push(performance.now());
  const status = times.length < 4 ? "running" : "succeeded";
  return new Response(isFeed ? "" : JSON.stringify({{ status }}), {{ status: 200 }});
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", fetch }});
for await (const _ of leasehold.events("j")) throw new Error("there is none");
console.log(...times.slice(1).map((time, i) => Math.round(time - times[i])));
"""


@needs_node
async def test_a_feed_whose_connections_end_at_once_is_not_asked_for_without_a_pause() -> None:
    async with asyncio.timeout(60):
        first, second, third, last = map(int, (await evaluated(EMPTY)).split())
    assert first >= 100
    assert second >= 200
    assert third >= 400
    assert last < third  # the job had ended before the fifth connection, the last one


@needs_node
async def test_an_abort_ends_a_request_and_each_try_ends_by_itself() -> None:
    """After an abort with a reason of one's own, or by `AbortSignal.timeout`, the client tried until its timeout."""
    async with asyncio.timeout(60):
        out = await evaluated(ABORTS)
    assert out.decode().split("\n")[:-1] == ["enough 1", "TimeoutError 2", "over 3", "true"]
