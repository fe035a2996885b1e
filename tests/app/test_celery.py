"""Programs of Celery run over leasehold.celery: call sites as they are, and refusals where they are declared."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import pkgutil
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
import time_machine
from pydantic import SecretStr

import leasehold.celery
from leasehold import App, TaskFailed
from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE
from leasehold.app.calls import Call
from leasehold.app.current import Current, enter, leave
from leasehold.app.local import LocalAttempt
from leasehold.app.writing import write
from leasehold.celery import AsyncResult, Celery, Signature, chain, chord, group, shared_task
from leasehold.celery.apps import made_apps
from leasehold.celery.exceptions import MaxRetriesExceededError, NotSupported, Retry
from leasehold.celery.lacking import OF_APP, OF_REQUEST, OF_RESULT, OF_SIGNATURE, OF_TASK
from leasehold.celery.options import options_of
from leasehold.celery.task import Request, _BoundSelf
from leasehold.client import AsyncClient
from leasehold.db.database import Connection
from leasehold.domain import missing_code
from leasehold.domain.errors import (
    Conflict,
    DeclarationError,
    Invalid,
    LeaseLost,
    NotFound,
    ObjectExists,
    Permanent,
    Retryable,
    StoreUnavailable,
    Unreachable,
)
from leasehold.domain.ids import id_of_instant, is_recent, new_id
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import serving
from tests.app.celery_program import SECONDS, first_steps
from tests.app.conftest import Serve

ROOT = Path(__file__).parent.parent.parent
app = Celery("proj")
app.conf.update(task_serializer="json", accept_content=["json"], timezone="Europe/Oslo", enable_utc=True)
seen: list[tuple[str | None, int]] = []


@app.task
def add(x, y):
    return x + y


@app.task(name="proj.maths.xsum")
def xsum(numbers):
    return sum(numbers)


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def flaky(self, until):
    seen.append((self.request.id, self.request.retries))
    if self.request.retries < until:
        raise self.retry(exc=ConnectionError("away"), countdown=0)
    return self.request.retries


@app.task(bind=True, max_retries=1)
def identified(self):
    seen.append((self.request.id, self.request.retries))
    if self.request.retries == 0:
        self.retry(countdown=0)
    return self.request.id


@app.task(time_limit=0.2, max_retries=3, default_retry_delay=0)
def slow():
    seen.append(("slow", 0))
    time.sleep(1)


@app.task(autoretry_for=(ConnectionError,), retry_backoff=0.001, max_retries=1)
def automatic(kind):
    seen.append((kind, 0))
    raise {"away": ConnectionError, "wrong": KeyError}[kind]("it")


@app.task(bind=True, max_retries=0)
def gives_up(self):
    seen.append(("gives up", self.request.retries))
    try:
        self.retry(countdown=0)
    except self.MaxRetriesExceededError:
        return "gave up"


@app.task(bind=True, max_retries=0)
def longer(self, until):
    seen.append(("longer", self.request.retries))
    if self.request.retries < until:
        self.retry(exc=Retryable("away"), countdown=0, max_retries=2)
    return self.request.retries


class Away(Exception):
    """What the middleware raises around `unlucky`."""


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def unlucky(self, kind):
    seen.append((kind, self.request.retries))
    if kind == "retries" and self.request.retries < 4:
        self.retry(countdown=0, max_retries=4)
    return kind


@app.task(autoretry_for=(Exception,), max_retries=1)
def overtaken(error):
    raise error


@app.task(bind=True)
def overtaken_bound(self, error):
    raise error


@app.app.middleware
async def fails(attempt: Current) -> AsyncIterator[None]:
    yield
    if attempt.task == "proj.unlucky" and seen[-1][0] != "retries":
        errors: dict[str | None, Callable[[str], Exception]] = {
            "away": Away, "store": StoreUnavailable, "step": partial(Retryable, code="mine"),
        }  # fmt: skip
        raise errors[seen[-1][0]]("it")


@app.task
def starts_chain():
    return str((add.s(1, 2) | add.s(3)).delay().id)


@shared_task
def shared(word="x"):
    return word * 2


@pytest.fixture(autouse=True)
def _use(using: Callable[..., App]) -> Iterator[None]:
    using(app.app)
    seen.clear()
    made_apps.append(app)  # the app that was made last
    yield
    made_apps.remove(app)


async def session(serve: Serve, program: Callable[[], Any], served: Any = None) -> Any:
    """Run a program of Celery's beside a worker. It blocks, as those programs do."""
    async with serve((served or app).app), asyncio.timeout(SECONDS):
        return await asyncio.to_thread(program)


