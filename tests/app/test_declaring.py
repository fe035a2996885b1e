"""`@app.task` refuses at import what no worker could run, and says where it stands."""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from leasehold import (
    App,
    Batch,
    Context,
    DeclarationError,
    InvalidArguments,
    Limit,
    Permanent,
    Pipelines,
    Retry,
    RunTerms,
    Step,
    Unique,
    current,
)
from leasehold.app.current import NotInTask
from leasehold.app.local import LocalAttempt
from leasehold.domain.work import Work


class Order(BaseModel):
    id: int
    email: Annotated[str, Field(min_length=3)] = "a@b"


class Unknown:
    pass


def lines_of(function: Callable[..., Any]) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno}"


def test_a_task_is_a_pipeline_of_one_step_with_the_declared_terms() -> None:
    app = App("shop")

    @app.task(queue="mail", retry=Retry(times=2, delay=timedelta(seconds=3)), timeout=timedelta(minutes=7))
    def send_receipt(order: Order) -> str:
        """Sends it."""
        return order.email

    (step,) = send_receipt.pipeline.steps
    assert send_receipt.name == send_receipt.pipeline.name == "shop.send_receipt"
    assert (step.name, step.queue, step.max_attempts, step.timeout) == ("run", "mail", 3, timedelta(minutes=7))
    assert step.retry_ladder == (timedelta(seconds=3), timedelta(seconds=12))
    assert send_receipt.pipeline.params is Order
    assert send_receipt.pipeline.terms.description == "Sends it."
    assert "shop.send_receipt" in app.pipelines()
    assert "webhook" in app.pipelines()
    assert send_receipt(Order(id=1)) == "a@b"


def star(*numbers: int) -> None: ...
def stars(**numbers: int) -> None: ...
def untyped(number) -> None: ...  # type: ignore[no-untyped-def]  # that is the test
def unknown(thing: Unknown) -> None: ...
def undefined(thing: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - that is the test
def misspelt(when: dt.Missing) -> None: ...  # type: ignore[name-defined]
def unfinished(number: "int[") -> None: ...  # type: ignore[valid-type]  # noqa: F722
def divided(number: "1 / 0") -> None: ...  # type: ignore[valid-type]  # noqa: UP037
def unmatched(name: Annotated[str, Field(pattern="(")]) -> None: ...
def unordered(number: Annotated[int, Field(gt="a")]) -> None: ...
def unmatched_result() -> Annotated[str, Field(pattern="(")]: ...  # type: ignore[empty-body]
def endless() -> Iterator[int]:
    yield 1


def ShoutedName() -> None: ...  # noqa: N802 - that is the test


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (star, "*numbers: a task takes named parameters only"),
        (stars, "**numbers: a task takes named parameters only"),
        (untyped, "parameter 'number' has no type"),
        (unknown, "its parameters cannot be converted to JSON"),
        (undefined, "names 'Nowhere', which is not defined above it"),
        (misspelt, "an annotation is not a type"),
        (unfinished, "an annotation is not a type"),
        (divided, "an annotation is not a type"),
        (unmatched, "its parameters cannot be converted to JSON"),
        (unordered, "its parameters cannot be converted to JSON"),
        (unmatched_result, "its result cannot be converted to JSON"),
        (endless, "endless is a generator"),
        (ShoutedName, "'ShoutedName' must match"),
    ],
)
def test_a_function_that_no_worker_could_run_is_refused_with_its_place(
    function: Callable[..., Any], words: str
) -> None:
    with pytest.raises(DeclarationError) as refused:
        App("shop").task(function)
    assert words in str(refused.value)
    assert lines_of(function) in str(refused.value)


@pytest.mark.parametrize("seconds", [-1, 3601])
def test_the_grace_of_a_cancel_has_bounds(seconds: int) -> None:
    with pytest.raises(DeclarationError, match=r"test_declaring.py:\d+.*the grace of a cancel is 0 to 3600 s"):
        App("shop").task(cancel_grace=timedelta(seconds=seconds))(named("one"))
    assert App("shop").task(cancel_grace=timedelta(hours=1))(named("one")).pipeline.terms.grace == timedelta(hours=1)


