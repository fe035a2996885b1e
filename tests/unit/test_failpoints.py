from __future__ import annotations

from collections.abc import Iterator

import pytest

from leasehold.domain.errors import DeclarationError
from leasehold.runtime import failpoints


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_nothing_happens_unless_armed() -> None:
    for name in failpoints.POINTS:
        failpoints.reach(name)


def test_an_armed_point_acts_the_nth_time_and_once() -> None:
    failpoints.arm("after_claim:raise:2, after_hint:raise")
    failpoints.reach("after_claim")
    with pytest.raises(failpoints.FailpointReached):
        failpoints.reach("after_claim")
    failpoints.reach("after_claim")
    with pytest.raises(failpoints.FailpointReached):
        failpoints.reach("after_hint")


@pytest.mark.parametrize("spec", ["after_claim:raise:0", "after_claim:raise:²", "after_claim:raise,nothing:kill"])
def test_a_spec_with_an_error_is_refused_and_arms_nothing(spec: str) -> None:
    failpoints.arm("after_hint:raise")
    with pytest.raises(DeclarationError):
        failpoints.arm(spec)
    failpoints.reach("after_claim")
    with pytest.raises(failpoints.FailpointReached):
        failpoints.reach("after_hint")


def test_a_point_after_a_commit_has_the_name_of_what_is_committed() -> None:
    assert not failpoints.has_commit_points()
    failpoints.arm("after_claim:raise,commit.createRun:raise")
    assert failpoints.has_commit_points()
    failpoints.reach("commit.cancelRun")
    with pytest.raises(failpoints.FailpointReached):
        failpoints.reach("commit.createRun")


@pytest.mark.parametrize(
    "spec",
    [
        "commit:kill", "commit.:kill", "commit.a-b:kill",
        "nowhere:kill", "after_claim:explode", "after_claim", "after_claim:kill:x",
    ],
)  # fmt: skip
def test_a_point_or_an_act_that_does_not_exist_is_refused(spec: str) -> None:
    with pytest.raises(DeclarationError):
        failpoints.arm(spec)