async def test_the_first_steps_of_celerys_documentation_run_as_they_stand_there(
    serve: Serve, using: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "celery", leasehold.celery)
    tasks = importlib.import_module("tests.app.celery_first_steps")
    using(tasks.app.app)

    def program() -> None:
        first_steps(tasks)
        with pytest.raises(TaskFailed):
            tasks.add.delay(4, "4").get()

    try:
        await session(serve, program, tasks.app)
    finally:
        made_apps.remove(tasks.app)
        del sys.modules["tests.app.celery_first_steps"]


async def test_the_same_program_runs_over_celery_itself(amqp_url: str) -> None:
    """So what the facade must answer is what Celery answers."""
    command = [sys.executable, "-m", "celery", "-A", "tests.app.celery_first_steps", "-b", amqp_url]
    worker = await asyncio.create_subprocess_exec(
        *command, "worker", "--pool", "solo", "--without-gossip", "--without-mingle", cwd=ROOT
    )
    program = [sys.executable, "-m", "tests.app.celery_program", amqp_url]
    try:
        running = await asyncio.create_subprocess_exec(*program, cwd=ROOT)
        async with asyncio.timeout(2 * SECONDS):
            assert await running.wait() == 0
    finally:
        worker.terminate()
        await worker.wait()


async def test_a_call_has_its_options(serve: Serve) -> None:
    def program() -> None:
        identity = str(uuid4())
        result = add.apply_async((2,), {"y": 3}, countdown=0.05, priority=9, queue="default", task_id=identity)
        assert result.id == identity
        assert AsyncResult(identity).get() == 5
        assert app.AsyncResult(result.id) == result
        late = add.apply_async((1, 1), countdown=0.2, expires=0.01)
        assert "task_expired" in str(late.get(propagate=False))
        assert late.status == "REVOKED"
        assert app.send_task("proj.maths.xsum", ([1, 2],)).get() == 3
        assert shared.delay(word="ab").get() == "abab"
        assert (add(1, 2), shared("a")) == (3, "aa")

    await session(serve, program)


@pytest.mark.parametrize("make", [uuid4, new_id, lambda: UUID(int=5), lambda: "order:17 ü", lambda: "k" * 64])
async def test_a_task_id_may_be_any_text_and_is_the_id_everywhere(
    serve: Serve, connection: Connection, make: Callable[[], object]
) -> None:
    task_id = make()

    def program() -> None:
        expected = str(task_id)
        seen_before: Any = AsyncResult(task_id)  # type: ignore[arg-type]  # a text, too
        assert (seen_before.state, seen_before.result) == ("PENDING", None)
        with pytest.raises(NotFound, match="no such run"):
            seen_before.revoke()
        result = identified.apply_async(task_id=task_id)
        assert result.id == result.get() == expected
        assert seen == [(expected, 0), (expected, 1)]
        found = app.AsyncResult(expected)
        assert (found, found.get(), seen_before.get(), seen_before.state) == (result, expected, expected, "SUCCESS")
        again = identified.apply_async(task_id=task_id, expires=60)
        assert (again, again.get(), len(seen)) == (result, expected, 2)
        with pytest.raises(Conflict):
            add.apply_async((1, 2), task_id=task_id)

    await session(serve, program)
    ((run_id, params),) = await connection.fetch("SELECT id, params FROM job")
    assert is_recent(run_id)
    assert params.get("task_id", str(run_id)) == str(task_id)
    assert ("task_id" in params) == (run_id != task_id)


async def test_one_task_id_submitted_by_many_programs_at_once_is_one_run(connection: Connection) -> None:
    task_id = str(uuid4())
    submissions = (asyncio.to_thread(add.apply_async, (1, n), task_id=task_id) for n in range(8))
    assert {result.id for result in await asyncio.gather(*submissions)} == {task_id}
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


