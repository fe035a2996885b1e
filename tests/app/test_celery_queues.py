"""`task_default_queue`: as in Celery, it counts for every task without a queue of its own, whatever the order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold import App, DeclarationError
from leasehold.celery import Celery, chain, shared_task
from leasehold.celery import app as facade
from leasehold.celery.apps import made_apps
from leasehold.celery.exceptions import NotSupported
from leasehold.db.database import Connection
from tests.app.conftest import Serve

SECONDS = 60.0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test has only the apps and the shared tasks that it makes, and no other test has them."""
    apps = list(made_apps)
    made_apps.clear()
    monkeypatch.setattr(facade, "_shared_declarations", [])
    yield
    made_apps[:] = apps


def program(set_queue: Callable[[Celery], Any]) -> Celery:
    """A program whose module of shared tasks is imported before the app is made, and whose other tasks come later."""

    @shared_task
    def early(x: int) -> int:
        return x

    shop = Celery("shop")

    @shop.task
    def own(x: int) -> int:
        return x

    def elsewhere(x: int) -> int:
        return x

    shop.task(queue="pictures")(elsewhere)

    set_queue(shop)

    @shared_task
    def late(x: int) -> int:
        return x

    return shop


def queues_of(shop: Celery) -> dict[str, str]:
    return {task.name: task.pipeline.steps[0].queue for task in shop.app.tasks.values()}


def set_twice(shop: Celery) -> None:
    shop.conf.task_default_queue = "post"
    shop.conf.task_default_queue = "mail"


SET: dict[str, Callable[[Celery], Any]] = {
    "an attribute": lambda shop: setattr(shop.conf, "task_default_queue", "mail"),
    "update": lambda shop: shop.conf.update(enable_utc=True, task_default_queue="mail"),
    "an object": lambda shop: shop.config_from_object(SimpleNamespace(task_default_queue="mail")),
    "twice": set_twice,
}


@pytest.mark.parametrize("how", SET)
def test_the_default_queue_counts_for_tasks_that_were_declared_before_it_was_set(how: str) -> None:
    shop = program(SET[how])
    of = dict.fromkeys(("shop.early", "shop.own", "shop.late", "shop.celery-canvas"), "mail")
    assert queues_of(shop) == {**of, "shop.elsewhere": "pictures"}
    for task in shop.tasks.values():
        queue = of.get(task.task.name, "pictures")
        assert (task.queue, task.task.pipeline.by_name["run"].queue) == (queue, queue)
        assert task.task.runnable.new_step()["queue"] == queue  # as a step of a workflow
        task.signature((1,), queue=queue)
        with pytest.raises(NotSupported, match=f"is of the queue {queue}"):
            task.signature((1,), queue="default")


def test_without_a_default_queue_it_is_leaseholds_own() -> None:
    shop = program(lambda _shop: None)
    assert set(queues_of(shop).values()) == {"default", "pictures"}
    shop.conf.task_default_queue = "mail"
    shop.conf.task_default_queue = None
    assert set(queues_of(shop).values()) == {"default", "pictures"}


async def test_a_worker_of_the_default_queue_takes_what_was_declared_before_it_was_set(
    serve: Serve, using: Callable[..., App], connection: Connection
) -> None:
    shop = program(SET["an attribute"])
    using(shop.app)
    tasks = {task.task.name: task for task in shop.tasks.values()}

    def call() -> None:
        assert tasks["shop.early"].delay(1).get(timeout=SECONDS) == 1
        assert chain(tasks["shop.early"].s(2), tasks["shop.own"].s())().get(timeout=SECONDS) == 2

    async with serve(shop.app, worker_queues="mail"), asyncio.timeout(SECONDS):
        await asyncio.to_thread(call)
    assert [row["queue"] for row in await connection.fetch("SELECT DISTINCT queue FROM task")] == ["mail"]


USES: dict[str, Callable[[Celery], Any]] = {
    "a worker or the API serves it": lambda shop: shop.pipelines(),
    "its leasehold app is served": lambda shop: shop.app.pipelines(),
    "a task is submitted": lambda shop: next(iter(shop.tasks.values())).delay(1),
    "a chain is submitted": lambda shop: chain(task.s(1) for task in shop.tasks.values()).delay(),
}


@pytest.mark.parametrize("use", USES)
async def test_another_default_queue_is_refused_once_it_would_leave_runs_behind(
    use: str, using: Callable[..., App]
) -> None:
    shop = program(SET["an attribute"])
    using(shop.app)
    await asyncio.to_thread(USES[use], shop)
    shop.conf.task_default_queue = "mail"  # no change
    with pytest.raises(NotSupported, match=r"changes no task_default_queue \(to 'post'\) .* where the app is made"):
        shop.conf.task_default_queue = "post"
    assert shop.conf.task_default_queue == "mail"
    assert "post" not in queues_of(shop).values()


def test_a_queue_that_the_tasks_may_not_use_is_refused_where_it_is_set_and_moves_none() -> None:
    shop = program(SET["an attribute"])
    queues = queues_of(shop)

    @shop.app.task(isolated=True)
    def thumb(x: int) -> int:
        return x

    for queue, words in (("Mail", "queue 'Mail' must match"), ("isolated", "only one is isolated"), (3, "are str")):
        with pytest.raises(DeclarationError, match=rf"^tests/app/test_celery_queues.py:\d+: .*{words}"):
            shop.conf.task_default_queue = queue  # type: ignore[assignment]
    assert queues_of(shop) == {**queues, "shop.thumb": "isolated"}
    assert shop.conf.task_default_queue == "mail"
