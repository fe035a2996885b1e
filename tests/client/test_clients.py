"""`Client` and `AsyncClient` against a real API, behind a front that fails as networks do."""

from __future__ import annotations

import asyncio
import mimetypes
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from inspect import isawaitable, signature
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest

from leasehold.api.app import make_app
from leasehold.api.auth.security import JOBS_OPERATE, RUNS_WRITE
from leasehold.client import ApiError, AsyncClient, Client, ClientError, RunFailed, Unavailable, calls, models
from leasehold.client.calls import Call
from leasehold.db.database import Connection
from leasehold.pipelines.media.kinds import ALLOWED
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import settlements
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.logs import append as append_log
from leasehold.transitions.settlements import Completion
from leasehold.transitions.streams import StreamChunk
from leasehold.transitions.streams import append as append_stream
from tests.api.conftest import Running
from tests.api.driver import finish_all
from tests.api.media_api import PNG
from tests.client.front import QUIET_SECONDS, Front, fronting
from tests.client.stores import store_of
from tests.jobs.conftest import TENANT_SCOPES, Maker, client, client_with, maker, running
from tests.jobs.test_job_logs import line

__all__ = ["client", "client_with", "maker", "running"]  # fixtures
SECONDS = 90


class Either:
    """Calls either client; the one without a loop in a thread."""

    def __init__(self, made: Client | AsyncClient) -> None:
        self.made = made

    async def do(self, name: str, *args: Any, **named: Any) -> Any:
        method = getattr(self.made, name)
        async with asyncio.timeout(SECONDS):
            if isinstance(self.made, Client):
                return await asyncio.to_thread(method, *args, **named)
            result = method(*args, **named)
            return await result if isawaitable(result) else result

    async def all(self, name: str, *args: Any, **named: Any) -> list[Any]:
        method = getattr(self.made, name)
        async with asyncio.timeout(SECONDS):
            if isinstance(self.made, Client):
                return await asyncio.to_thread(lambda: list(method(*args, **named)))
            return [item async for item in method(*args, **named)]


MakeEither = Callable[..., Either]


@pytest.fixture
async def front(running: Running) -> AsyncIterator[Front]:
    async with fronting(running.url) as front:
        yield front


@pytest.fixture
async def api_key(rows: Connection) -> str:
    return (await create_key(rows, tenant_id="acme", client_id="tests", scopes=sorted(TENANT_SCOPES))).text


@pytest.fixture(params=[Client, AsyncClient])
async def api(request: pytest.FixtureRequest, front: Front, api_key: str) -> AsyncIterator[Either]:
    made = request.param(front.url, api_key, timeout=60)
    yield Either(made)
    if isinstance(made, Client):
        made.close()
    else:
        await made.aclose()


@pytest.fixture
async def outside(client: Any) -> str:
    body = {"type": "outside", "steps": [{"id": "a", "queue": "q"}, {"id": "b", "queue": "q"}]}
    answer = await client.post("/v1/templates", json=body)
    assert answer.status_code == 201, answer.text
    return "outside"


# --- trying again


async def test_a_run_is_made_once_whatever_the_network_does(
    api: Either, front: Front, outside: str, rows: Connection
) -> None:
    every = [["503"], ["429"], ["break"], ["lose"], ["502"], ["lose", "503", "lose"]]
    for made_before, failures in enumerate(every):
        front.failures, front.seen = list(failures), []
        made = await api.do("submit", outside, {"n": 1}, tags={"customer": "7"})
        assert made.template == outside
        assert await rows.fetchval("SELECT count(*) FROM run") == made_before + 1, failures
        keys = {key for _, _, key in front.seen}
        assert len(keys) == 1
        assert None not in keys
        assert len(front.seen) == len(failures) + 1