async def test_a_run_whose_own_id_earlier_code_took_from_a_task_id_is_found_and_not_submitted_again(
    connection: Connection,
) -> None:
    task_id = uuid4()
    await write(connection, [Call(add.task, {"args": [1, 2], "kwargs": {}}, id=task_id)], "me", 60)

    def program() -> None:
        assert AsyncResult(task_id)._run.status() in ("pending", "queued")
        assert add.apply_async((1, 2), task_id=str(task_id)).id == str(task_id)
        AsyncResult(task_id).revoke()

    await asyncio.to_thread(program)
    assert [tuple(row) for row in await connection.fetch("SELECT id, status FROM job")] == [(task_id, "cancelled")]


async def test_a_task_id_is_found_only_by_its_own_tenant(using: Callable[..., App]) -> None:
    own, other = str(new_id()), str(uuid4())
    for task_id in (own, other):
        await asyncio.to_thread(add.apply_async, (1, 2), task_id=task_id)
    await asyncio.to_thread(using, app.app, tenant="other")
    for task_id in (own, other):
        assert await asyncio.to_thread(app.find, task_id) is None
    assert (await asyncio.to_thread(add.apply_async, (1, 2), task_id=other)).id == other
    assert await asyncio.to_thread(app.find, other) is not None


async def test_a_task_id_goes_on_to_mean_its_run_after_a_rerun_whose_id_is_its_own(
    serve: Serve, connection: Connection, settings: Settings
) -> None:
    key = await create_key(connection, tenant_id="me", client_id="ops", scopes=(RUNS_READ, RUNS_WRITE))
    api = settings.model_copy(update={"pipelines": f"{__name__}:app"})
    async with serving(api) as running, AsyncClient(running.url, key.text) as client, serve(app.app):
        first = await asyncio.to_thread(lambda: identified.apply_async(task_id="order-17"))
        assert await asyncio.to_thread(first.get) == "order-17"
        run_id = await connection.fetchval("SELECT id FROM job")
        again = await client.rerun(run_id)
        assert await asyncio.to_thread(AsyncResult(str(again.id)).get) == str(again.id)
    assert await asyncio.to_thread(app.find, "order-17") == app._canvas.find(run_id)
    repeated = await asyncio.to_thread(lambda: identified.apply_async(task_id="order-17"))
    assert repeated._run.id == run_id
    assert await connection.fetchval("SELECT count(*) FROM job") == 2
    with pytest.raises(Invalid, match="celery_task_id") as refused:
        identified.task.options(tags={"celery_task_id": "order-18"})
    assert refused.value.code == "invalid_tags"


def test_a_task_id_is_not_pending_while_no_database_answers(using: Callable[..., App]) -> None:
    using(app.app, database_url=SecretStr(f"postgresql://me@127.0.0.1:{free_port()}/x"), submit_seconds=0.3)
    with pytest.raises(Unreachable, match="order 17") as unreachable:
        _ = AsyncResult("order 17").state
    assert unreachable.value.run_id == "order 17"


async def test_a_bound_task_is_tried_again_and_gives_up_after_its_last_retry(serve: Serve) -> None:
    async def seen_in_a_loop(result: AsyncResult) -> tuple[str, bool, bool]:
        return result.state, result.ready(), result.failed()

    def program() -> None:
        result = flaky.delay(2)
        assert result.get() == 2
        assert seen == [(result.id, 0), (result.id, 1), (result.id, 2)]
        failed = flaky.delay(9)
        with pytest.raises(TaskFailed, match="ConnectionError: away"):
            failed.get()
        assert len(seen) == 6
        assert asyncio.run(seen_in_a_loop(failed)) == ("FAILURE", True, True)

    await session(serve, program)


def test_a_time_without_a_zone_is_of_utc_and_a_past_one_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of another zone, too."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    current = Current("t", LocalAttempt("acme"))
    token = enter(current)
    try:
        bound: Any = _BoundSelf(flaky, Request(attempt=current))
        for eta, seconds in ((datetime.now(UTC) + timedelta(hours=1), 3600), (datetime.now(UTC) - timedelta(1), 0)):
            with pytest.raises(Retry) as retry:
                bound.retry(eta=eta.replace(tzinfo=None))
            assert retry.value.after is not None
            assert abs(retry.value.after.total_seconds() - seconds) < 60
        with pytest.raises(Retry) as retry:
            bound.retry(countdown=-5)
        assert retry.value.after == timedelta(0)
    finally:
        leave(token)
        monkeypatch.undo()
        time.tzset()


