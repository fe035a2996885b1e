"""clients/typescript/src/worker.js under Node, against a real API: it works, fails, stops, and gives tasks back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.api.auth.security import EXTERNAL_WORK
from leasehold.client.external_output import MAX_CHARACTERS, MAX_ITEMS
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.telemetry.attempt_logs import MAX_FIELDS
from leasehold.transitions import sweeps
from tests.api.conftest import Running
from tests.client.front import Front, fronting
from tests.client.stores import endless_store
from tests.client.test_typescript import NODE, evaluated, needs_node
from tests.factories import Rows, assert_history
from tests.runs.conftest import Client, client, running, runs_settings, step_of
from tests.runs.test_external import claim, settle

__all__ = ["client", "running", "runs_settings"]  # fixtures
HERE = Path(__file__).parent
SECONDS = 60.0
STEPS = [{"id": "make", "queue": "reports", "retry": {"max_attempts": 2, "backoff_seconds": [0]}}]
pytestmark = needs_node


@dataclass
class Outside:
    """The worker's process, and the front between it and the API."""

    process: Process
    front: Front

    async def says(self, name: str) -> Any:
        """The value of the next line with this name."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            while line := await self.process.stdout.readline():
                said, value = json.loads(line)
                if said == name:
                    return value
        assert self.process.stderr is not None
        raise AssertionError((await self.process.stderr.read()).decode() or f"it ended and never said {name}")

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert await self.says("ended")
        assert await self.process.wait() == 0


@asynccontextmanager
async def working(url: str, rows: Connection, *, grace_seconds: float = 30.0) -> AsyncIterator[Outside]:
    key = await create_key(rows, tenant_id="acme", client_id="node", scopes=(EXTERNAL_WORK,))
    async with fronting(url) as front:
        environment = dict(os.environ) | {"LEASEHOLD_URL": front.url, "LEASEHOLD_API_KEY": key.text}
        process = await asyncio.create_subprocess_exec(
            str(NODE), str(HERE / "typescript_worker.mjs"), "reports", str(grace_seconds),
            env=environment, stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        outside = Outside(process, front)
        try:
            await outside.says("ready")
            yield outside
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def begin(client: Client, do: str, *more: dict[str, Any]) -> str:
    assert (await client.post("/v1/templates", type=do, steps=[*STEPS, *more])).status_code == 201
    return await client.start(do, payload={"do": do})


async def test_it_reads_and_writes_files_reports_logs_and_emits(
    client: Client, running: Running, rows: Connection
) -> None:
    async with working(running.url, rows) as outside:
        run = await begin(client, "files", {"id": "use", "queue": "reports"})
        said = await client.until(run, "succeeded", "failed")
        await outside.stop()
    text = "a,b\n1,ü\n"
    used = {"read": text, "results": {"make": {"made": 1}}, "unknown": "RangeError"}
    assert said["result"] == {"make": {"made": 1}, "use": used}
    assert await rows.fetchval("SELECT summary FROM progress p JOIN task t ON t.id = p.task_id WHERE t.step = 'make'")
    (line,) = (await client.http.get(f"/v1/runs/{run}/logs", params={"step": "make"})).json()["lines"]
    assert (line["message"], line["fields"]) == ("made \N{REPLACEMENT CHARACTER}", {"rows": 1})
    chunks = (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]
    assert [one["chunk"] for one in chunks] == ["tok", {"en": 1}]
    await assert_history(Rows(rows), UUID(run))


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ("permanent", "broken"),
        ("odd", "handler_error"),
        ("unprintable", "handler_error"),
        ("untold", "handler_error"),
        ("refused", "invalid_request"),
        ("infinite", "handler_error"),
    ],
)
async def test_what_a_handler_throws_or_returns_wrongly_fails_the_attempt(
    client: Client, running: Running, rows: Connection, do: str, code: str
) -> None:
    async with working(running.url, rows) as outside:
        said = await client.until(await begin(client, do), "failed", "succeeded")
        await outside.stop()
    assert (said["status"], said["error"]["code"]) == ("failed", code)


async def test_a_text_that_is_cut_in_the_middle_of_a_character_is_sent(
    client: Client, running: Running, rows: Connection
) -> None:
    """The API does not read half a character: it refused the failure, the worker ended, and so did each next one."""
    async with working(running.url, rows) as outside:
        said = await client.until(run := await begin(client, "halves"), "failed", "succeeded")
        await outside.stop()
    assert (said["error"]["code"], said["error"]["message"]) == ("cut", "x" * 1999 + "\N{REPLACEMENT CHARACTER}")
    sent = zip(outside.front.seen, outside.front.bodies, strict=True)
    (lines,) = [json.loads(body)["lines"] for (_, path, _), body in sent if path.endswith("/logs")]
    assert lines[0]["message"] == "x" * 65_535 + "\N{REPLACEMENT CHARACTER}"
    assert lines[0]["traceback"] == "\N{REPLACEMENT CHARACTER}" + "x" * 65_535
    shown = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    assert [line["level"] for line in shown] == ["info", "error"]


async def test_an_item_that_the_api_refuses_takes_no_other_along_and_the_log_names_the_loss(
    client: Client, running: Running, rows: Connection
) -> None:
    """What can be known to be refused is refused where the handler logs or emits it."""
    async with working(running.url, rows) as outside:
        run = await begin(client, "output")
        said = await client.until(run, "succeeded", "failed")
        await outside.stop()
    assert said["result"] == {"make": {"refused": ["RangeError", *["TypeError"] * 5]}}
    lines = (await client.http.get(f"/v1/runs/{run}/logs")).json()["lines"]
    (loss,) = [line["message"] for line in lines if line["level"] == "warning"]
    assert loss.startswith("The API has refused output of this attempt: integer_too_large: ")
    *long, many = [line for line in lines if line["level"] == "info"]
    assert [line["message"].split()[0] for line in long] == [str(number) for number in range(25) if number != 7]
    assert (many["message"], many["fields"]) == ("many", {f"f{number}": number for number in range(MAX_FIELDS)})
    chunks = [item["chunk"] for item in (await client.http.get(f"/v1/runs/{run}/stream")).json()["chunks"]]
    plain = {"plain": "\\u0000 \\ud800 \N{GRINNING FACE}"}
    assert chunks == [*(number for number in range(25) if number != 17), "ab\N{REPLACEMENT CHARACTER}", plain]


async def test_an_attempt_that_may_be_repeated_is(client: Client, running: Running, rows: Connection) -> None:
    async with working(running.url, rows) as outside:
        said = await client.until(await begin(client, "later"), "failed", "succeeded")
        await outside.stop()
    assert said["result"] == {"make": {"attempt": 2}}


async def test_it_settles_through_an_outage(client: Client, running: Running, rows: Connection) -> None:
    """What was done once is not done again for a request that was lost."""
    async with working(running.url, rows) as outside:
        run = await begin(client, "outage")
        assert await outside.says("outage") == 1
        outside.front.failures = ["refuse"]  # a heartbeat
        async with asyncio.timeout(SECONDS):
            while outside.front.failures:
                await asyncio.sleep(0.02)
        outside.front.failures = ["503", "break", "429", "502", "lose"]
        outside.process.send_signal(signal.SIGUSR2)
        said = await client.until(run, "succeeded", "failed")
        await outside.stop()
        assert outside.front.failures == []
    assert said["result"] == {"make": {"calls": 1}}


async def test_it_hears_of_a_cancel_and_acknowledges_it(client: Client, running: Running, rows: Connection) -> None:
    async with working(running.url, rows) as outside:
        run = await begin(client, "waits")
        await outside.says("waits")
        await client.post(f"/v1/runs/{run}/cancel")
        assert await outside.says("stopped by") == "Cancelled"
        await client.until(run, "cancelled")
        await outside.stop()


async def test_a_lost_lease_stops_the_task_and_the_worker_works_on(
    client: Client, running: Running, rows: Connection
) -> None:
    async with working(running.url, rows) as outside:
        run = await begin(client, "waits")
        await outside.says("waits")
        task_id = await rows.fetchval("SELECT id FROM task WHERE job_id = $1", UUID(run))
        await rows.execute("UPDATE task SET lease_until = clock_timestamp() WHERE id = $1", task_id)
        await sweeps.expire_leases(rows, [], 5)
        task = await claim(client, "w2", wait=5)
        assert await outside.says("stopped by") == "LeaseLost"
        assert step_of(await client.look(run), "make")["state"] == "running"
        assert (await settle(client, task, "complete", result={"by": "w2"})).status_code == 200
        other = await client.until(await begin(client, "later"), "succeeded", "failed")
        await outside.stop()
    assert (await client.look(run))["result"] == {"make": {"by": "w2"}}
    assert other["status"] == "succeeded"
    await assert_history(Rows(rows), UUID(run))


@pytest.mark.parametrize(("do", "grace_seconds"), [("waits", 30.0), ("deaf", 0.5)])
async def test_a_worker_that_stops_gives_its_task_back(
    client: Client, running: Running, rows: Connection, do: str, grace_seconds: float
) -> None:
    """Also that of a handler that does not listen, once the grace is over. The attempt does not count."""
    async with working(running.url, rows, grace_seconds=grace_seconds) as outside:
        run = await begin(client, do)
        assert await outside.says(do) == 1
        await outside.stop()
        task = await claim(client, "w2")
    assert (task["run_id"], task["attempt"], task["epoch"]) == (run, 1, 2)


async def test_a_task_that_a_stopped_workers_claim_brings_is_given_back(
    client: Client, running: Running, rows: Connection
) -> None:
    assert (await client.post("/v1/templates", type="waits", steps=STEPS)).status_code == 201
    async with working(running.url, rows) as outside:
        async with asyncio.timeout(SECONDS):
            while not any(path == "/v1/external/claim" for _, path, _ in outside.front.seen):
                await asyncio.sleep(0.01)
        outside.process.send_signal(signal.SIGTERM)
        run = await client.start("waits", payload={"do": "waits"})
        assert await outside.says("ended")
        task = await claim(client, "w2")
    assert (task["run_id"], task["attempt"]) == (run, 1)


#: Reads a file of eight bytes from the URL of its argument, and prints the code of the error.
READS_A_FILE = f"""
import {{ Task }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
const file = {{ step: "made", name: "a", size: 8, sha256: "00", content_type: "x/y", url: process.argv[1] }};
const task = new Task({{ task_id: "1", step: "used", files: [file], epoch: 1 }}, async () => ({{}}), fetch);
console.log(await task.read("a").catch((error) => error.code));
process.exit();
"""


async def test_a_file_whose_bytes_do_not_end_is_given_up() -> None:
    async with endless_store() as url, asyncio.timeout(SECONDS):
        out = await evaluated(READS_A_FILE, url)
    assert out == b"file_corrupt\n"


#: Reads a file and writes one, at the URL of its argument. Prints the names and codes of the errors, and whether their
#: messages show the URL.
USES_A_FILE = f"""
import {{ Task }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
const url = process.argv[1];
const file = {{ step: "made", name: "a", size: 8, sha256: "00", content_type: "x/y", url }};
const claim = {{ task_id: "1", step: "used", files: [file], epoch: 1 }};
const task = new Task(claim, async () => ({{ files: [{{ url, headers: {{}} }}] }}), fetch);
const shown = (error) => console.log(error.name, error.code, error.message.includes(url));
await task.read("a").catch(shown);
await task.write("a", "bytes").catch(shown);
process.exit();
"""


async def test_a_store_that_is_away_fails_the_attempt_with_the_codes_of_its_refusals() -> None:
    out = await evaluated(USES_A_FILE, "http://127.0.0.1:1/")
    assert out == b"Retryable file_unreadable false\nRetryable file_unwritable false\n"


#: A worker that is told to stop while the API answers nothing, or only the requests of the name that the script gets.
#: The worker's clock is the script's.
STOPS = f"""
import {{ mock }} from "node:test";
import {{ ExternalWorker }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
mock.timers.enable({{ apis: ["setTimeout"] }});
const claim = {{ task_id: "1", step: "made", files: [], epoch: 1 }};
const asked = [];
const silent = {{
  request(_method, path, {{ signal }}) {{
    asked.push(path.split("/").at(-1));
    if (path.endsWith("/claim")) return Promise.resolve({{ tasks: [claim] }});
    if (path.endsWith(`/${{process.argv[1]}}`)) return Promise.resolve({{}});
    return new Promise((_resolve, reject) => {{
      if (signal?.aborted) reject(signal.reason);
      signal?.addEventListener("abort", () => reject(signal.reason));
    }});
  }},
}};
const stop = new AbortController();
const worker = new ExternalWorker(silent, {{ queues: ["q"] }});
const work = worker.workOnce(async (task) => {{
  task.log("a line");
  stop.abort();
  task.checkpoint();
}}, {{ signal: stop.signal }});
while (!asked.includes("logs")) await new Promise((resolve) => setImmediate(resolve));
mock.timers.tick(4_999);
const first = await Promise.race([work, new Promise((resolve) => setImmediate(() => resolve("works")))]);
mock.timers.tick(1);
console.log(first, await work, [...new Set(asked)].join(" "));
process.exit();
"""


async def test_a_worker_that_stops_waits_five_seconds_for_an_api_that_does_not_answer() -> None:
    """Also for the lines of its log. It went on for as long as the client tries again, and stopped a minute later."""
    async with asyncio.timeout(SECONDS):
        out = await evaluated(STOPS)
    assert out == b"works true claim logs release\n"


async def test_output_that_the_api_does_not_answer_leaves_time_to_give_the_task_back() -> None:
    """The lines took all of the time, so that the task waited for the end of its lease."""
    async with asyncio.timeout(SECONDS):
        out = await evaluated(STOPS, "release")
    assert out == b"true true claim logs release\n"


#: A worker whose claims are answered at once, with no task. Its clock is the script's. Prints how often it has claimed
#: after so many turns of the event loop, then when its pause has passed.
ANSWERED_AT_ONCE = f"""
import {{ mock }} from "node:test";
import {{ ExternalWorker }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
mock.timers.enable({{ apis: ["setTimeout"] }});
let claims = 0;
const stop = new AbortController();
const api = {{ request: async () => (++claims === 99 ? (stop.abort(), {{ tasks: [] }}) : {{ tasks: [] }}) }};
const serving = new ExternalWorker(api, {{ queues: ["q"] }}).serve(async () => {{}}, {{ signal: stop.signal }});
const turns = async () => {{ for (let turn = 0; turn < 500; turn++) await null; return claims; }};
const first = await turns();
mock.timers.tick(1_999);
const second = await turns();
mock.timers.tick(1);
console.log(first, second, await turns());
stop.abort();
await serving;
"""


async def test_a_worker_waits_after_an_empty_answer_that_came_at_once() -> None:
    async with asyncio.timeout(SECONDS):
        out = await evaluated(ANSWERED_AT_ONCE)
    assert out == b"1 1 2\n"


#: A worker whose handler fails its first task, while the API refuses so many settlements with this status. Prints the
#: requests about each task, and how `serve` ends.
REFUSED = f"""
import {{ Leasehold }} from "{HERE.parents[1] / "clients/typescript/src/index.js"}";
import {{ ExternalWorker, Permanent, Retryable }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
const [status, count, does] = process.argv.slice(1);
const asked = [];
const stop = new AbortController();
let claims = 0;
let refusals = Number(count);
const fetch = async (url, {{ body }}) => {{
  const [id, verb] = String(url).split("/").slice(-2);
  if (verb === "claim") {{
    claims += 1;
    return Response.json({{ tasks: [{{ task_id: String(claims), step: "made", files: [], epoch: 1 }}] }});
  }}
  if (verb === "logs") return Response.json({{ cut: false }});
  if (verb === "heartbeat") return Response.json({{ cancel_requested: id === "1" }});
  const {{ code = "", message = "", retryable = "", retry_after }} = JSON.parse(body);
  asked.push([id, verb, code, message, retryable, retry_after].join(" ").trim());
  if (id === "1" && refusals-- > 0) return Response.json({{ code: "odd", detail: "no" }}, {{ status: Number(status) }});
  return Response.json({{}});
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", fetch }});
const worker = new ExternalWorker(leasehold, {{ queues: ["q"], leaseSeconds: 0.3 }});
const handle = async (task) => {{
  if (task.id === "2") stop.abort();
  else if (does === "throw") throw new Permanent("broken", "it is broken");
  else if (does === "postpone") throw new Retryable("busy", {{ code: "busy", after: 70 }});
  else if (does === "wait") await new Promise((resolve) => task.signal.addEventListener("abort", resolve));
  task.checkpoint();
}};
const end = await worker.serve(handle, {{ signal: stop.signal }}).then(() => "stopped", (error) => error.name);
console.log([...asked, end].join(", "));
process.exit();
"""


@pytest.mark.parametrize(
    ("does", "first", "second"),
    [
        ("throw", "fail broken it is broken false", "fail broken odd: no false"),
        ("postpone", "fail busy busy true 70", "fail busy odd: no true 70"),
        ("return", "complete", "fail odd odd: no true"),
        ("wait", "acknowledge-cancel", "fail odd odd: no true"),
    ],
)
async def test_a_worker_works_on_after_a_settlement_that_the_api_refuses(does: str, first: str, second: str) -> None:
    """The attempt fails with the refusal as its message. A failure stays as final as the handler said. If the API
    refuses that, too, the lease ends by itself.
    """
    async with asyncio.timeout(SECONDS):
        once = await evaluated(REFUSED, "422", "1", does)
        twice = await evaluated(REFUSED, "404", "2", does)
    assert once.decode() == twice.decode() == f"1 {first}, 1 {second}, 2 release, stopped\n"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_whose_key_the_api_refuses_for_a_settlement_ends(status: int) -> None:
    async with asyncio.timeout(SECONDS):
        out = await evaluated(REFUSED, str(status), "1", "throw")
    assert out == b"1 fail broken it is broken false, ApiError\n"


#: A worker that may claim six tasks. The API refuses the key at the seventh claim, and all settlements of the tasks
#: that the argument names. Prints the seconds between the claims, the warnings, and how `serve` ends.
UNSETTLED = f"""
import {{ Leasehold }} from "{HERE.parents[1] / "clients/typescript/src/index.js"}";
import {{ ExternalWorker }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
const unsettled = process.argv[1].split(" ");
const claimed = [];
const warnings = [];
console.warn = (text) => warnings.push(text);
const fetch = async (url) => {{
  const [id, verb] = String(url).split("/").slice(-2);
  if (verb === "claim") {{
    claimed.push(performance.now());
    if (claimed.length === 7) return Response.json({{ code: "missing_scope", detail: "no" }}, {{ status: 403 }});
    return Response.json({{ tasks: [{{ task_id: String(claimed.length), step: "made", files: [], epoch: 1 }}] }});
  }}
  if (verb === "heartbeat") return Response.json({{ cancel_requested: false }});
  if (unsettled.includes(id)) return Response.json({{ code: "odd", detail: `not ${{id}}` }}, {{ status: 404 }});
  return Response.json({{}});
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", fetch }});
const worker = new ExternalWorker(leasehold, {{ queues: ["q"] }});
const end = await worker.serve(() => null).then(() => "stopped", (error) => error.message);
const pauses = claimed.slice(1).map((at, index) => Math.floor((at - claimed[index]) / 1900));
console.log(JSON.stringify([pauses, warnings, end]));
process.exit();
"""


@pytest.mark.parametrize(
    ("unsettled", "pauses", "end"),
    [("1 2 4 5 6", [1, 1, 0, 1, 1], "odd: not 6"), ("1 2 4 5", [1, 1, 0, 1, 1, 0], "missing_scope: no")],
)
async def test_a_worker_that_can_settle_no_task_waits_after_each_and_ends_after_three(
    unsettled: str, pauses: list[int], end: str
) -> None:
    """A proxy lets the claims through, and refuses the settlements. The worker ran the whole queue for nothing."""
    async with asyncio.timeout(SECONDS):
        found = json.loads(await evaluated(UNSETTLED, unsettled))
    assert (found[0], found[2]) == (pauses, end)
    assert len(found[1]) == len(unsettled.split())
    assert found[1][0] == "task 1 cannot be settled, and is left to the end of its lease: odd: not 1"


#: A worker that is told to stop while the API does not accept what its handler has returned. Prints what it asked for.
STOPS_UNSETTLED = f"""
import {{ Leasehold }} from "{HERE.parents[1] / "clients/typescript/src/index.js"}";
import {{ ExternalWorker }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
setInterval(() => {{}}, 1000); // as a socket would
const [away, how, timeout] = process.argv.slice(1);
const claim = {{ task_id: "1", step: "made", files: [], epoch: 1 }};
const stop = new AbortController();
const asked = [];
const fetch = async (url, {{ signal }}) => {{
  signal.throwIfAborted();
  const verb = String(url).split("/").at(-1);
  asked.push(verb);
  if (verb !== away) return Response.json({{ tasks: [claim], cut: false }});
  setTimeout(() => stop.abort());
  if (how !== "silent") return new Response("", {{ status: 503, headers: {{ "Retry-After": how }} }});
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}};
const leasehold = new Leasehold({{ url: "http://127.0.0.1:1", key: "lh_x_y", timeout: Number(timeout), fetch }});
const worker = new ExternalWorker(leasehold, {{ queues: ["q"], graceSeconds: 0.2 }});
const work = worker.workOnce((task) => void task.emit("a chunk"), {{ signal: stop.signal }});
console.log(await work, asked.at(-1), asked.indexOf("release") === asked.length - 1);
process.exit();
"""


@pytest.mark.parametrize(
    ("how", "timeout"), [("0", 1), ("600", 3600), ("silent", 3600)], ids=["503", "503 for long", "no answer"]
)
async def test_a_worker_that_stops_gives_a_task_back_whose_result_the_api_does_not_accept(
    how: str, timeout: int
) -> None:
    """Once the grace is over, also in the middle of a try or of a pause. Its task waited for the end of its lease."""
    async with asyncio.timeout(SECONDS / 2):
        out = await evaluated(STOPS_UNSETTLED, "complete", how, str(timeout))
    assert out == b"true release true\n"


async def test_a_worker_that_stops_does_not_wait_for_output_that_the_api_does_not_accept() -> None:
    """It waited for the client's own timeout, however short its grace was."""
    async with asyncio.timeout(SECONDS / 2):
        out = await evaluated(STOPS_UNSETTLED, "stream", "silent", "3600")
    assert out.startswith(b"true ")


#: Logs and emits while the API is away, as tests/unit/test_external_output.py does in Python.
OVERFLOWS = f"""
import {{ Unavailable }} from "{HERE.parents[1] / "clients/typescript/src/index.js"}";
import {{ Task }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
let isAway = true;
const items = {{ logs: [], stream: [] }};
const ask = async (verb, {{ first, lines, chunks }}) => {{
  if (isAway) throw new Unavailable("away");
  if (first !== items[verb].length + 1) throw new RangeError(`first is ${{first}}`);
  items[verb].push(...(lines ?? chunks));
  return {{ cut: false }};
}};
const task = new Task({{ task_id: "1", step: "made", files: [], epoch: 1 }}, ask, fetch);
const text = "x".repeat(65_536);
const fits = Array.from({{ length: {MAX_ITEMS + 5} }}, (_, number) => task.emit(number));
for (let number = 0; number < {MAX_CHARACTERS // 65_536 + 5}; number += 1) task.log(text);
task.logFailure("broken", "");
console.log(fits.indexOf(false), fits.filter((fit) => !fit).length, await task.flush().catch((error) => error.name));
isAway = false;
await task.flush();
const messages = () => items.logs.map((line) => line.message);
console.log(items.stream.length, items.stream.at(-1), messages().filter((message) => message === text).length);
console.log(messages().slice(-2).join("; "));
for (let number = 0; number < {MAX_ITEMS}; number += 1) task.emit(number);
task.log("again");
await task.flush();
console.log(items.stream.length, messages().at(-1), items.logs.length);
console.log(task.emit("x".repeat({MAX_CHARACTERS})), task.emit("y".repeat({MAX_CHARACTERS // 2})), task.emit("z"));
process.exit();
"""


async def test_output_that_waits_for_the_api_has_a_bound_and_the_log_says_what_was_dropped() -> None:
    """It grew until the memory was full."""
    async with asyncio.timeout(SECONDS):
        out = await evaluated(OVERFLOWS)
    full, sent, lines, again, alone = out.decode().splitlines()
    kept = MAX_CHARACTERS // 65_536 - 1
    assert (full, sent) == (f"{MAX_ITEMS} 5 Unavailable", f"{MAX_ITEMS} {MAX_ITEMS - 1} {kept}")
    assert lines.startswith("broken; 6 lines and 5 chunks of this attempt were dropped before this line: ")
    assert (again, alone) == (f"{2 * MAX_ITEMS} again {kept + 3}", "false true true")


#: A worker whose first heartbeat gets no answer. Prints whether its pauses before the first two are short.
BEATS = f"""
import {{ ExternalWorker }} from "{HERE.parents[1] / "clients/typescript/src/worker.js"}";
const later = setTimeout;
const pauses = [];
globalThis.setTimeout = (act, milliseconds) => {{
  if (milliseconds <= 100) pauses.push(milliseconds); // the other pauses are longer
  return later(act, milliseconds);
}};
setInterval(() => {{}}, 1000); // as a socket would: the timer of AbortSignal.timeout does not keep Node alive
const claim = {{ task_id: "1", step: "made", files: [], epoch: 1 }};
let beats = 0;
let renewed;
const isRenewed = new Promise((resolve) => (renewed = resolve));
const silentOnce = {{
  async request(_method, path, {{ signal }}) {{
    if (path.endsWith("/claim")) return {{ tasks: [claim] }};
    if (!path.endsWith("/heartbeat")) return {{}};
    beats += 1;
    if (beats === 1) await new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
    renewed();
    return {{ cancel_requested: false }};
  }},
}};
const worker = new ExternalWorker(silentOnce, {{ queues: ["q"], leaseSeconds: 0.3 }});
await worker.workOnce(() => isRenewed);
console.log(...pauses.slice(0, 2).map((pause) => pause < 50));
process.exit();
"""


async def test_after_a_heartbeat_that_nobody_answers_the_next_one_goes_at_once() -> None:
    """It went a third of the lease later, when the lease had passed."""
    async with asyncio.timeout(SECONDS):
        out = await evaluated(BEATS)
    assert out == b"false true\n"
