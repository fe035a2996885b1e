"""A step begun before its lease is there counts for the attempt that holds it, or not at all."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import orjson
import pytest

from leasehold.domain.errors import ChildCrashed
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, SkipIf, Step
from leasehold.domain.verdicts import Done
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.media.pipeline import media
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore, Stored
from leasehold.telemetry.attempt_logs import Recorder, record_in
from leasehold.transitions import jobs
from leasehold.transitions.claims import Claimed
from leasehold.worker.attempts import isolated
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.inputs import Source, sources_of
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.attempts.speculation import Speculation, steps_after
from leasehold.worker.claiming.slot_pool import SlotPool
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker.conftest import SECONDS, end_of
from tests.worker.isolated_steps import halves, joins, pipelines, thirds


@pytest.fixture
def children() -> int:
    return 1


@pytest.fixture
async def worker(
    settings: Settings, tmp_path: Path, children: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Worker]:
    """A worker of one slot for each child. No other job waits in these tests. But a pool that is full for 0.1 s may
    take it that others wait, for example if its last poll has found a retry: then the job would leave its slot after
    the step that runs, and no attempt would take the speculation. So this pool never keeps a slot for others.
    """
    monkeypatch.setattr(SlotPool, "_keep_slot_if_others_wait", lambda _pool, *, others_wait: None)  # noqa: ARG005
    changes: dict[str, Any] = {
        "poll_seconds": 0.1,
        "work_dir": str(tmp_path),
        "worker_children": children,
        "pipelines": "tests.worker.isolated_steps:pipelines",
    }
    async with Worker(settings.model_copy(update=changes), pipelines()) as running:
        async with asyncio.timeout(SECONDS):  # a full worker without its broker takes it that other tasks wait
            while not running.parts.broker.connected:
                await asyncio.sleep(0.02)
        yield running


@dataclass
class Gatekeeper:
    """Between the worker and its store: lets `a.txt` through only when it is told to."""

    store: ObjectStore
    attempts: IsolatedAttempts
    open: asyncio.Event
    asked: asyncio.Event

    async def put(self, key: str, *rest: Any, **options: Any) -> Stored:
        if key.endswith("a.txt"):
            self.asked.set()
            await self.open.wait()
        return await self.store.put(key, *rest, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def ahead(self) -> Speculation:
        """What was begun by the attempt whose output waits here."""
        (one,) = (await self.all_ahead()).values()
        return one

    async def all_ahead(self) -> dict[str, Speculation]:
        """By step."""
        await self.asked.wait()
        return {step: ahead for (_, step), ahead in self.attempts._speculations.items()}


@pytest.fixture
def store(worker: Worker) -> Gatekeeper:
    attempts = worker.parts.isolated
    keeper = Gatekeeper(attempts._store, attempts, asyncio.Event(), asyncio.Event())
    attempts._store = keeper  # type: ignore[assignment]  # it does what is asked of a store here
    return keeper


async def begin(
    rows: Rows, pipeline: Pipeline = halves, inputs: Mapping[str, str] | None = None, **params: Any
) -> jobs.NewJob:
    new = jobs.NewJob(pipeline, "t", params=params, inputs=inputs or {})
    await jobs.submit(rows.connection, [new])
    return new


async def nothing_left(attempts: IsolatedAttempts, directory: Path) -> None:
    async with asyncio.timeout(SECONDS):
        while await asyncio.to_thread(lambda: list(directory.rglob("*.txt"))):
            await asyncio.sleep(0.02)
    assert not attempts._speculations


async def test_the_next_step_has_run_before_the_first_is_stored_and_is_not_run_again(
    worker: Worker, store: Gatekeeper, rows: Rows, tmp_path: Path
) -> None:
    """The first's output is let through only when the second has run: without it this test would wait for ever."""
    new = await begin(rows)
    async with asyncio.timeout(SECONDS):
        ahead = await store.ahead()
        await asyncio.wait({ahead.running})
    assert await rows.connection.fetchval("SELECT count(*) FROM output") == 0
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "succeeded"
    key = await rows.connection.fetchval("SELECT key FROM output WHERE job_id = $1 AND step = 'second'", new.id)
    path = tmp_path / "fetched"
    await store.fetch_file(key, path)
    assert path.read_text() == "made by the first, and by the second"
    assert ahead.owner_task is not None
    await nothing_left(store.attempts, tmp_path / str(worker.id))