def test_a_bound_task_may_be_called_directly() -> None:
    """It has a request without an id. Nothing can try it again: `retry` raises what went wrong."""
    assert flaky(0) == 0
    with pytest.raises(ConnectionError, match="away"):
        flaky(1)
    assert seen == [(None, 0), (None, 0)]
    assert (flaky.request.id, flaky.request.retries) == (None, 0)


def test_only_errors_count_as_retries() -> None:
    """The third attempt of a run whose worker was lost twice has all its retries left."""
    attempt = LocalAttempt("acme")
    attempt.number = 3
    token = enter(Current("t", attempt))
    try:
        with pytest.raises(Retry, match="away"):
            flaky.work([1], {}, None)
        attempt.errors = 2
        with pytest.raises(Permanent, match="ConnectionError: away"):
            flaky.work([9], {}, None)
    finally:
        leave(token)
    assert [retries for _, retries in seen] == [0, 2]


@pytest.fixture
def bound() -> Iterator[Any]:
    """`self` in the last attempt of `flaky`."""
    attempt = LocalAttempt("acme")
    attempt.errors = 2
    current = Current("t", attempt)
    token = enter(current)
    yield _BoundSelf(flaky, Request([9], {"until": 1}, attempt=current))
    leave(token)


def test_after_the_last_retry_the_task_meets_what_it_gave(bound: Any) -> None:
    away = ConnectionError("away")
    with pytest.raises(ConnectionError) as raised:
        bound.retry(exc=away)
    assert raised.value is away
    with pytest.raises(bound.MaxRetriesExceededError, match="was tried again 2 times") as exceeded:
        bound.retry()
    assert (exceeded.value.task_args, exceeded.value.task_kwargs) == ([9], {"until": 1})
    assert exceeded.type is MaxRetriesExceededError


def test_a_retry_may_name_more_and_fewer_retries_than_the_task(bound: Any) -> None:
    with pytest.raises(Retry):
        bound.retry(max_retries=3)
    with pytest.raises(bound.MaxRetriesExceededError):
        bound.retry(max_retries=1)
    with pytest.raises(NotSupported, match="at most 1000 times, not 1001"):
        bound.retry(max_retries=1001)


async def test_a_task_catches_its_last_retry_and_one_that_names_more_retries_has_them(serve: Serve) -> None:
    def program() -> None:
        assert gives_up.delay().get() == "gave up"
        assert seen == [("gives up", 0)]
        assert longer.delay(2).get() == 2  # of a task with none
        with pytest.raises(TaskFailed, match="away"):  # an error of Leasehold's own, which would be tried again
            longer.delay(9).get()
        assert [retries for name, retries in seen if name == "longer"] == [0, 1, 2, 0, 1, 2]

    await session(serve, program)


async def test_a_run_beyond_its_time_limit_is_not_tried_again(serve: Serve) -> None:
    def program() -> None:
        with pytest.raises(TaskFailed, match="ran longer than"):
            slow.delay().get()
        assert len(seen) <= 1  # on a busy machine the limit may pass before the function has begun

    await session(serve, program)


@pytest.mark.parametrize(
    ("kind", "code"), [("away", "handler_error"), ("store", "store_unavailable"), ("step", "mine")]
)
async def test_an_error_around_a_bound_task_has_no_more_retries_than_the_task(
    serve: Serve, kind: str, code: str
) -> None:
    """Its rule allows 1,000, because `self.retry` may name as many."""

    def program() -> None:
        with pytest.raises(TaskFailed, match=f"{code}: .*it"):
            unlucky.delay(kind).get()
        assert seen == [(kind, 0), (kind, 1), (kind, 2)]
        assert unlucky.delay("retries").get() == "retries"
        assert seen[3:] == [("retries", n) for n in range(5)]

    await session(serve, program)


@pytest.mark.parametrize("error", [LeaseLost(), ObjectExists("key")])
def test_an_attempt_that_lost_its_lease_ends_no_run(error: Exception) -> None:
    assert unlucky.is_last(RuntimeError(), 2)
    assert not unlucky.is_last(error, 2)
    token = enter(Current("t", LocalAttempt("acme")))
    try:
        with pytest.raises(type(error)):
            overtaken.work([error], {}, None)
        with pytest.raises(type(error)):
            overtaken_bound.work([error], {}, None)
    finally:
        leave(token)


