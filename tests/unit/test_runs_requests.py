"""What the requests about webhooks and of external workers may hold, at both sides of each bound."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from leasehold.api.runs import external, webhooks

HELD: dict[str, Any] = {"worker_id": "w", "epoch": 1}
CLAIM: dict[str, Any] = {"worker_id": "w", "queues": ["q"]}
HOOK: dict[str, Any] = {"url": "https://a.example"}
NAN = float("nan")
FILE = {"name": "a", "sha256": "0" * 64}


def files(count: int) -> list[dict[str, str]]:
    return [{"name": f"f{number}", "sha256": "0" * 64} for number in range(count)]


#: Model, its least body, a member, what it may be, and what it may not be.
BOUNDS: list[tuple[type[BaseModel], dict[str, Any], str, list[Any], list[Any]]] = [
    (external.ClaimRequest, CLAIM, "worker_id", ["w", "w" * 100], ["", "w" * 101]),
    (external.ClaimRequest, CLAIM, "queues", [["q"], ["q"] * 50], [[], ["q"] * 51]),
    (external.ClaimRequest, CLAIM, "limit", [1, 100], [0, 101]),
    (external.ClaimRequest, CLAIM, "wait", [0, 30], [-0.5, 30.5, NAN]),
    (external.ClaimRequest, CLAIM, "lease_seconds", [5, 3600], [4.5, 3600.5]),
    (external.Beat, HELD, "lease_seconds", [5, 3600], [4.5, 3600.5]),
    (external.ProgressReport, HELD | {"percent": 50}, "percent", [0, 100], [-0.5, 100.5, NAN]),
    (external.Result, HELD, "files", [[], files(1000), [FILE, FILE]],
     [files(1001), [FILE, FILE | {"sha256": "1" * 64}]]),
    (external.Failed, HELD, "message", ["", "x" * 2000], ["x" * 2001]),
    (webhooks.NewWebhook, HOOK, "url", ["x" * 2000], ["x" * 2001]),
    (webhooks.NewWebhook, HOOK, "events", [["job.failed"] * 8], [[], ["job.failed"] * 9]),
    (webhooks.Changes, HOOK, "url", ["x" * 2000], ["x" * 2001]),
    (webhooks.Changes, HOOK, "events", [["job.failed"] * 8], [[], ["job.failed"] * 9]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "body", "member", "good", "bad"),
    BOUNDS,
    ids=[f"{model.__name__}.{name}" for model, _, name, *_ in BOUNDS],
)
def test_a_member_may_be_as_large_as_its_bound_and_no_larger(
    model: type[BaseModel], body: dict[str, Any], member: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        model.model_validate(body | {member: value})
    for value in bad:
        with pytest.raises(ValidationError):
            model.model_validate(body | {member: value})


def test_what_a_worker_leaves_out_has_the_documented_value() -> None:
    claim = external.ClaimRequest.model_validate(CLAIM)
    assert (claim.limit, claim.wait, claim.lease_seconds) == (1, 0, 60)
    assert external.Beat.model_validate(HELD).lease_seconds == 60


def test_a_webhook_may_ask_for_each_end_of_a_run_and_of_a_job_and_hears_of_all_runs_if_it_names_none() -> None:
    ends = ("succeeded", "failed", "cancelled", "expired")
    every = [f"{kind}.{end}" for kind in ("run", "job") for end in ends]
    assert sorted(get_args(webhooks.Event)) == sorted(every)
    for model in (webhooks.NewWebhook, webhooks.Changes):
        assert model.model_validate(HOOK | {"events": every}).events == every
    assert webhooks.NewWebhook.model_validate(HOOK).events == every[:4]


def test_the_document_says_that_one_change_of_a_webhook_is_enough_and_that_true_enables() -> None:
    schema = webhooks.Changes.model_json_schema()
    assert (schema["minProperties"], schema["properties"]["enabled"]["default"]) == (1, True)


def test_the_routes_of_webhooks_document_what_they_do() -> None:
    routes: dict[str, Any] = {route.operation_id: route for route in webhooks.router.routes}  # type: ignore[attr-defined]
    assert f"newest {webhooks._MAX_SEARCHED:,} deliveries" in routes["listDeliveries"].description
    (limit,) = [param for param in routes["listDeliveries"].dependant.query_params if param.name == "limit"]
    assert limit.default == 50
    assert {routes[name].status_code for name in ("testWebhook", "redeliverWebhook")} == {202}
