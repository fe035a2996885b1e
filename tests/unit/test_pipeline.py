"""A wrong declaration is refused at start, not at three in the morning."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

from leasehold import App, Kind
from leasehold.domain.errors import DeclarationError, Permanent
from leasehold.domain.pipeline import Pipeline, SkipIf, Step
from leasehold.domain.registry import Pipelines
from leasehold.worker.attempts.inputs import Source, _refuse_equal_names

WRONG: dict[str, Any] = {
    "no steps": lambda: Pipeline("p", module="m", steps=[]),
    "a step twice": lambda: Pipeline("p", module="m", steps=[Step("a"), Step("a")]),
    "an unknown need": lambda: Pipeline("p", module="m", steps=[Step("a", needs=("b",))]),
    "a cycle": lambda: Pipeline("p", module="m", steps=[Step("a", needs=("b",)), Step("b", needs=("a",))]),
    "reading what it does not need": lambda: Pipeline("p", module="m", steps=[Step("a"), Step("b", reads=("a",))]),
    "reading an undeclared input": lambda: Pipeline("p", module="m", steps=[Step("a", reads=("original",))]),
    "two steps that write the same output": lambda: Pipeline(
        "p", module="m", steps=[Step("a", writes="x"), Step("b", writes="x")]
    ),
    "reading an input and an output of one name": lambda: Pipeline(
        "p", module="m", inputs=("x",), steps=[Step("a", writes="x"), Step("b", needs=("a",), reads=("x", "a"))]
    ),
    "a bad name": lambda: Pipeline("P!", module="m", steps=[Step("a")]),
    "a bad step name": lambda: Step("a b"),
    "a bad queue": lambda: Step("a", queue="Queue.1"),
    "a name and a line's end": lambda: Pipeline("p\n", module="m", steps=[Step("a")]),
    "a step's name and a line's end": lambda: Step("a\n"),
    "a queue and a line's end": lambda: Step("a", queue="q\n"),
    "a kind's name and a line's end": lambda: Kind("k\n"),
    "an app's name and a line's end": lambda: App("a\n"),
    "no attempts": lambda: Step("a", max_attempts=0),
    "no time": lambda: Step("a", timeout=timedelta(0)),
    "no ladder": lambda: Step("a", retry_ladder=()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_is_refused(wrong: str) -> None:
    with pytest.raises(DeclarationError):
        WRONG[wrong]()


@pytest.mark.parametrize(
    ("value", "equals", "skips"),
    [
        (True, True, True),
        (1, True, False),
        (1, 1.0, True),
        ([True], [True], True),
        ([1], [True], False),
        ([1, 2], [1], False),
        ({"a": [0]}, {"a": [0]}, True),
        ({"a": [0]}, {"a": [False]}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({}, [], False),
    ],
)
def test_a_step_is_skipped_for_an_equal_json_value_and_true_is_no_number(value: Any, equals: Any, skips: bool) -> None:
    assert SkipIf("/quick", equals).holds({"quick": value}) is skips


def test_steps_are_put_in_an_order_that_respects_their_needs() -> None:
    declared = [Step("c", needs=("b",)), Step("a"), Step("b", needs=("a",))]
    assert [step.name for step in Pipeline("p", module="m", steps=declared).steps] == ["a", "b", "c"]


def test_parts_may_write_the_same_output_as_another_step_because_each_has_a_prefix_of_its_own() -> None:
    steps = [Step("a", writes="x"), Step("b", part=True, writes="x"), Step("c", part=True, writes="x")]
    assert len(Pipeline("p", module="m", steps=steps).steps) == 3


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        (Source("a", "x", "1", "s"), Source("b", "y", "2", "s"), False),
        (Source("a", "x", "1", "s"), Source("b", "x", "1", "s"), False),  # equal bytes
        (Source("a", "x", "1", "s"), Source("b", "x", "1", "t"), True),
        (Source("x", "x", "1", None), Source("b", "x", "2", "s"), True),
    ],
)
def test_a_step_does_not_get_one_of_two_objects_of_the_same_name(
    first: Source, second: Source, *, is_refused: bool
) -> None:
    with pytest.raises(Permanent, match="two objects named 'x', from") if is_refused else nullcontext():
        _refuse_equal_names(Step("c"), [first, second])


def test_a_step_may_read_what_a_step_before_its_needs_wrote() -> None:
    steps = [Step("a"), Step("b", needs=("a",)), Step("c", needs=("b",), reads=("a",))]
    assert Pipeline("p", module="m", steps=steps).by_name["c"].reads == ("a",)


def test_two_pipelines_of_one_name_are_refused() -> None:
    with pytest.raises(DeclarationError, match="two pipelines"):
        Pipelines(Pipeline("p", module="m", steps=[Step("a")]), Pipeline("p", module="m", steps=[Step("a")]))


def test_a_step_without_a_handler_is_refused_by_name() -> None:
    pipelines = Pipelines(Pipeline("p", module="tests.unit.test_pipeline", steps=[Step("a"), Step("b")]))
    pipelines["p"].handles("a")(lambda: None)
    with pytest.raises(DeclarationError, match=r"\['b'\]"):
        pipelines.load_handlers("p")


def test_a_handler_for_an_unknown_step_is_refused() -> None:
    with pytest.raises(DeclarationError, match="no step"):
        Pipeline("p", module="m", steps=[Step("a")]).handles("b")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere:x", "cannot load"),
        ("leasehold.domain.registry:nothing", "cannot load"),
        ("leasehold.domain.ids:new_id", "gives a UUID, not"),
        ("", "names no module"),
        (":app", "names no module"),
        ("./shop.py:app", "names no module"),
        ("/srv/shop.py:app", "names no module"),
        (".shop:app", "names no module"),
        ("shop..tasks:app", "names no module"),
        ("leasehold.pipelines.media.pipeline:MEDIA", "gives a Kind, not"),
        ("leasehold.app.app:App", "needs arguments"),
        ("json:__name__", "gives a str, not"),
        ("json:dumps", "needs arguments"),
    ],
)
def test_a_source_that_is_no_registry_is_refused(source: str, reason: str) -> None:
    with pytest.raises(DeclarationError, match=reason):
        Pipelines.from_source(source)


def test_an_error_of_a_factory_is_not_taken_for_a_wrong_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Pipelines:
        raise TypeError("a bug of the app")

    monkeypatch.setattr("tests.unit.test_pipeline.FACTORY", broken)
    with pytest.raises(TypeError, match="a bug of the app"):
        Pipelines.from_source("tests.unit.test_pipeline:FACTORY")


def FACTORY() -> Pipelines:  # noqa: N802 - a test replaces it
    return Pipelines()


@pytest.mark.parametrize("name", ["run", "Run", "a-b", ""])
def test_a_kind_with_a_name_that_is_taken_or_wrong_is_refused(name: str) -> None:
    """`run` is the kind of all runs: another kind of this name would decide who reads them."""
    with pytest.raises(DeclarationError):
        Kind(name)


@pytest.mark.parametrize("names", [("b", "a"), ("b", "b")])
def test_a_kind_that_is_refused_adds_nothing(names: tuple[str, ...]) -> None:
    def pipeline(name: str) -> Pipeline:
        return Pipeline(name, module="m", steps=[Step("a")])

    registry = Pipelines(pipeline("a"))
    with pytest.raises(DeclarationError, match="two pipelines are named"):
        registry.add(Kind("k", pipelines=tuple(pipeline(name) for name in names)))
    assert [found.name for found in registry] == ["a"]
    assert registry.kinds == ()
    registry.add(Kind("k", pipelines=(pipeline("b"),)))
    assert "b" in registry