@pytest.mark.parametrize("error", [LeaseLost(), Permanent("hopeless", "never")])
def test_an_error_in_a_group_ends_an_attempt_as_it_does_alone(error: Exception) -> None:
    token = enter(Current("t", LocalAttempt("acme")))
    try:
        for task in (overtaken, overtaken_bound):
            with pytest.raises(type(error)) as raised:
                task.work([ExceptionGroup("of a TaskGroup", [ValueError(), error])], {}, None)
            assert raised.value is error
        with pytest.raises(Permanent, match="2 sub-exceptions"):
            overtaken_bound.work([ExceptionGroup("no one decides", [ValueError(), OSError()])], {}, None)
    finally:
        leave(token)


async def test_a_countdown_that_has_passed_starts_at_once(serve: Serve) -> None:
    await session(serve, lambda: add.apply_async((2, 2), countdown=-1).get())


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_countdown_and_an_eta_are_kept_by_a_program_whose_clock_is_wrong(
    connection: Connection, hours: int
) -> None:
    eta = datetime.now(UTC) + timedelta(hours=1)

    def program() -> None:
        with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):
            add.apply_async((1, 1), countdown=600)
            add.apply_async((2, 2), eta=eta)

    await asyncio.to_thread(program)
    found = await connection.fetch("SELECT scheduled_at, created_at FROM run JOIN job ON id = job_id ORDER BY 1")
    assert abs(found[0]["scheduled_at"] - found[0]["created_at"] - timedelta(minutes=10)) < timedelta(minutes=1)
    assert found[1]["scheduled_at"] == eta


def test_settings_may_come_from_a_module_that_imports_others() -> None:
    module = ModuleType("settings_of_mine")
    vars(module).update(os=os, Any=Any, find_spec=find_spec, task_default_queue="mine", enable_utc=True)
    own = Celery("own")
    try:
        own.config_from_object(module)
        assert own.conf.task_default_queue == "mine"
    finally:
        made_apps.remove(own)


def test_a_signature_takes_its_arguments_as_celery_does() -> None:
    for make in (add.signature, add.subtask):
        assert make((1, 2)).plan == add.s(1, 2).plan
        assert make([1], {"y": 2}).plan == make(args=(1,), kwargs={"y": 2}).plan == add.s(1, y=2).plan
        assert make((1, 2), immutable=True).plan == add.si(1, 2).plan
        assert make((1, 2), queue="default", acks_late=True).plan == make((1, 2), None, {"acks_late": True}).plan
        assert make().plan == add.s().plan
    assert add.signature((1,))(2) == 3


def test_the_header_of_a_chord_may_be_a_single_call() -> None:
    header: Any
    for header in (add.s(1, 2), chain(add.s(1, 2), add.s(3)), group(add.s(1, 2)), [add.s(1, 2)]):
        (member,) = chord(header, add.s(1)).plan["group"]
        is_whole = isinstance(header, Signature) and "group" not in header.plan
        assert member == (header.plan if is_whole else add.s(1, 2).plan)


@app.task(rate_limit="3/m")
def rare(n):
    seen.append(("rare", n))
    return n