async def test_a_step_that_reads_an_input_of_the_job_is_not_run_again_either(
    store: Gatekeeper, rows: Rows, tmp_path: Path
) -> None:
    await store.put("start", b"the start", content_type="text/plain", metadata={})
    new = await begin(rows, joins, {"start": "start"})
    async with asyncio.timeout(SECONDS):
        ahead = await store.ahead()
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "succeeded"
    task = await rows.connection.fetchrow(
        "SELECT t.id, o.key FROM task t JOIN output o USING (job_id, step) WHERE t.step = 'second'"
    )
    assert task is not None
    assert ahead.owner_task == task["id"]
    await store.fetch_file(task["key"], tmp_path / "fetched")
    assert (tmp_path / "fetched").read_text() == "made by the first, from the start"


async def test_an_error_of_a_step_begun_ahead_is_that_of_its_attempt(
    worker: Worker, store: Gatekeeper, rows: Rows
) -> None:
    new = await begin(rows, second="refuse")
    store.open.set()
    job = await end_of(rows, new.id)
    assert job["status"] == "failed"
    assert job["error"]["code"] == "not_wanted"


async def test_of_a_job_that_was_cancelled_meanwhile_nothing_more_is_stored(
    worker: Worker, store: Gatekeeper, rows: Rows, tmp_path: Path
) -> None:
    new = await begin(rows, second="wait")
    async with asyncio.timeout(SECONDS):
        ahead = await store.ahead()
    await jobs.request_cancel(rows.connection, [new.id], "t", reason="", by="test")
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "cancelled"
    await asyncio.wait({ahead.running}, timeout=SECONDS)
    assert ahead.running.done()
    assert ahead.owner_task is None
    assert await rows.connection.fetchval("SELECT count(*) FROM output WHERE step = 'second'") == 0
    assert (await end_of(rows, (await begin(rows)).id))["status"] == "succeeded"
    await nothing_left(store.attempts, tmp_path / str(worker.id))