async def test_two_submissions_have_keys_of_their_own(
    api: Either, front: Front, outside: str, rows: Connection
) -> None:
    for _ in range(2):
        await api.do("submit", outside)
    assert await rows.fetchval("SELECT count(*) FROM run") == 2
    mine = [(await api.do("submit", outside, key="order-17")).id for _ in range(2)]
    assert mine[0] == mine[1]
    assert await rows.fetchval("SELECT count(*) FROM run") == 3


@pytest.mark.parametrize("key", ["", "k ", " k", "a\nb", "\u00e9", "x" * 256])
async def test_a_key_that_no_request_can_have_is_refused_at_once_and_no_other_takes_its_place(
    api: Either, front: Front, outside: str, key: str
) -> None:
    with pytest.raises(ClientError, match="1 to 255 printable ASCII"):
        await api.do("submit", outside, key=key)
    with pytest.raises(ClientError, match="X-Provider-Credential has printable ASCII") as refused:
        await api.do("generate", "a cat", credential=f"secret{key}\n")
    assert "secret" not in str(refused.value)
    assert [path for _, path, _ in front.seen if path.startswith("/v1/images") or path == "/v1/runs"] == []


async def test_when_the_time_is_up_the_error_carries_the_key_to_try_again_with(
    api: Either, front: Front, outside: str, rows: Connection
) -> None:
    api.made._timeout = 3.0
    front.failures = ["lose"] * 500
    with pytest.raises(Unavailable, match="has not answered for 3 s") as raised:
        await api.do("submit", outside)
    assert raised.value.key == front.seen[0][2]
    front.failures = []
    api.made._timeout = 60.0
    await api.do("submit", outside, key=raised.value.key)
    assert await rows.fetchval("SELECT count(*) FROM run") == 1


async def test_what_must_not_be_done_twice_is_not_sent_twice_unless_it_never_arrived(
    api: Either, front: Front, maker: Maker
) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    front.failures = ["lose"]
    with pytest.raises(Unavailable) as raised:
        await api.do("retry", job_id)
    assert raised.value.key is None
    assert (await api.do("get_job", job_id)).status == "waiting_worker"
    assert len([path for _, path, _ in front.seen if path.endswith("/retry")]) == 1
    await maker.fail(job_id)
    front.failures = ["429"]
    assert (await api.do("retry", job_id)).status == "waiting_worker"


async def test_a_refusal_is_not_tried_again(api: Either, front: Front) -> None:
    with pytest.raises(ApiError) as raised:
        await api.do("submit", "no-such-template")
    assert (raised.value.status, raised.value.code) == (404, "template_not_found")
    assert len(front.seen) == 1
    with pytest.raises(ApiError) as raised:
        await api.do("get_run", "../jobs")
    assert raised.value.status == 404
    assert front.seen[-1][1].startswith("/v1/runs/..%2Fjobs")


@pytest.mark.parametrize("answer", ["page", "list", "another object"])
async def test_an_answer_of_another_server_is_a_client_error(api: Either, front: Front, answer: str) -> None:
    front.failures = [answer]
    with pytest.raises(ClientError, match="is it a Leasehold API"):
        await api.do("get_run", uuid4())
    front.failures = [answer]
    with pytest.raises(ClientError, match="is it a Leasehold API"):
        await api.all("runs")


async def test_an_answer_from_elsewhere_than_the_api_is_no_success_and_its_address_is_not_followed(
    api: Either, front: Front, maker: Maker
) -> None:
    job_id = await maker.make("run")
    for name, *arguments in (("get_run", job_id), ("runs",), ("events", job_id)):
        front.failures, front.seen = ["moved"], []
        with pytest.raises(ApiError) as raised:
            await (api.do if name == "get_run" else api.all)(name, *arguments)
        assert (raised.value.status, len(front.seen)) == (307, 1)


# --- runs and jobs