async def test_a_rate_holds_for_the_calls_of_a_group(serve: Serve) -> None:
    """All calls of a group started at once: its rate held for `delay` alone."""

    def program() -> None:
        with_rate = group([*(rare.s(n) for n in range(8)), add.s(1, 1)])()
        deadline = time.monotonic() + SECONDS
        while len([name for name, _ in seen if name == "rare"]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        assert len([name for name, _ in seen if name == "rare"]) == 3
        with_rate.revoke()

    seen.clear()
    await session(serve, program)


async def test_only_the_named_exceptions_are_tried_again(serve: Serve) -> None:
    def program() -> None:
        with pytest.raises(TaskFailed, match="ConnectionError: it"):
            automatic.delay("away").get()
        with pytest.raises(TaskFailed, match="KeyError"):
            automatic.delay("wrong").get()

    await session(serve, program)
    assert [kind for kind, _ in seen] == ["away", "away", "wrong"]


async def test_chains_groups_and_chords_are_workflows(serve: Serve) -> None:
    def program() -> None:
        assert chain(add.s(4, 4), add.s(8), add.si(1, 1) | add.s(5))().get() == 7
        assert (add.s(1, 2) | add.s(3)).delay().get() == 6
        assert group(add.s(n, n) for n in range(4))().get() == [0, 2, 4, 6]
        assert chord((add.s(n, n) for n in range(4)), xsum.s())().get() == 12
        assert chord([add.s(1, 1)])(xsum.s()).get() == 2
        # As in Celery: without calls in the header, the body runs at once.
        assert chord([], xsum.s())().get() == chord(())(xsum.s()).get() == 0
        assert chain(add.s(1), add.s(1)).apply_async((5,)).get() == 7
        assert AsyncResult(starts_chain.apply_async(countdown=0.1).get()).get() == 6
        assert add.s(2, 2).delay().get() == add.s(2)(2) == 4
        with pytest.raises(TaskFailed, match="TypeError"):
            chain(add.s(1, "x"), add.s(1))().get()

    await session(serve, program)


#: The workflows that wait and have made no call, and whose code their worker lacked.
_LEFT = (
    "SELECT t.status, u.handler FROM task t LEFT JOIN unknown_task u ON u.task_id = t.id"
    " WHERE t.status = 'waiting' AND NOT t.journaled"
)


def release(using: Callable[..., App], *, has_new: bool) -> Celery:
    """A release of an app. The newer one also has the task `new`."""
    own = Celery("rolling")
    made_apps.remove(own)
    own.task(name="old")(lambda x: x + 1)
    if has_new:
        own.task(name="new")(lambda x: x * 10)
    using(own.app)
    return own


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda old, new: chain(old.s(1), new.s()), 20),
        (lambda old, new: group(old.s(1), chain(old.s(2), new.s())), [2, 30]),
        (lambda old, new: chord([old.s(1)], chain(new.si(4), old.s())), 41),
    ],
)
@pytest.mark.parametrize("names_handlers", [True, False])
async def test_calls_of_a_newer_release_wait_for_a_worker_that_has_all_their_tasks(
    serve: Serve, using: Callable[..., App], connection: Connection, monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Signature], result: object, names_handlers: bool,
) -> None:  # fmt: skip
    """As `new.delay()` does during a deployment. The run failed for good (`handler_error: KeyError`). A plan of earlier
    code does not name the handlers: no worker knows that it is for it, so the pause is what it is.
    """
    older, newer = release(using, has_new=False), release(using, has_new=True)
    signature = make(newer.tasks["old"], newer.tasks["new"])
    if not names_handlers:
        monkeypatch.setattr(missing_code, "SHORTEST_PAUSE", 0.1)
        signature.plan = orjson.loads(re.sub(rb',"handler":"[^"]*"', b"", orjson.dumps(signature.plan)))
    async with asyncio.timeout(SECONDS), serve(older.app):
        run = await asyncio.to_thread(signature.delay)
        while not (left := await connection.fetch(_LEFT)):
            assert await connection.fetchval("SELECT status FROM job") != "failed"
            await asyncio.sleep(0.05)
        # A worker that lacks the other task must not wake it: the two would wake it for each other without end.
        needed = "rolling.new.run, rolling.old.run" if names_handlers else None
        assert {tuple(row) for row in left} == {("waiting", needed)}
        assert await connection.fetchval("SELECT count(*) FROM task") == 1  # no call has begun
    async with serve(newer.app), asyncio.timeout(SECONDS):
        assert await asyncio.to_thread(run.get) == result


@pytest.mark.parametrize(
    ("age", "seconds"), [(timedelta(0), 30), (timedelta(hours=1), 3600), (timedelta(days=9), 86_400), (None, 30)]
)
def test_a_run_that_no_worker_can_begin_is_tried_ever_more_seldom(age: timedelta | None, seconds: float) -> None:
    """Each try adds to its history. An id of an earlier release may have no time."""
    run_id = uuid4() if age is None else id_of_instant(datetime.now(UTC) - age)
    assert missing_code.pause_without_code(run_id) == pytest.approx(seconds, abs=5)


async def test_each_call_has_an_id_of_its_own_and_keeps_it_at_a_retry(serve: Serve) -> None:
    """Programs use it as a key, such as that of a payment. The calls of a group had the id of the group's run."""

    def program() -> None:
        ids = group(identified.si() for _ in range(4))().get()
        alone = identified.delay()
        assert alone.get() == alone.id  # the id of a run, which AsyncResult finds
        ids += [alone.id, *[chain(identified.si(), identified.si())().get() for _ in range(2)]]
        assert len({*ids}) == 7
        assert {*ids} < {own for own, _ in seen}

    await session(serve, program)
    assert len({*seen}) == len(seen) == 2 * (4 + 1 + 4)
    assert {own for own, retries in seen if retries == 0} == {own for own, retries in seen if retries == 1}