async def waits(ctx: Context) -> None: ...


def plain(n: int = 1) -> int:
    return n


def declared(**options: Any) -> None:
    App("shop").task(**options)(plain)


def declared_workflow(**options: Any) -> None:
    App("shop").workflow(**options)(waits)


def declared_cron(**options: Any) -> None:
    App("shop").cron(**({"expression": "@daily"} | options))(plain)


@pytest.mark.parametrize(
    ("declare", "option", "value", "words"),
    [
        (declared, "timeout", 60, "timeout is a timedelta, not 60: write timeout=timedelta(seconds=60)"),
        (declared, "timeout", "1 h", "timeout is a timedelta, not '1 h': write timeout=timedelta(seconds=60)"),
        (declared, "timeout", None, "timeout is a timedelta, not None"),
        (declared, "cancel_grace", 2.5, "not 2.5: write cancel_grace=timedelta(seconds=2.5)"),
        (declared, "debounce", 60, "write debounce=timedelta(seconds=60)"),
        (declared, "retry", 3, "retry is a Retry, not 3: write retry=Retry(times=3)"),
        (declared, "limit", 3, "limit is a Limit, not 3: write limit=Limit(at_most=3)"),
        (declared, "unique", True, "unique is a Unique, not True: write unique=Unique()"),
        (declared, "batch", 10, "batch is a Batch, not 10: write batch=Batch(size=10)"),
        (declared, "on_failure", plain, "on_failure is a task, not <function plain"),
        (declared, "name", 5, "name is a str, not 5: write name='5'"),
        (declared, "queue", ["mail"], "queue is a str, not ['mail']: write queue='default'"),
        (declared, "process", "no", "process is a bool, not 'no': write process=True"),
        (declared, "isolated", 1, "isolated is a bool, not 1: write isolated=True"),
        (declared_workflow, "timeout", 60, "write timeout=timedelta(seconds=60)"),
        (declared_workflow, "cancel_grace", 60, "write cancel_grace=timedelta(seconds=60)"),
        (declared_workflow, "version", "2", "version is a whole number of 1 to 32767, not '2'"),
        (declared_workflow, "version", 0, "version is a whole number of 1 to 32767, not 0"),
        (declared_workflow, "queue", None, "queue is a str, not None: write queue='default'"),
        (declared_workflow, "name", 5, "name is a str, not 5"),
        (declared_cron, "timeout", 60, "write timeout=timedelta(seconds=60)"),
        (declared_cron, "catch_up_within", 60, "write catch_up_within=timedelta(seconds=60)"),
        (declared_cron, "expression", 5, "expression is a str, not 5"),
        (declared_cron, "zone", None, "zone is a str, not None: write zone='UTC'"),
        (Retry, "never", ValueError, "Retry.never is a tuple of exceptions such as (ValueError,), not <class"),
        (Retry, "never", [ValueError], "Retry.never is a tuple of exceptions such as (ValueError,), not [<class"),
        (Retry, "never", ("ValueError",), "Retry.never is a tuple of exceptions such as (ValueError,), not ('Val"),
        (Retry, "times", "3", "Retry.times is a whole number, not '3'"),
        (Retry, "times", 2.5, "Retry.times is a whole number, not 2.5"),
        (Retry, "times", True, "Retry.times is a whole number, not True"),
        (Retry, "factor", "4", "Retry.factor is a number, not '4'"),
        (Retry, "delay", 2, "Retry.delay is a timedelta, not 2: write delay=timedelta(seconds=2)"),
        (Retry, "longest", 60, "Retry.longest is a timedelta, not 60: write longest=timedelta(seconds=60)"),
        (Limit, "at_most", "5", "Limit.at_most is a whole number, not '5'"),
        (Limit, "per_minute", 0.5, "Limit.per_minute is a whole number, not 0.5"),
        (Limit, "at_most", 0, "at_most and per_minute must be at least 1"),
        (partial(Limit, at_most=1), "by", 5, "Limit.by is a JSON pointer such as /customer, not 5"),
        (Batch, "size", "10", "Batch.size is a whole number, not '10'"),
        (partial(Batch, size=2), "wait", 1, "Batch.wait is a timedelta, not 1: write wait=timedelta(seconds=1)"),
        (Unique, "within", 3600, "Unique.within is a timedelta, not 3600: write within=timedelta(seconds=3600)"),
        (Unique, "by", 5, "Unique.by is a tuple of names such as ('customer',), not 5"),
        (Unique, "by", (5,), "Unique.by is a tuple of names such as ('customer',), not (5,)"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_with_the_place_and_what_to_write(
    declare: Callable[..., Any], option: str, value: Any, words: str
) -> None:
    with pytest.raises(DeclarationError, match=rf"^\S*test_declaring\.py:\d+: .*{re.escape(words)}"):
        declare(**{option: value})


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: Step("a", timeout=60), "step a: timeout is a timedelta, not 60"),  # type: ignore[arg-type]
        (lambda: Step("a", retry_ladder=(1,)), r"step a: retry_ladder is a tuple of timedelta, not \(1,\): "),  # type: ignore[arg-type]
        (lambda: Step("a", retry_ladder=timedelta(1)), r": write retry_ladder=\(timedelta\(seconds=60\),\)"),  # type: ignore[arg-type]
        (lambda: Step("a", retry_ladder=()), "the retry ladder must have at least one delay"),
        (lambda: Step("a", max_attempts="5"), "step a: max_attempts is a whole number, not '5'"),  # type: ignore[arg-type]
        (lambda: RunTerms(timeout=60), "timeout is a timedelta, not 60"),  # type: ignore[arg-type]
        (lambda: RunTerms(start_within=60), "start_within is a timedelta, not 60"),  # type: ignore[arg-type]
        (lambda: RunTerms(grace=60), r"grace is a timedelta, not 60: write grace=timedelta\(seconds=60\)"),  # type: ignore[arg-type]
        (lambda: App(5), r"test_declaring\.py:\d+: the app's name 5 must begin"),  # type: ignore[arg-type]
    ],
)
def test_a_pipeline_is_refused_for_an_option_of_a_wrong_type_too(declare: Callable[[], Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        declare()


def test_a_lambda_and_a_class_are_refused() -> None:
    with pytest.raises(DeclarationError, match=r"test_declaring.py:\d+: a lambda has no name"):
        App("shop").task(lambda: 1)
    with pytest.raises(DeclarationError, match="is not a function"):
        App("shop").task(Order)


def test_two_tasks_of_one_name_are_refused_and_both_places_named() -> None:
    app = App("shop")
    app.task(name="same")(lambda_free := named("one"))
    with pytest.raises(DeclarationError) as refused:
        app.task(name="same")(endless_free := named("two"))
    assert "shop.same is declared already" in str(refused.value)
    assert str(refused.value).count(Path(__file__).name) == 2
    assert lambda_free is not endless_free


def named(name: str) -> Callable[[], str]:
    def function() -> str:
        return name

    return function


@pytest.mark.parametrize("name", ["", "Shop", "shop.eu", "a" * 64])
def test_an_app_has_a_name_that_a_pipeline_may_begin_with(name: str) -> None:
    with pytest.raises(DeclarationError, match=r"test_declaring.py:\d+: the app's name .* small letter"):
        App(name)


def test_a_step_of_a_task_with_a_long_name_is_refused_where_it_is_declared() -> None:
    app = App("a" * 40)
    with pytest.raises(DeclarationError, match=r"test_declaring.py:\d+: pipeline name"):
        app.task(name="b" * 40)(named("x"))


def test_a_wrong_value_of_a_model_is_an_error_and_no_warning_of_pydantic(recwarn: pytest.WarningsRecorder) -> None:
    app = App("shop")

    @app.task
    def send(order: Order) -> int:
        return order.id

    wrong = Order(id=4)
    wrong.id = "x"  # type: ignore[assignment]  # that is the test
    with pytest.raises(InvalidArguments):
        send.local(wrong)
    assert [str(warning.message) for warning in recwarn] == []


def test_an_argument_that_does_not_fit_is_refused_with_its_path() -> None:
    app = App("shop")

    @app.task
    def send(order: Order, at: datetime, *, price: Decimal = Decimal(1)) -> str:
        return f"{order.id} {at:%Y} {price}"

    assert send.local(Order(id=4), datetime(2026, 1, 1, tzinfo=UTC), price=Decimal("2.50")) == "4 2026 2.50"
    call: Callable[[], object]
    for call, path in (
        (lambda: send.local(Order.model_construct(id=1, email=""), datetime(2026, 1, 1, tzinfo=UTC)), "/order/email"),
        (lambda: send.local({"id": "x"}, datetime(2026, 1, 1, tzinfo=UTC)), "/order/id"),  # type: ignore[arg-type]  # the test
        (lambda: send.local(Order(id=1), "then"), "/at"),  # type: ignore[arg-type]  # that is the test
        (lambda: send.local(Order(id=1)), ""),  # type: ignore[call-arg]  # that is the test
    ):
        with pytest.raises(InvalidArguments) as refused:
            call()
        assert refused.value.path == path


class Size(BaseModel):
    n: int
    unit: str = "cm"


def test_the_default_of_a_model_is_that_of_the_parameter() -> None:
    app = App("a")

    @app.task
    def measure(size: Size = Size(n=5, unit="mm")) -> str:  # noqa: B008 - that is the test
        return f"{size.n} {size.unit}"

    @app.cron("@daily")
    def daily(size: Size = Size(n=6)) -> str:  # noqa: B008 - that is the test
        return f"{size.n} {size.unit}"

    assert measure.call().params == {"n": 5, "unit": "mm"}
    assert (measure.local(), measure.local(Size(n=1)), daily.local()) == ("5 mm", "1 cm", "6 cm")


@pytest.mark.parametrize("make", ["circular", "deep"])
def test_an_argument_that_has_no_end_is_refused(make: str) -> None:
    app = App("a")

    @app.task
    def take(value: Any) -> None: ...

    endless: list[Any] = []
    inner = endless
    for _ in range(100_000 if make == "deep" else 0):
        inner.append([])
        inner = inner[0]
    inner.append(endless if make == "circular" else 1)
    with pytest.raises(InvalidArguments):
        take.call(endless)


def test_parameters_may_have_names_of_pydantics_own() -> None:
    app = App("shop")

    @app.task
    def copy(json: int, _hidden: int, model_dump: int = 3, /) -> int:
        return json * 100 + _hidden * 10 + model_dump

    assert copy.local(1, 2) == 123
    assert copy.arguments.encoded((1, 2), {}) == {"json": 1, "_hidden": 2, "model_dump": 3}


async def test_an_async_task_runs_locally_with_and_without_a_loop() -> None:
    app = App("shop")

    @app.task
    async def double(n: int) -> int:
        current().progress(50, "half")
        return n * 2

    assert await double.alocal(4) == 8
    with pytest.raises(NotInTask):
        await double(4)


def test_a_local_run_has_a_current_attempt_and_its_own_directory() -> None:
    app = App("shop")
    seen: list[Path] = []

    @app.task
    def write() -> str:
        attempt = current()
        (attempt.directory / "x").write_text("1")
        seen.append(attempt.directory)
        return f"{attempt.task} {attempt.number} {attempt.state}"

    assert write.local() == "shop.write 1 None"
    assert not seen[0].exists()
    with pytest.raises(NotInTask):
        current()


def test_a_local_run_of_an_isolated_task_knows_what_it_knows_in_a_worker() -> None:
    """It knew its run and tenant, which the sandbox does not get: a test passed, and each run failed."""
    app = App("shop")
    seen: list[Path] = []

    @app.task(isolated=True)
    def measure(text: str) -> int:
        for member in ("run_id", "tenant", "number"):
            with pytest.raises(NotInTask, match=f"does not know its {member}"):
                getattr(current(), member)
        work = current().attempt
        assert isinstance(work, Work)
        assert (work.pipeline, current().state, current().emit("tok")) == ("shop.measure", None, True)
        current().log.info("measuring")
        current().progress(50)
        current().checkpoint()
        (current().directory / "x").write_text(text)
        seen.append(current().directory)
        return len(text)

    assert measure.local("four") == 4
    assert not seen[0].exists()


@pytest.mark.parametrize(
    ("options", "refusals"),
    [
        ({}, [TypeError, ValueError, TypeError]),
        ({"process": True}, [None, ValueError, TypeError]),  # its process sends an object as text
        ({"isolated": True}, [ValueError, ValueError, TypeError]),
    ],
    ids=["", "process", "isolated"],
)
def test_a_local_run_emits_what_one_in_a_worker_may(options: Any, refusals: list[type[Exception] | None]) -> None:
    def emits() -> None:
        for chunk, refusal in zip([object(), {"a": "\0"}, 2**80], refusals, strict=True):
            if refusal is None:
                assert current().emit(chunk) is True
                continue
            with pytest.raises(refusal):
                current().emit(chunk)
        for chunk in ("a\0b", {"a": [1, None]}, "\\u0000"):
            assert current().emit(chunk) is True

    emits.__qualname__ = "emits"
    App("shop").task(**options)(emits).local()


def test_a_local_run_keeps_its_chunks_as_a_stream_would() -> None:
    attempt = LocalAttempt("acme")
    for chunk in ("a\0b", (1, UUID(int=7)), None):
        assert attempt.emit(chunk)
    assert attempt.chunks == ["ab", [1, str(UUID(int=7))], None]


def test_a_result_that_is_not_what_the_function_promises_is_refused() -> None:
    app = App("shop")

    @app.task
    def wrong() -> int:
        return Unknown()  # type: ignore[return-value]  # that is the test

    @app.task
    def large() -> int:
        return 2**80

    for task in (wrong, large):
        with pytest.raises(Permanent) as refused:
            task.local()
        assert refused.value.code == "result_not_serialisable"


def test_a_source_may_name_an_app_and_need_not_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "an_app_here.py").write_text(
        "from leasehold import App\napp = App('here')\n@app.task\ndef hello(name: str) -> str: return name\n"
    )
    for source in ("an_app_here:app", "an_app_here"):
        assert "here.hello" in Pipelines.from_source(source)


def test_declaring_a_task_is_quick_and_loads_no_driver_broker_or_web_framework() -> None:
    """What `import leasehold` may cost is measured by scripts/bench; here is what it may load."""
    heavy = {
        "asyncpg",
        "aiormq",
        "fastapi",
        "PIL",
        "onnx",
        "sqlalchemy",
        "structlog",
        "aiobotocore",
        "jsonschema_rs",
        "pydantic_settings",
    }
    code = (
        "import sys\nfrom leasehold import App, Retry, current\napp = App('shop')\n"
        "@app.task\ndef add(a: int, b: int) -> int: return a + b\n"
        f"assert add.local(1, 2) == 3\nprint(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_retry_that_makes_no_sense_is_refused() -> None:
    for terms in ({"times": -1}, {"times": 1001}, {"factor": 0.5}, {"factor": 1e9}, {"delay": timedelta(seconds=-1)}):
        with pytest.raises(DeclarationError):
            Retry(**terms)
    assert Retry(times=0).ladder == (timedelta(seconds=2),)
    assert Retry(times=50, longest=timedelta(seconds=9)).ladder == tuple(timedelta(seconds=s) for s in (2, 8, 9))