@pytest.mark.parametrize("failure", ["lose", "break", "503", "429", "silent"])
async def test_who_waits_for_a_run_hears_in_time_that_the_api_does_not_answer(
    api: Either, front: Front, outside: str, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """A client's own timeout may be much longer than the time for which the caller can wait."""
    monkeypatch.setattr("leasehold.client.retrying._ANSWER_SECONDS", 0.5)
    made = await api.do("submit", outside)
    api.made._timeout = 3600.0
    front.failures = [failure] * 10_000
    for timeout in (0.0, 0.5):
        with pytest.raises(TimeoutError, match="unknown whether"):
            await api.do("wait", made.id, timeout=timeout)
    api.made._timeout = 1.0
    with pytest.raises(Unavailable):
        await api.do("wait", made.id, timeout=SECONDS)


async def test_who_waits_for_longer_than_the_clients_own_timeout_hears_that_the_run_has_not_ended(
    api: Either, front: Front, outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API was asked to hold the request for longer than the client waited for its answer."""
    monkeypatch.setattr("leasehold.client.retrying._ANSWER_SECONDS", 1.0)
    made = await api.do("submit", outside)
    api.made._timeout = 0.3
    front.seen = []
    with pytest.raises(TimeoutError, match="has not ended"):
        await api.do("wait", made.id, timeout=2.0)
    # A request takes at most 0.3 s + the second for its answer. The API holds it for half a second less.
    assert 0.5 < max(waits_of(front)) <= 0.8


async def test_the_api_holds_a_repeated_request_no_longer_than_its_caller_waits(
    api: Either, front: Front, outside: str
) -> None:
    made = await api.do("submit", outside)
    front.seen, front.failures = [], ["503", "503"]
    with pytest.raises(TimeoutError, match="has not ended"):
        await api.do("wait", made.id, timeout=1.0)
    first, second, third = waits_of(front)[:3]
    # Before the second request is a pause of at least 0.1 s, and before the third one of 0.2 s.
    assert 1.0 >= first >= second + 0.1
    assert second >= third + 0.2


async def test_a_run_is_not_asked_for_without_a_pause_if_each_answer_comes_at_once(
    api: Either, front: Front, outside: str, maker: Maker
) -> None:
    """As behind a proxy that drops the parameter `wait`."""
    made = await api.do("submit", outside)
    front.seen, front.failures = [], ["hasty"] * 10_000
    with pytest.raises(TimeoutError, match="has not ended"):
        await api.do("wait", made.id, timeout=1.0)
    assert 3 <= len(front.seen) <= 8
    waiting = asyncio.create_task(api.do("wait", made.id))
    await maker.succeed(made.id)
    assert (await waiting).ended


def waits_of(front: Front) -> list[float]:
    """For how many seconds each request has asked the API to wait."""
    return [float(path.partition("wait=")[2]) for _, path, _ in front.seen]


async def test_a_run_is_waited_for_and_its_result_returned(
    api: Either, outside: str, maker: Maker, rows: Connection
) -> None:
    made = await api.do("submit", outside)
    with pytest.raises(TimeoutError):
        await api.do("wait", made.id, timeout=0.1)
    waiting = asyncio.create_task(api.do("result", made.id))
    await maker.succeed(made.id)
    assert await waiting == {"a": {"done": True}, "b": {"done": True}}
    run = await api.do("get_run", made.id)
    assert (run.ended, run.progress.percentage) == (True, 100)
    failed = await api.do("submit", outside)
    await maker.fail(failed.id)
    with pytest.raises(RunFailed, match="broken: It did not work") as raised:
        await api.do("result", failed.id)
    assert (raised.value.status, raised.value.code) == ("failed", "broken")


async def test_the_result_of_a_run_has_all_its_steps_however_many_an_answer_has(
    api: Either, outside: str, maker: Maker, rows: Connection
) -> None:
    made = await api.do("submit", outside)
    await rows.execute(
        "WITH added AS (INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, max_attempts, status,"
        " finished_at) SELECT gen_random_uuid(), $1, tenant_id, 'part-' || n, 1, 'q', 1, 1, 'succeeded', now()"
        " FROM job, generate_series(1, 2100) AS n WHERE job.id = $1 RETURNING id, step)"
        " INSERT INTO result (task_id, value) SELECT id, to_jsonb(step) FROM added",
        made.id,
    )
    await maker.succeed(made.id)
    parts = {f"part-{n}": f"part-{n}" for n in range(1, 2101)}
    assert await api.do("result", made.id) == parts | {"a": {"done": True}, "b": {"done": True}}


async def test_lists_go_through_all_pages(api: Either, front: Front, outside: str, rows: Connection) -> None:
    batch = await api.do("submit_many", outside, [{"n": n} for n in range(120)], tags={"batch": "1"})
    ids = batch.ids[::-1]
    assert [run.id for run in await api.all("runs", template=outside)] == ids
    assert [job.id for job in await api.all("jobs", "tag.batch:1")] == ids
    pages = [path for method, path, _ in front.seen if method == "GET"]
    assert len(pages) == 4
    assert await api.all("jobs", "kind:media") == []


async def test_a_job_is_explained_cancelled_and_deleted(api: Either, maker: Maker, outside: str) -> None:
    made = await api.do("submit", outside)
    assert (await api.do("explain", made.id)).reasons
    assert (await api.do("cancel", made.id, "enough")).status == "cancelled"
    assert await api.do("delete", made.id) is None
    with pytest.raises(ApiError) as raised:
        await api.do("get_job", made.id)
    assert (raised.value.status, raised.value.code) == (410, "job_deleted")


async def test_a_cancel_or_a_delete_whose_answer_was_lost_has_succeeded(
    api: Either, front: Front, outside: str
) -> None:
    """The client repeats it by itself, and the API refuses the repetition."""
    made = await api.do("submit", outside)
    front.failures = ["lose", "503"]
    cancelled = await api.do("cancel", made.id, "enough")
    assert cancelled == models.JobAfterAction(id=made.id, status="cancelled")
    for failures in ([], ["429"]):
        front.failures = failures
        with pytest.raises(ApiError) as raised:
            await api.do("cancel", made.id)
        assert (raised.value.status, raised.value.code) == (409, "resource_invalid_state")
    front.failures = ["lose"]
    assert await api.do("delete", made.id) is None
    with pytest.raises(ApiError) as raised:
        await api.do("delete", made.id)
    assert (raised.value.status, raised.value.code) == (410, "job_deleted")
    front.failures = ["lose"]
    with pytest.raises(ApiError) as raised:
        await api.do("cancel", made.id)
    assert raised.value.code == "job_deleted"


async def test_a_cancel_whose_answer_was_lost_is_refused_if_the_key_may_not_read_the_job(
    api: Either, front: Front, outside: str, rows: Connection
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="operator", scopes=[JOBS_OPERATE, RUNS_WRITE])
    made = await api.do("submit", outside)
    async with AsyncClient(front.url, key.text) as operator:
        front.failures = ["lose"]
        with pytest.raises(ApiError) as raised:
            await operator.cancel(made.id)
    assert raised.value.code == "resource_invalid_state"
    assert (await api.do("get_job", made.id)).status == "cancelled"


async def test_dead_letters_are_listed_grouped_and_replayed(api: Either, maker: Maker) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    (letter,) = await api.all("dead_letters", template="outside")
    assert (letter.job_id, letter.code) == (job_id, "broken")
    (group,) = await api.do("dead_letter_groups")
    assert (group.fingerprint, group.n) == (letter.fingerprint, 1)
    answer = await api.do("replay_dead_letters", fingerprint=group.fingerprint)
    assert len(answer["replayed"]) == 1
    assert await api.all("dead_letters") == []


async def test_a_bulk_operation_is_previewed_begun_once_and_aborted(api: Either, front: Front, maker: Maker) -> None:
    job_id = await maker.make("run")
    await maker.fail(job_id)
    preview = await api.do("preview", "retry", "status:failed")
    assert (preview.total.n, [job.id for job in preview.examples]) == (1, [job_id])
    front.failures = ["lose"]
    operation = await api.do("operate", "retry", "status:failed", reason="the server is back")
    assert [one.id for one in await api.all("operations")] == [operation.id]
    assert (await api.do("get_operation", operation.id)).acted == 0
    assert await api.all("refusals", operation.id) == []
    assert (await api.do("cancel", operation.id)).status == "cancelled"


# --- feeds


async def test_events_logs_and_chunks_are_followed_through_cut_connections(
    api: Either, front: Front, maker: Maker, rows: Connection
) -> None:
    job_id = await maker.make("run")
    claimed = await maker.claim(job_id)
    lease = claimed.lease
    await append_log(rows, [LogChunk(lease.task_id, 1, 1, n, [line(f"line {n}")]) for n in (1, 2, 3)])
    await append_stream(rows, [StreamChunk(lease, 1, [b'{"chunk":"a"}', b'{"chunk":"b"}'], restarts=False)])
    await settlements.complete(rows, [Completion(lease, [], None)])
    await maker.succeed(job_id)
    front.failures = ["cut", "503", "break"]
    events = await api.all("events", job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[-1].status == "succeeded"
    front.failures = ["break", "cut"]
    assert [entry.message for entry in await api.all("logs", job_id)] == ["line 1", "line 2", "line 3"]
    assert [entry.message for entry in await api.all("logs", job_id, after=2)] == ["line 3"]
    assert [(item.event, item.chunk) for item in await api.all("stream", job_id)] == [("chunk", "a"), ("chunk", "b")]
    assert (await api.do("read_logs", job_id, limit=2)).next_after == 2
    assert (await api.do("read_events", job_id)).events[0].kind == "submitted"
    with pytest.raises(ApiError, match="job_not_found"):
        await api.all("logs", uuid4())


async def test_a_chunk_has_characters_at_which_other_protocols_end_a_line(
    api: Either, maker: Maker, rows: Connection
) -> None:
    job_id = await maker.make("run")
    lease = (await maker.claim(job_id)).lease
    text = "a\u2028b\u2029c\u0085d\re\nf"
    await append_stream(rows, [StreamChunk(lease, 1, [orjson.dumps({"chunk": text})], restarts=False)])
    await settlements.complete(rows, [Completion(lease, [], None)])
    await maker.succeed(job_id)
    assert [item.chunk for item in await api.all("stream", job_id)] == [text]


async def test_a_feed_that_was_quiet_for_longer_than_the_timeout_is_resumed(
    api: Either, front: Front, maker: Maker, rows: Connection
) -> None:
    job_id = await maker.make("run")
    api.made._timeout = QUIET_SECONDS / 2
    front.failures = ["quiet"]
    following = asyncio.create_task(api.all("events", job_id))
    while front.failures:
        await asyncio.sleep(0.01)
    await maker.succeed(job_id)
    assert (await following)[-1].status == "succeeded"


async def test_a_feed_whose_connections_end_at_once_is_not_asked_for_without_a_pause(
    api: Either, front: Front, maker: Maker
) -> None:
    job_id = await maker.make("run")
    front.failures = ["empty", "ok"] * 3  # a feed's connection, and then the question whether the job has ended
    began_at = monotonic()
    following = asyncio.create_task(api.all("events", job_id))
    while front.failures:
        await asyncio.sleep(0.01)
    await maker.succeed(job_id)
    assert (await following)[-1].status == "succeeded"
    assert monotonic() - began_at >= 0.1 + 0.2 + 0.4  # the shortest pauses: they grow


async def test_a_feed_ends_with_its_job(api: Either, maker: Maker, rows: Connection) -> None:
    job_id = await maker.make("run")
    following = asyncio.create_task(api.all("stream", job_id))
    await asyncio.sleep(0.3)
    assert not following.done()
    await maker.succeed(job_id)
    assert await following == []


# --- uploads


async def test_a_picture_is_uploaded_from_its_path_once_whatever_the_network_does(
    api: Either, front: Front, rows: Connection, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    reports: list[tuple[int, int]] = []
    front.failures = ["503", "lose", "lose"]
    accepted = await api.do(
        "upload_picture", path, ["thumb"], tags={"a": "b"}, on_progress=lambda *report: reports.append(report)
    )
    assert front.failures == []
    assert reports[-1] == (len(PNG), len(PNG))
    await finish_all(rows, str(accepted.media_id))
    assert (await api.do("get_picture", accepted.media_id)).status == "READY"
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


@pytest.mark.parametrize("name", [f"a.{ending}" for ending in (*ALLOWED.values(), "jpeg", "tiff", "WEBP")])
def test_the_type_of_each_picture_that_the_api_takes_is_known_without_the_tables_of_the_system(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Python 3.11 does not know WebP by itself."""
    monkeypatch.setattr(mimetypes, "guess_type", mimetypes.MimeTypes().guess_type)
    endings = {ending: content_type for content_type, ending in ALLOWED.items()}
    endings |= {"jpeg": "image/jpeg", "tiff": "image/tiff"}
    assert calls.content_type_of(Path(name)) == endings[name.lower().removeprefix("a.")]
    assert calls.content_type_of(Path("a.txt")) == "text/plain"
    assert calls.content_type_of(Path("webp")) == "application/octet-stream"


@pytest.mark.parametrize("status", [307, 403])
async def test_an_upload_that_the_store_refuses_or_sends_elsewhere_is_not_completed_and_says_whose_answer_it_was(
    api: Either, front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    put_bytes = calls.put_bytes
    async with store_of("Location: /elsewhere\r\n", b"<Error/>", status=f"{status} No") as url:
        monkeypatch.setattr(calls, "put_bytes", lambda *arguments: replace(put_bytes(*arguments), path=url))
        with pytest.raises(ApiError) as raised:
            await api.do("upload_picture", path)
    assert (raised.value.status, raised.value.code) == (status, f"http_{status}")
    assert raised.value.message == "The object store refused the upload. Its signed URL may have expired: try again."
    assert [path for _, path, _ in front.seen] == ["/upload-url"]


async def test_a_model_is_uploaded_from_its_path_and_converted_once(
    api: Either, front: Front, rows: Connection, tmp_path: Path
) -> None:
    path, image = tmp_path / "m.onnx", tmp_path / "i.png"
    path.write_bytes(b"x" * 500_000)
    image.write_bytes(PNG)
    sizes: list[tuple[int, int]] = []
    front.failures = ["lose", "503"]
    made = await api.do(
        "convert",
        path,
        user_id="u",
        model_id=1,
        version="0001",
        platform="720",
        reference_images=[image],
        on_progress=lambda *report: sizes.append(report),
    )
    total = 500_000 + len(PNG)
    assert sizes[-1] == (total, total)
    assert await rows.fetchval("SELECT array_agg(id) FROM job") == [made.job_id]


async def test_a_generation_is_ordered_once(api: Either, front: Front, rows: Connection) -> None:
    front.failures = ["lose"]
    ordered = await api.do("generate", "a lighthouse", credential="id:sesame", ratio="16:9", task_id="order-1")
    assert ordered.task_id == "order-1"
    state = await api.do("get_generation", "order-1")
    assert (state.ended, state.job_id) == (False, ordered.job_id)
    assert await rows.fetchval("SELECT count(*) FROM job") == 1


# --- the shape of the clients


DOCUMENT = make_app(Settings(_env_file=None)).openapi()


def made_calls(tmp_path: Path) -> list[Call[Any]]:
    """One of each function of `calls`."""
    path = tmp_path / "a.png"
    path.write_bytes(b"x")
    ticket = models.Ticket(media_id=UUID(int=0), upload_url="http://x", original_key="k", expires_in=1)
    return [
        calls.submit("t", delay_seconds=5),
        calls.submit_many("t", [{}]),
        calls.get_run("r"),
        calls.runs().page(None),
        calls.rerun("r"),
        calls.create_template({}),
        calls.get_job("j"),
        calls.jobs().page(None),
        calls.explain("j"),
        calls.signal("r", "approved", {"by": "anna"}),
        calls.operate("retry", "status:failed", canary=1),
        calls.preview("retry", "status:failed"),
        calls.get_operation("o"),
        calls.operations().page(None),
        calls.refusals("o").page(None),
        calls.read_events("j"),
        calls.read_logs("j", step="s", attempt=1),
        calls.cancel("j"),
        calls.retry("j"),
        calls.delete("j"),
        calls.dead_letters().page(None),
        calls.dead_letter_groups(),
        calls.replay_dead_letters(code="c"),
        calls.queues().page("c"),
        calls.workers().page("c"),
        calls.upload_ticket(path, "image/png"),
        calls.complete_upload(ticket),
        calls.get_picture("m"),
        calls.convert(path, user_id="u", model_id=1, version="0001", platform="720"),
        calls.generate("p"),
        calls.get_generation("t"),
        *(
            Call("GET", feed.path, lambda answer: answer, feed.params, idempotent=True)
            for feed in (calls.events("j"), calls.logs("j", step="s"), calls.stream("j", attempt=1))
        ),
    ]


def test_every_call_is_an_operation_of_the_document_with_its_parameters_and_its_key(tmp_path: Path) -> None:
    """What takes an idempotency key gets one, and nothing else is taken for safe to repeat by its key."""
    wrong: list[str] = []
    for call in made_calls(tmp_path):
        operation = next(
            (item[call.method.lower()] for path, item in DOCUMENT["paths"].items()
             if call.method.lower() in item and _fits(path, call.path)),
            None,
        )  # fmt: skip
        if operation is None:
            wrong.append(f"{call.method} {call.path}: unknown")
            continue
        parameters = {parameter["name"] for parameter in operation.get("parameters", [])}
        if call.keyed != ("Idempotency-Key" in parameters):
            wrong.append(f"{call.path}: keyed")
        wrong += [f"{call.path}: {name}" for name in call.params if name not in parameters]
        contents: list[dict[str, Any]] = list(operation.get("requestBody", {}).get("content", {}).values())
        schema = contents[0].get("schema", {}) if contents else {}
        schema = DOCUMENT["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
        known = schema.get("properties")
        wrong += [f"{call.path}: {name}" for name in (call.body or {}) if known is not None and name not in known]
    assert wrong == []


def _fits(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.split("/")
    return len(parts) == len(given) and all(
        part == value or part.startswith("{") for part, value in zip(parts, given, strict=True)
    )


def test_both_clients_have_the_same_methods() -> None:
    def public(made: type) -> dict[str, str]:
        names = {name for name in vars(made) if not name.startswith("_")} - {"close", "aclose"}
        return {name: str(signature(getattr(made, name)).replace(return_annotation="")) for name in sorted(names)}

    assert public(Client) == public(AsyncClient)
    assert len(public(Client)) > 25


def test_a_client_is_imported_without_the_engine() -> None:
    program = (
        "import sys, leasehold.client; heavy = {'asyncpg', 'fastapi', 'sqlalchemy', 'aio_pika', 'botocore', 'typer',"
        " 'structlog', 'starlette', 'aiohttp', 'orjson'}; print(sorted(heavy & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"


def test_without_a_key_the_client_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_API_KEY", raising=False)
    for made in (Client, AsyncClient):
        with pytest.raises(ClientError, match="LEASEHOLD_API_KEY"):
            made("http://127.0.0.1:1")
