"""Tests of an app as its owner writes them: test_testing_kit.py runs them with the plugin, each must pass."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from leasehold import App
from leasehold.domain.errors import DeclarationError
from leasehold.settings import Settings
from leasehold.testing.harness import TestApp
from leasehold.testing.server import TestServer
from leasehold.worker.sandbox import landlock
from tests.app import kit_main, kit_parts
from tests.app.kit_shop import (
    Order,
    add,
    ask_the_bank,
    bill,
    celery,
    charge,
    checkout,
    measure,
    nightly,
    pay,
    pay_once,
    remind,
    send_receipt,
)
from tests.support.now import now

ORDER = Order(id=1, email="a@b")


def test_nothing_runs_before_drain_and_everything_after(leasehold_app: TestApp) -> None:
    run = checkout.submit(ORDER)
    assert run.status() in ("pending", "queued")
    assert leasehold_app.submitted(send_receipt) == []
    leasehold_app.drain()
    (sent,) = leasehold_app.submitted(send_receipt)
    assert run.result() == str(sent.run.id)
    assert sent.arguments == {"order": ORDER}
    assert sent.tags == {"customer": "7"}
    assert sent.run.result() == "sent to a@b by attempt 1"


def test_each_test_has_a_database_of_its_own(leasehold_app: TestApp) -> None:
    assert leasehold_app.submitted(checkout) == []
    add.submit(1)
    add.submit(1, b=5)
    assert [one.arguments for one in leasehold_app.submitted(add)] == [{"a": 1, "b": 2}, {"a": 1, "b": 5}]


def test_time_passes_without_sleeping(leasehold_app: TestApp) -> None:
    run = send_receipt.submit(ORDER, delay=timedelta(days=2))
    leasehold_app.drain()
    assert run.status() in ("pending", "queued")
    leasehold_app.travel(days=2, minutes=1)
    leasehold_app.drain()
    assert run.result() == "sent to a@b by attempt 1"


def test_the_clock_of_a_schedule_is_travelled_to(leasehold_app: TestApp) -> None:
    leasehold_app.drain()
    assert leasehold_app.submitted(nightly) == []
    leasehold_app.travel(days=1)
    leasehold_app.drain()
    (tick,) = leasehold_app.submitted(nightly)
    assert tick.run.result() == "done"


def test_a_workflow_sees_the_time_that_has_passed(leasehold_app: TestApp) -> None:
    run = remind.submit()
    for _ in range(3):
        leasehold_app.drain()
        assert run.status() == "running"
        leasehold_app.travel(hours=1)
    leasehold_app.drain()
    assert run.status() == "succeeded"
    assert run.result() == 3


def test_a_workflow_goes_on_when_a_run_that_it_awaits_has_ended(leasehold_app: TestApp) -> None:
    """The task has a limit, so that a run of its own does the work. The run counts among those submitted."""
    run = bill.submit()
    leasehold_app.drain()
    assert run.status() == "succeeded"
    assert run.result() == [1, 2, 3, 4]
    assert sorted(one.arguments["amount"] for one in leasehold_app.submitted(ask_the_bank)) == [1, 2, 4]


def test_an_attempt_fails_as_often_as_the_test_says(leasehold_app: TestApp) -> None:
    for _ in range(2):
        leasehold_app.fail_next(send_receipt, ConnectionError("away"))
    run = send_receipt.submit(ORDER)
    leasehold_app.drain()
    assert run.status() == "running"
    for _ in range(2):
        leasehold_app.travel(hours=4)
        leasehold_app.drain()
    assert run.result() == "sent to a@b by attempt 3"


def test_a_worker_dies_that_has_an_app_whose_tasks_other_modules_declare(
    leasehold_apps: Callable[[App], TestApp],
) -> None:
    test_app = leasehold_apps(kit_main.app)
    run = kit_parts.part.submit(1)
    test_app.die_at("after_claim")
    test_app.drain()
    assert run.result() == "part 1 by attempt 2"  # the first died


def test_an_app_is_given_back_with_its_settings(leasehold_server: TestServer) -> None:
    app = App("given-back")
    test_app = TestApp(app, leasehold_server)
    assert now(app.connections.settings_in_use) == test_app.settings
    test_app.close()
    assert now(app.connections.settings_in_use) is None
    own = Settings(_env_file=None, tenant="mine")
    app.use(own)
    TestApp(app, leasehold_server).close()
    assert app.connections.settings_in_use is own
    assert not now(app.connections.is_over_http)
    app.use_api("https://jobs.example.com", "lh_key")
    test_app = TestApp(app, leasehold_server)
    assert not now(app.connections.is_over_http)
    test_app.close()
    assert (now(app.connections.is_over_http), app.connections.settings_in_use) == (True, own)


def test_no_server_that_the_environment_names_is_used(
    leasehold_server: TestServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LEASEHOLD_DATABASE_DIRECT_URL", "LEASEHOLD_DATABASE_REPLICA_URL"):
        monkeypatch.setenv(name, "postgresql://foreign@localhost/foreign")
    (tmp_path / ".env").write_text("LEASEHOLD_DATABASE_DIRECT_URL=postgresql://foreign@localhost/foreign\n")
    test_app = TestApp(kit_main.app, leasehold_server)
    monkeypatch.setattr(os, "environ", test_app._environment("after_claim", "work"))
    for settings in (test_app.settings, Settings()):
        assert settings.direct().database_url == test_app.settings.database_url
        assert not settings.database_replica_url.get_secret_value()
    test_app.close()


def test_an_isolated_task_runs_in_its_child(leasehold_app: TestApp) -> None:
    run = measure.submit("four")
    leasehold_app.drain()
    assert run.result() == 4
    with pytest.raises(DeclarationError, match="isolated"):
        leasehold_app.fail_next(measure, ValueError("no"))


def test_a_task_in_a_process_of_its_own_is_found_where_the_test_finds_it(
    leasehold_apps: Callable[[App], TestApp],
) -> None:
    """It failed with `task_not_found`. It gets no variable by that, and in the sandbox no file beside the code."""
    elsewhere = importlib.import_module("kit_elsewhere")
    test_app = leasehold_apps(elsewhere.app)
    in_process, in_sandbox = elsewhere.variables.submit(), elsewhere.reads_secret.submit()
    test_app.drain()
    assert in_process.result().get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert in_sandbox.result() == (landlock.version() == 0)


def test_an_error_that_is_never_retried_is_not(leasehold_app: TestApp) -> None:
    leasehold_app.fail_next(charge, ValueError("no such card"))
    run = charge.submit(ORDER)
    leasehold_app.drain()
    assert run.status() == "failed"


def test_an_error_of_a_workflow_ends_its_run(leasehold_app: TestApp) -> None:
    """Only a task is tried again."""
    leasehold_app.fail_next(remind, ValueError("no such customer"))
    run = remind.submit()
    leasehold_app.drain()
    assert run.status() == "failed"


@pytest.mark.parametrize(
    ("task", "errors", "state"),
    [
        (pay, [ConnectionError("away")] * 2, "SUCCESS"),
        (pay, [ConnectionError("away")] * 3, "FAILURE"),
        (pay, [KeyError("no such card")], "FAILURE"),
        (pay_once, [ConnectionError("away")], "FAILURE"),
    ],
    ids=["retried", "after the last retry", "not in autoretry_for", "without autoretry_for"],
)
def test_a_task_of_a_celery_program_fails_as_in_a_worker(
    leasehold_apps: Callable[[App], TestApp], task: Any, errors: list[Exception], state: str
) -> None:
    test_app = leasehold_apps(celery.app)
    for error in errors:
        test_app.fail_next(task.task, error)
    result = pay.delay(7) if task is pay else pay_once.delay()
    assert (pay(1), pay_once()) == ("paid 1", "paid after 0 retries")  # calls without an attempt
    for _ in errors:
        test_app.drain()
        test_app.travel(hours=1)
    test_app.drain()
    assert result.state == state


def test_a_closed_app_of_a_celery_program_fails_no_more(leasehold_apps: Callable[[App], TestApp]) -> None:
    test_app = leasehold_apps(celery.app)
    test_app.fail_next(pay.task, KeyError("no such card"))
    test_app.close()
    test_app = leasehold_apps(celery.app)
    result = pay.delay(7)
    test_app.drain()
    assert result.get() == "paid 7"


@pytest.mark.parametrize(("seconds", "state"), [(60, "REVOKED"), (7200, "SUCCESS")])
def test_a_run_of_a_celery_program_expires_when_time_passes(
    leasehold_apps: Callable[[App], TestApp], seconds: float, state: str
) -> None:
    test_app = leasehold_apps(celery.app)
    results = [pay.apply_async((7,), expires=seconds), pay.delay(8)]
    test_app.travel(hours=1)
    test_app.drain()
    assert [result.state for result in results] == [state, "SUCCESS"]


@pytest.mark.parametrize(("point", "attempt"), [("after_claim", 2), ("after_commit", 1)])
def test_a_worker_dies_and_another_goes_on(leasehold_app: TestApp, point: str, attempt: int) -> None:
    run = send_receipt.submit(ORDER)
    leasehold_app.die_at(point)
    leasehold_app.drain()
    assert run.result() == f"sent to a@b by attempt {attempt}"
    assert len(leasehold_app.submitted(send_receipt)) == 1


def test_a_worker_that_dies_before_other_workers_could_see_it_is_followed_at_once(leasehold_app: TestApp) -> None:
    """As on a busy machine, where a worker may claim before its heartbeat has connected. Its lease has not passed."""
    leasehold_app.settings = leasehold_app.settings.model_copy(update={"presence": False, "lease_seconds": 3600.0})
    run = send_receipt.submit(ORDER)
    leasehold_app.die_at("after_claim")
    leasehold_app.drain()
    assert run.result() == "sent to a@b by attempt 2"


def test_an_unknown_point_is_refused(leasehold_app: TestApp) -> None:
    with pytest.raises(Exception, match="no such failpoint"):
        leasehold_app.die_at("nowhere")


def test_work_that_does_not_end_is_named(leasehold_app: TestApp, leasehold_apps: Any) -> None:
    add.submit(1)
    with pytest.raises(TimeoutError, match=r"kit\.add: run is"):
        leasehold_app.drain(timeout=-1)


def test_a_function_needs_no_server() -> None:
    assert send_receipt.local(ORDER) == "sent to a@b by attempt 1"
