"""What a model of code accepts and writes, its JSON Schema does not refuse; and what it is not stays refused."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model, field_serializer, model_serializer

from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates, TemplateVersion


def template_of(model: type[BaseModel]) -> TemplateVersion:
    pipelines = Pipelines(Pipeline("p", module="", params=model, steps=[Step("s")]))
    (template,) = Templates(pipelines).all_declared_in_code()
    return template


@pytest.mark.parametrize(
    ("of_type", "value"),
    [
        (datetime, datetime(2026, 11, 28, 10, 30)),  # noqa: DTZ001 - without a zone: it is the test
        (datetime, datetime(2026, 11, 28, 10, 30, 0, 7, UTC)),
        (time, time(10, 30)),
        (time, time(10, 30, tzinfo=UTC)),
        (timedelta, timedelta(seconds=0.5)),
        (timedelta, -timedelta(days=1, hours=2)),
        (timedelta, timedelta(days=400)),
        (timedelta, timedelta(0)),
    ],
)
def test_what_python_submits_is_accepted_over_http_too(of_type: Any, value: Any) -> None:
    model = create_model("M", x=(of_type, ...))
    payload = model(x=value).model_dump(mode="json")
    assert template_of(model).params_by_code(payload) == payload


@pytest.mark.parametrize(
    ("of_type", "value"),
    [
        (datetime, "2026-13-28T10:30:00"),
        (datetime, "1764325800"),  # pydantic would read these as seconds since 1970
        (datetime, 1764325800),
        (time, "25:00:00"),
        (time, "37800"),
        (timedelta, "5"),
        (timedelta, "P"),
        (timedelta, "PT"),
        (timedelta, "P1DT"),
        (timedelta, "x PT5S"),
        (timedelta, 5),
    ],
)
def test_what_is_no_time_is_refused_with_its_place(of_type: Any, value: Any) -> None:
    with pytest.raises(Invalid, match="does not fit at /x: ") as refused:
        template_of(create_model("M", x=(of_type, ...))).params_by_code({"x": value})
    assert refused.value.code == "invalid_payload"


class Coupon(BaseModel):
    """Its patterns are Python's. JSON Schema's engine has the third one only."""

    model_config = ConfigDict(regex_engine="python-re")

    code: str = Field(pattern=r"^(?!free)[a-z]+\Z")
    pattern: list[Annotated[str, Field(pattern=r"^(.)\1$")]] = []
    left: dict[Annotated[str, Field(pattern=r"^(?=a)\w+$")], int] = {}
    plain: str = Field("a", pattern="^[a-z]$")


def test_a_pattern_of_python_is_checked_by_the_model_and_stops_no_run() -> None:
    template = template_of(Coupon)
    payload = {"code": "spring", "pattern": ["aa"], "left": {"ab": 1}, "plain": "b"}
    assert template.params_by_code(payload) == payload


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"code": "freebie"}, "/code"),
        ({"code": 7}, "/code"),
        ({"pattern": ["ab"]}, "/pattern/0"),
        ({"pattern": ["aa", 7]}, "/pattern/1"),
        ({"left": {"ab": "1"}}, "/left/ab"),
        ({"left": {"b": 1}}, "/left/b"),
        ({"plain": "B"}, "/plain"),
    ],
)
def test_what_does_not_fit_a_pattern_of_python_is_refused_with_its_place(wrong: dict[str, Any], place: str) -> None:
    with pytest.raises(Invalid, match=f"does not fit at {place}"):
        template_of(Coupon).params_by_code({"code": "spring"} | wrong)


class Renamed(BaseModel):
    number: int = Field(validation_alias="n", serialization_alias="m")


class Spelled(BaseModel):
    n: int

    @model_serializer
    def spelled(self) -> str:
        return "one"


class Unbounded(BaseModel):
    n: int
    at_most: float = float("inf")


class Refusing(BaseModel):
    n: int

    @field_serializer("n")
    def refused(self, n: int) -> str:
        raise ValueError(f"no word for {n}")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Renamed, "at /n: Field required"),
        (Spelled, "Input should be an object"),
        (Unbounded, "at /at_most: JSON has neither NaN nor infinity"),
        (Refusing, "no word for 1"),
    ],
)
def test_a_payload_that_no_worker_could_read_as_its_model_writes_it_is_refused(
    model: type[BaseModel], words: str
) -> None:
    """Its run was accepted, and failed with `bad_params` when a worker had it."""
    with pytest.raises(Invalid, match=words) as refused:
        template_of(model).params_by_code({"n": 1})
    assert refused.value.code == "invalid_payload"
