"""The name of a step in labels: it is one that somebody declared."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from leasehold.api.jobs.following import _OfStep
from leasehold.api.jobs.schemas import RetryRequest
from leasehold.domain.step_names import declared_step
from leasehold.domain.workflow_names import MAX_NAME


@pytest.mark.parametrize(
    ("step", "handler", "label"),
    [
        ("resize", None, "resize"),
        ("small", "media.resize", "small"),  # a step of a template has the name that the template gives it
        ("piece.17", "scans.piece", "piece"),
        ("small.piece.17", "scans.piece", "piece"),
        ("charge#1", "shop.charge.charge", "charge"),
        ("1.0/2.13/order 4711#2", "shop.charge.charge", "charge"),
    ],
)
def test_a_label_has_the_declared_name_of_a_step(step: str, handler: str | None, label: str) -> None:
    assert declared_step(step, handler) == label


@pytest.mark.parametrize("name", [f"{'12.34/' * 50}{'x' * MAX_NAME}#100", f"{'a' * 63}.{'b' * 63}.999"])
def test_a_request_may_name_a_part_and_a_step_in_gathers_inside_each_other(name: str) -> None:
    assert RetryRequest(from_step=name).from_step == name
    assert TypeAdapter[str | None](_OfStep).validate_python(name) == name