def test_a_client_may_leave_out_the_positional_or_the_named_arguments() -> None:
    """Over HTTP: the payload is checked against the task's schema."""
    program = Celery("over_http")

    @program.task
    def pair(a: int, b: int = 2) -> list[int]:
        return [a, b]

    schema = pair.task.pipeline.params.model_json_schema()
    assert "required" not in schema
    for payload in ({"args": [1]}, {"kwargs": {"a": 1}}, {"args": [1], "kwargs": {"b": 2}}):
        assert pair.task.local(**payload) == [1, 2]


def test_arguments_that_do_not_fit_raise_where_they_are_submitted() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        add.delay(1)


@pytest.mark.parametrize("task_id", [uuid4(), new_id(), "nobody's"])
def test_an_id_that_no_run_has_is_pending(task_id: Any) -> None:
    result = AsyncResult(task_id)
    assert (result.state, result.ready(), result.result) == ("PENDING", False, None)


@pytest.mark.parametrize("wrong", ["", "k" * 65, "nul \0", "half \ud800", 17, b"order"])
def test_an_id_that_no_run_can_have_is_refused_where_it_is_given(wrong: Any) -> None:
    for call in (lambda: AsyncResult(wrong), lambda: add.apply_async((1, 2), task_id=wrong)):
        with pytest.raises(Invalid, match="A task_id is a text of 1 to 64 characters, not") as refused:
            call()
        assert refused.value.code == "invalid_id"


def test_the_id_of_an_async_result_is_the_usual_text_of_a_uuid() -> None:
    given = uuid4()
    assert AsyncResult(str(given).upper()) == AsyncResult(given)


def test_two_functions_of_one_name_are_refused_with_the_way_out() -> None:
    """A program and its worker may import their modules in another order, so neither gets a name that depends on it."""

    def cleanup() -> str:
        return "users"

    def other_cleanup() -> str:
        return "orders"

    other_cleanup.__name__, other_cleanup.__module__ = "cleanup", "orders.tasks"
    own = Celery("own")
    try:
        users = own.task(cleanup)
        words = rf"test_celery.py:\d+: orders.tasks.cleanup .* name cleanup, as {__name__}.cleanup has: .*name="
        with pytest.raises(DeclarationError, match=words):
            own.task(other_cleanup)
        orders = own.task(name="orders.cleanup")(other_cleanup)
        assert [users.task.name, orders.task.name] == ["own.cleanup", "own.orders-cleanup"]
    finally:
        made_apps.remove(own)


