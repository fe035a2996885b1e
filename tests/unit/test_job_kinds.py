"""What a kind declares about its jobs is checked when the process starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline, SkipIf, Step
from leasehold.kinds.job_kinds import JobKind, KindOperations, SentOrder, UnknownOrders

ORDERS = UnknownOrders(
    step="order",
    intent="asked_at",
    sent=lambda _params, _note, _job_id: SentOrder("shop", None, {}),
    adopted=lambda ref, _note: {"ref": ref},
    adoptable=lambda _opened, _params: True,
)
OTHER = Pipeline("other", module="tests.unit.test_job_kinds", steps=[Step("ask")])


def buying(*steps: Step) -> JobKind:
    pipelines = {"other": OTHER, "buying": Pipeline("buying", module="tests.unit.test_job_kinds", steps=list(steps))}
    return JobKind("buying", pipelines, operations=KindOperations(ORDERS))


@pytest.mark.parametrize(
    "steps",
    [
        [Step("order")],
        [Step("ask"), Step("order", needs=("ask",))],
        [Step("order"), Step("beside")],
        [Step("order"), Step("look", needs=("order",), skip_if=SkipIf("/quick"))],
        [Step("ask")],
    ],
)
def test_a_kind_whose_adopted_order_no_step_would_go_on_with_is_refused(steps: Sequence[Step]) -> None:
    """The job would stay pending for ever, and without the step there is no order to adopt."""
    with pytest.raises(DeclarationError, match=r"kind buying: .* 'order'"):
        buying(*steps)


def test_a_kind_goes_on_with_an_adopted_order_in_each_pipeline_that_orders() -> None:
    kind = buying(Step("order"), Step("look", needs=("order",)))
    assert kind.operations.unknown_orders is ORDERS