async def test_a_first_step_that_could_not_be_stored_takes_what_came_after_it_along(
    worker: Worker, store: Gatekeeper, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt at the first step begins another."""
    seen: list[Speculation] = []
    real = ObjectStore.put

    async def fail_once(self: ObjectStore, key: str, *rest: Any, **options: Any) -> Stored:
        if key.endswith("a.txt") and len(seen) < 2:
            seen.append(await store.ahead())
            if len(seen) == 1:
                raise OSError("no way")
        return await real(self, key, *rest, **options)

    monkeypatch.setattr(ObjectStore, "put", fail_once)
    store.open.set()
    assert (await end_of(rows, (await begin(rows)).id))["status"] == "succeeded"
    thrown_away, taken = seen
    assert thrown_away.owner_task is None
    assert taken.owner_task is not None
    await nothing_left(store.attempts, tmp_path / str(worker.id))


@pytest.mark.parametrize("children", [2])
async def test_idle_children_run_all_that_reads_nothing_else(
    worker: Worker, store: Gatekeeper, rows: Rows, tmp_path: Path
) -> None:
    """The first's output is let through only when both others have run."""
    new = await begin(rows, thirds)
    async with asyncio.timeout(SECONDS):
        ahead = await store.all_ahead()
        await asyncio.wait({one.running for one in ahead.values()})
    assert list(ahead) == ["third", "second"]  # the job ends with the last
    assert await rows.connection.fetchval("SELECT count(*) FROM output") == 0
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "succeeded"
    stored = await rows.connection.fetch("SELECT step, key FROM output WHERE job_id = $1 ORDER BY step", new.id)
    for row in stored:
        await store.fetch_file(row["key"], tmp_path / row["step"])
    assert [(tmp_path / row["step"]).read_text() for row in stored] == [
        "made by the first", "made by the first, and by the second", "made by the first, and by the third",
    ]  # fmt: skip
    found = await rows.connection.fetch("SELECT step, id FROM task WHERE job_id = $1", new.id)
    tasks = {row["step"]: row["id"] for row in found}
    assert {step: one.owner_task for step, one in ahead.items()} == {step: tasks[step] for step in ("second", "third")}
    await nothing_left(store.attempts, tmp_path / str(worker.id))


async def test_without_an_idle_child_only_the_next_step_is_begun(store: Gatekeeper, rows: Rows) -> None:
    new = await begin(rows, thirds)
    async with asyncio.timeout(SECONDS):
        assert set(await store.all_ahead()) == {"second"}
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "succeeded"


@pytest.mark.parametrize("children", [2])
async def test_a_second_step_that_fails_takes_what_was_begun_beside_it_along(
    worker: Worker, store: Gatekeeper, rows: Rows, tmp_path: Path
) -> None:
    new = await begin(rows, thirds, second="refuse")
    async with asyncio.timeout(SECONDS):
        ahead = await store.all_ahead()
    store.open.set()
    assert (await end_of(rows, new.id))["status"] == "failed"
    assert ahead["third"].owner_task is None
    await nothing_left(store.attempts, tmp_path / str(worker.id))


async def test_without_links_the_next_step_begins_when_it_is_claimed(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("leasehold.worker.attempts.directories.os.link", refuse)
    assert (await end_of(rows, (await begin(rows)).id))["status"] == "succeeded"


def test_it_is_begun_only_where_nothing_else_stands_before_it() -> None:
    resize, compress, webp = media.steps
    assert steps_after(media, resize) == [compress, webp]  # which reads what compress reads
    assert steps_after(media, compress) == [webp]
    assert steps_after(media, webp) == []
    for step in conversion.steps:
        for after in steps_after(conversion, step):
            assert set(after.reads) <= {step.name, *step.reads}


FIRST = Step("first", isolated=True)
NEXT = Step("next", needs=("first",), reads=("first",), isolated=True)
#: The steps beside `first` -> those that may begin early, in order.
NEIGHBOURS: dict[str, tuple[list[Step], list[str]]] = {
    "reads all that the first step read and wrote": ([replace(NEXT, reads=("start", "first"))], ["next"]),
    "reads nothing but what the first step wrote": ([NEXT], ["next"]),
    "reads nothing": ([replace(NEXT, reads=())], ["next"]),
    "reads an input that the first step has not read": ([replace(NEXT, reads=("first", "other"))], []),
    "is inline": ([replace(NEXT, isolated=False)], []),
    "has another queue": ([replace(NEXT, queue="other")], []),
    "is done outside": ([replace(NEXT, isolated=True, external=True)], []),
    "may be skipped": ([replace(NEXT, skip_if=SkipIf("/quick"))], []),
    "also needs another step": ([Step("beside", isolated=True), replace(NEXT, needs=("first", "beside"))], []),
    "is one of two": ([NEXT, replace(NEXT, name="second")], []),
    "is followed by one that reads what the first step read": (
        [NEXT, replace(NEXT, name="last", needs=("next",), reads=("start",))],
        ["next", "last"],
    ),
    "is followed by one that reads what it wrote": (
        [NEXT, replace(NEXT, name="last", needs=("next",), reads=("first", "next"))],
        ["next"],
    ),
}


@pytest.mark.parametrize("the_next", NEIGHBOURS)
def test_only_steps_that_this_worker_may_run_and_whose_inputs_it_has_are_begun_early(the_next: str) -> None:
    others, begun_early = NEIGHBOURS[the_next]
    first = replace(FIRST, reads=("start",))
    pipeline = Pipeline("p", module="m", inputs=("start", "other"), steps=[first, *others])
    assert [step.name for step in steps_after(pipeline, first)] == begun_early


def second_of_halves() -> Claimed:
    return Claimed(
        Lease(uuid4(), uuid4(), 1, 1, 0.0), uuid4(), "t", "halves", 1, "second", "default", 1, 0, 0, "blocked", 0.0,
        params={"n": 1}, inputs={}, output_prefix="", trace=None, handler=None, timeout_seconds=None, gated=False,
        grace_seconds=30, cancelling=False,
    )  # fmt: skip


async def test_it_serves_only_an_attempt_that_would_do_the_very_same() -> None:
    claimed = second_of_halves()
    sources = [Source("first", "a.txt", "key", "abc")]
    ahead = Speculation(claimed.lease, {"n": 1}, Path("/nowhere"), {"a.txt": Path("/nowhere/in/0")}, {"a.txt": "abc"})
    assert ahead.fits(claimed, sources)
    assert ahead.fits(claimed, [replace(sources[0], sha256=None)])  # an input of the job
    others = [
        (replace(claimed, params={"n": 2}), sources),
        (replace(claimed, lease=replace(claimed.lease, epoch=2)), sources),
        (replace(claimed, handler="other.step"), sources),
        (replace(claimed, timeout_seconds=1), sources),
        (claimed, [replace(sources[0], sha256="abd")]),
        (claimed, [*sources, Source("first", "c.txt", "key", "abc")]),
        (claimed, []),
        (claimed, [Source("other", "c.txt", "key", None)]),
        (claimed, [*sources, Source("other", "c.txt", "key", None)]),
    ]
    assert not any(ahead.fits(*other) for other in others)


@pytest.mark.parametrize("logs", [True, False], ids=["logs", "logs nothing"])
@pytest.mark.parametrize("is_recorded", [True, False], ids=["into a log", "into none"])
async def test_the_attempt_that_takes_what_was_begun_early_has_its_lines_and_its_progress(
    *, logs: bool, is_recorded: bool
) -> None:
    claimed, lock = second_of_halves(), Lock()
    early, of_attempt = Recorder(10, 1000, lock), Recorder(10, 1000, lock)
    early.add("info", "shop", "before it was taken")
    ahead = Speculation(claimed.lease, {"n": 1}, Path("/nowhere"), {"a.txt": Path("/nowhere/in/0")}, {})
    ahead.recorder = early if logs else None
    ahead.progress(10.0, "nobody hears of it yet")
    ahead.complete_digests({"a.txt": "abc", "of another step": "abd"})
    assert ahead.fits(claimed, [Source("first", "a.txt", "key", "abc")])
    heard: list[tuple[float, str]] = []
    record_in(of_attempt if is_recorded else None)
    ahead.take(claimed, lambda percent, summary: heard.append((percent, summary)))
    assert (ahead.owner_task, ahead.bound_to) == (claimed.lease.task_id, claimed.lease)
    ahead.progress(50.0, "half")
    assert heard == [(50.0, "half")]
    early.add("info", "shop", "and after")
    lines = [orjson.loads(line)["message"] for line in of_attempt.take()[1]]
    assert lines == (["before it was taken", "and after"] if logs and is_recorded else [])


async def test_what_was_begun_early_and_is_taken_by_no_attempt_ends_without_a_word_and_without_a_file(
    tmp_path: Path,
) -> None:
    """asyncio reports each error that nobody has read. A worker discards such executions in its daily work."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))

    async def fails() -> Done:
        raise ChildCrashed("oom", "m")

    async def runs() -> Done:
        await asyncio.sleep(SECONDS)
        return Done({})

    async def fails_when_it_is_ended() -> Done:
        try:
            return await runs()
        finally:
            raise ChildCrashed("killed", "m")

    for number, running in enumerate((fails, runs, fails_when_it_is_ended)):
        (directory := tmp_path / str(number)).mkdir()
        (directory / "a.txt").write_text("an input")
        ahead = Speculation(second_of_halves().lease, {}, directory, {}, {})
        ahead.start(running())
        for _ in range(3):  # it begins, or has failed
            await asyncio.sleep(0)
        ahead.discard()
        await asyncio.wait({ahead.running})
        async with asyncio.timeout(SECONDS):
            while await asyncio.to_thread(directory.exists):
                await asyncio.sleep(0.01)
        del ahead
        gc.collect()
    assert reports == []


@pytest.mark.parametrize("goes_on", [False, True])
async def test_an_attempt_that_ends_leaves_alone_what_another_attempt_has_taken(goes_on: bool) -> None:
    """A hint may bring the next step to another slot before the attempt at the first step has ended."""
    second = second_of_halves()
    first = replace(second, step="first", lease=replace(second.lease, task_id=uuid4()))
    third = replace(second, step="third", lease=replace(second.lease, task_id=uuid4()))
    kept = Speculation(first.lease, {"n": 1}, Path("/nowhere"), {}, {})
    beside = Speculation(first.lease, {"n": 1}, Path("/nowhere"), {}, {})
    directories = SimpleNamespace(adopt=lambda *_: None)
    unused: Any = None
    attempts = IsolatedAttempts(
        store=unused, pool=unused, children=unused, warming=unused, reporter=unused,
        directories=cast("Any", directories), settings=unused,
    )  # fmt: skip
    attempts._speculations = {(second.job_id, "second"): kept, (second.job_id, "third"): beside}
    for speculation in (kept, beside):
        speculation.running = asyncio.create_task(asyncio.sleep(SECONDS, Done({})))
    assert attempts._take_speculation(second, [], lambda *_: None) is kept
    attempts.discard_speculations(first, third if goes_on else None)
    await asyncio.sleep(0)
    assert kept.running.cancelling() == 0
    assert beside.running.cancelling() == (0 if goes_on else 1)
    attempts.discard_speculations(third, None)
    assert (kept.running.cancelling(), beside.running.cancelling()) == (0, 1)
    attempts.discard_speculations(second, None)
    assert (kept.running.cancelling(), attempts._speculations) == (1, {})


async def test_a_claim_that_comes_twice_ends_nothing_that_was_begun_ahead(
    worker: Worker, store: Gatekeeper, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover that has lost the commit of the claim: the worker gets an equal lease for the attempt that it
    runs already.
    """
    begun: dict[str, tuple[Claimed, Any]] = {}
    run = Runner.run

    async def recorded(runner: Runner, claimed: Claimed, parent: Any, slot: Any) -> Claimed | None:
        begun[claimed.step] = claimed, slot
        return await run(runner, claimed, parent, slot)

    async def claimed_again(step: str) -> None:
        claimed, slot = begun[step]
        await run(worker.parts.runner, replace(claimed, lease=replace(claimed.lease)), None, slot)

    monkeypatch.setattr(Runner, "run", recorded)
    new = await begin(rows, second="wait")
    async with asyncio.timeout(SECONDS):
        ahead = await store.ahead()
        await claimed_again("first")
        assert ahead.running.cancelling() == 0
        store.open.set()
        while ahead.owner_task is None:
            await asyncio.sleep(0.02)
        await claimed_again("second")
        assert (ahead.running.cancelling(), ahead.running.done()) == (0, False)
    await jobs.request_cancel(rows.connection, [new.id], "t", reason="", by="test")
    assert (await end_of(rows, new.id))["status"] == "cancelled"
    assert await rows.connection.fetchval("SELECT sum(errors) FROM task") == 0


async def test_a_cancel_that_comes_before_a_step_has_its_inputs_is_seen_by_its_handler(
    worker: Worker, rows: Rows, store: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker asks PostgreSQL for the inputs, which may take long. The handler would run on for the whole grace."""
    looking, asked_to_stop, found = asyncio.Event(), asyncio.Event(), asyncio.Event()
    request_stop = Directories.request_stop

    async def found_late(pool: Any, held: Any, pipeline: Pipeline, step: Step, claimed: Claimed) -> list[Source]:
        if step.name == "second":
            looking.set()
            await found.wait()
        return await sources_of(pool, held, pipeline, step, claimed)

    def ask(directories: Directories, lease: Lease) -> None:
        request_stop(directories, lease)
        asked_to_stop.set()

    monkeypatch.setattr(isolated, "sources_of", found_late)
    monkeypatch.setattr(Directories, "request_stop", ask)
    job = await begin(rows, second="wait")
    await store.asked.wait()
    await rows.connection.execute("UPDATE job SET grace_seconds = 3600 WHERE id = $1", job.id)
    store.open.set()
    async with asyncio.timeout(SECONDS):
        await looking.wait()
        await jobs.request_cancel(rows.connection, [job.id], "t", reason="r", by="b")
        await asked_to_stop.wait()
    found.set()
    assert (await end_of(rows, job.id))["status"] == "cancelled"