@pytest.mark.parametrize(
    ("rate", "per_minute"),
    [
        ("10/m", 10),
        ("2/s", 120),
        ("120/h", 2),
        (2, 120),
        (0.5, 30),
        ("0.5/s", 30),
        ("10", 600),
        (0, None),
        (None, None),
    ],
)
def test_a_rate_limit_means_what_celery_means(rate: str | float | None, per_minute: int | None) -> None:
    limit = options_of({"rate_limit": rate}).limit
    assert (None if limit is None else limit.per_minute) == per_minute


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": object}, "base: write a function"),
        ({"soft_time_limit": 3}, "soft_time_limit: use time_limit"),
        ({"serializer": "pickle"}, "serializer: arguments and results are JSON"),
        ({"rate_limit": "3/h"}, "a whole number a minute"),
        ({"rate_limit": "90/h"}, "a whole number a minute"),
        ({"rate_limit": "0.01/s"}, "a whole number a minute"),
        ({"rate_limit": "often"}, "a whole number a minute"),
        ({"unheard_of": 1}, "from-celery"),
    ],
)
def test_what_the_facade_lacks_is_refused_where_the_task_is_declared(options: dict[str, Any], words: str) -> None:
    def task() -> None: ...

    for declare in (Celery("refusing").task, shared_task):
        with pytest.raises(NotSupported, match=words):
            declare(**options)(task)
    made_apps.pop()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: Celery("a", include=["b"]), "include: import the modules"),
        (lambda: app.conf.update(beat_schedule={}), "beat_schedule: declare the task"),
        (lambda: app.conf.update(accept_content=["pickle"]), "serializer"),
        (lambda: add.apply_async((1, 2), queue="other"), "declare it with queue='other'"),
        (lambda: add.apply_async((1, 2), link=add.s(1)), "link: use chain"),
        (lambda: app.send_task("nobody.knows"), "knows no task"),
        (app.autodiscover_tasks, "packages that are named"),
        (lambda: app.submit_canvas({}, [1, 2]), "one argument"),
        (lambda: chain(add.s(1, 2)).apply_async(countdown=3), "no options .*: submit it in a task"),
        (lambda: chain(add.s(1)).delay(y=2), "no keyword arguments .*: give them to its calls, as in"),
        (lambda: group([]), "^leasehold.celery has no chain or group of nothing: make it only if there are calls$"),
        (chain, "no chain or group of nothing"),
        (
            lambda: add.signature((1, 2), countdown=3),
            r"no countdown of a signature: .* apply_async\(countdown=\.\.\.\)",
        ),
        (lambda: add.signature((1, 2), None, {"expires": 3}), "no expires of a signature"),
        (lambda: add.signature((1, 2), queue="other"), "declare it with queue='other'"),
        (lambda: add.signature((1, 2), link=add.s(1)), "link: use chain"),
    ],
)
def test_what_else_it_lacks_is_refused_with_what_to_do(refused: Callable[[], Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        refused()


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (lambda: add, "map", r"^leasehold.celery has no Task.map: use group\(task.s\(item\) for item in items\)$"),
        (lambda: add, "starmap", "no Task.starmap: use group"),
        (lambda: add, "chunks", "no Task.chunks: use group"),
        (lambda: add, "apply", r"no Task.apply: call the function here, as in task\(1, 2\)"),
        (lambda: add, "retry", "no Task.retry: declare the task with bind=True"),
        (lambda: _BoundSelf(add, Request()), "update_state", r"no Task.update_state: use .*current\(\)"),
        (Request, "hostname", "no Context.hostname: use .*current"),
        (lambda: add.s(1), "set", r"no Signature.set: give it to apply_async\(\.\.\.\)"),
        (lambda: chain(add.s(1)), "on_error", "no Signature.on_error: use on_failure="),
        (lambda: AsyncResult(uuid4()), "info", "no AsyncResult.info: use get"),
        (lambda: AsyncResult(uuid4()), "join", r"no AsyncResult.join: use get\(\)"),
        (lambda: app, "control", "no Celery.control: use the console"),
        (lambda: app, "on_after_configure", "no Celery.on_after_configure: .*@app.cron"),
    ],
)
def test_a_name_that_an_object_lacks_is_refused_and_is_an_attribute_error_too(
    make: Callable[[], Any], name: str, words: str
) -> None:
    """So `hasattr`, `getattr` with a default and the protocols of copies and mocks go on to work."""
    with pytest.raises(NotSupported, match=words):
        getattr(make(), name)
    assert not hasattr(make(), name)
    assert getattr(make(), name, 7) == getattr(make(), "unheard_of", 7) == 7
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        make().unheard_of  # noqa: B018 - that is the test


def test_a_signature_may_be_copied() -> None:
    assert copy.deepcopy(add.s(1).plan) == copy.copy(add.s(1)).plan


@pytest.mark.parametrize(
    ("table", "celerys"),
    [
        (OF_TASK, "celery.app.task:Task"),
        (OF_SIGNATURE, "celery.canvas:Signature"),
        (OF_RESULT, "celery.result:AsyncResult celery.result:GroupResult"),
        (OF_REQUEST, "celery.app.task:Context"),
        (OF_APP, "celery:Celery"),
    ],
)
def test_the_names_that_it_refuses_are_celerys(table: dict[str, str], celerys: str) -> None:
    classes = [pkgutil.resolve_name(name) for name in celerys.split()]
    of_instances = {"task", "args", "kwargs", "options", "on_after_configure", "on_after_finalize", "on_configure",
                    "on_init", "on_after_fork", "steps", "user_options", "properties", "parent", "results"}  # fmt: skip
    assert {name for name in table if not any(hasattr(one, name) for one in classes)} <= of_instances


def test_a_name_that_it_lacks_cannot_be_imported_and_the_error_says_what_to_do() -> None:
    with pytest.raises(ImportError, match="crontab: declare the task with"):
        from leasehold.celery import crontab  # noqa: F401, PLC0415 - that is the test
