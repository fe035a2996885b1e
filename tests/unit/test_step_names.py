"""The name of a step in labels: it is one that somebody declared."""

from __future__ import annotations

import pytest

from leasehold.domain.step_names import declared_step


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
