from __future__ import annotations

from collections import Counter

import pytest

from chaos.catalogue import ALONE, API_POINTS, APIS, BLOWS, BROKER, BY_NAME, CATALOGUE, EVERYTHING, FAILPOINTS, STANDBY
from chaos.faults import Faults
from chaos.mutations import CAUGHT_BY, MUTATIONS
from chaos.operations import OPERATIONS, SPARED
from chaos.plan import DIRECTED, Fault, Plan, deal, make_plan, plan_of
from leasehold.api.app import make_app
from leasehold.runtime import failpoints
from leasehold.settings import Settings


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    assert make_plan(7) == make_plan(7)
    assert len({make_plan(seed).faults for seed in range(50)}) == 50


@pytest.mark.parametrize("faults", [3, 5, 8])
def test_a_plan_has_as_many_faults_as_asked_for_within_its_time(faults: int) -> None:
    plan = make_plan(3, seconds=10, faults=faults, api_kills=2)
    assert len(plan.faults) == faults + 2 * len(APIS)
    assert all(0 < fault.at < 10 for fault in plan.blows)
    assert all(fault.target in fault.kind.on for fault in plan.faults if fault.kind.on)


def test_neighbouring_seeds_deal_out_the_whole_catalogue() -> None:
    dealt = {fault.name for seed in range(100, 160) for fault in make_plan(seed).faults}
    assert dealt == set(BY_NAME) - {kind.name for kind in ALONE}


@pytest.mark.parametrize("missing", sorted(EVERYTHING))
def test_what_the_machine_cannot_do_is_not_planned(missing: str) -> None:
    names = {fault.name for seed in range(80) for fault in make_plan(seed, abilities=EVERYTHING - {missing}).faults}
    assert names == {kind.name for kind in CATALOGUE if kind.needs != missing and kind not in ALONE}


def test_what_changes_every_process_is_planned_alone() -> None:
    assert not any(make_plan(seed, faults=9).has_standby for seed in range(50))
    for kind in CATALOGUE:
        plan = plan_of(kind.name, 1)
        assert plan.has_standby == plan.has_only_failovers == (kind.needs == STANDBY)


def test_a_plan_has_one_fault_of_the_release_and_as_many_faults_as_without_this_rule() -> None:
    plans = [make_plan(seed, faults=12, failpoints=3) for seed in range(200)]
    of_release = [[fault.kind for fault in plan.blows if fault.kind.starts_release] for plan in plans]
    assert {len(kinds) for kinds in of_release} == {0, 1}
    assert {kind.name for kinds in of_release for kind in kinds} == {kind.name for kind in BLOWS if kind.starts_release}
    assert {len({fault.name for fault in plan.blows}) for plan in plans} == {9}
    hands = [deal(BLOWS, seed, 9, EVERYTHING) for seed in range(200)]
    several = [seed for seed, hand in enumerate(hands) if sum(kind.starts_release for kind in hand) > 1]
    upgraded = [seed for seed in several if any(kind.from_release for kind in hands[seed])]
    assert upgraded  # else nothing was left out
    assert [seed for seed in several if plans[seed].begins_with_release] == upgraded


def test_a_run_that_begins_with_the_release_has_no_fault_that_its_processes_do_not_know() -> None:
    plans = [make_plan(seed, faults=12, failpoints=3) for seed in range(200)]
    assert not any(fault.kind.by_signal for plan in plans if plan.begins_with_release for fault in plan.blows)
    hands = [deal(BLOWS, seed, 9, EVERYTHING) for seed, plan in enumerate(plans) if plan.begins_with_release]
    assert any(kind.by_signal for hand in hands for kind in hand)  # else nothing was left out
    by_signal = {kind.name for kind in BLOWS if kind.by_signal}
    assert by_signal <= {fault.name for plan in plans for fault in plan.blows}


def test_a_plan_without_a_broker_has_none_of_its_links_cut() -> None:
    assert all(kind.needs == BROKER for kind in CATALOGUE if kind.link == "amqp" or "broker" in kind.name)


def test_every_failpoint_of_a_plan_is_one_that_the_platform_has() -> None:
    for seed in range(40):
        plan = make_plan(seed)
        for slot in {fault.target for fault in plan.armed}:
            failpoints.arm(plan.failpoints(slot))
    failpoints.arm("")
    assert {kind.name.partition(" ")[2].partition(":")[0] for kind in FAILPOINTS} == set(failpoints.POINTS)


def test_a_worker_is_armed_with_the_plans_next_kill_and_with_what_it_survives_before() -> None:
    names = ("F9 after_claim:stop", "F2 after_claim:kill", "F5 mid_upload:kill", "F9 mid_process:stop")
    plan = Plan(0, 1.0, tuple(Fault(name, target="worker-0", nth=nth) for nth, name in enumerate(names, 1)))
    assert plan.failpoints("worker-0") == "after_claim:stop:1,mid_upload:kill:3"
    assert plan.failpoints("worker-0", {"after_claim:stop"}) == "after_claim:kill:2"
    assert plan.failpoints("worker-0", {"after_claim:stop", "after_claim:kill"}) == "mid_upload:kill:3"
    fired = {"after_claim:stop", "after_claim:kill", "mid_upload:kill"}
    assert plan.failpoints("worker-0", fired) == "mid_process:stop:4"
    assert plan.failpoints("worker-0", fired | {"mid_process:stop"}) == ""


def test_an_api_is_armed_with_all_its_kill_points_until_it_died_at_them() -> None:
    points = ("F34 commit.completeUpload:kill", "F34 commit.createUploadUrl:kill")
    plan = Plan(0, 1.0, tuple(Fault(name, target="api-0", nth=nth) for nth, name in enumerate(points, 1)))
    assert plan.failpoints("api-0") == "commit.completeUpload:kill:1,commit.createUploadUrl:kill:2"
    assert plan.failpoints("api-0", {"commit.completeUpload:kill"}) == "commit.createUploadUrl:kill:2"
    assert plan.failpoints("api-1") == ""


def test_both_apis_are_armed_with_every_kill_point_of_a_plan() -> None:
    for seed in range(20):
        kills = [fault for fault in make_plan(seed, api_kills=2).armed if fault.kind in API_POINTS]
        assert Counter(fault.target for fault in kills) == dict.fromkeys(APIS, 2)


def test_an_api_can_be_killed_after_every_operation_that_writes() -> None:
    """A new endpoint is asked for by the load and named in OPERATIONS, or has a reason in SPARED."""
    document = make_app(Settings(_env_file=None)).openapi()
    writing = {
        operation["operationId"]
        for operations in document["paths"].values()
        for method, operation in operations.items()
        if method != "get"
    }
    assert {*OPERATIONS} - {"api", "api_submissions"} | {*SPARED} == writing
    assert not {*OPERATIONS} & {*SPARED}


@pytest.mark.parametrize(
    ("name", "times"),
    [("F34 commit.createOperation:kill", 0), ("F10 drain", 2), ("F43 upgrade from the release", 1),
     ("F49 rollback to the release", 1), ("F42 an old API beside the new", 1)],
)  # fmt: skip
def test_a_plan_of_one_fault_arms_a_kill_point_or_deals_a_blow_twice_or_a_release_once(name: str, times: int) -> None:
    plan = plan_of(name, 1)
    assert [fault.name for fault in plan.blows] == [name] * times
    assert [fault.target for fault in plan.armed] == ([] if times else list(APIS))


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("F42 an old API beside the new", 45.0), ("F49 rollback to the release", 60.0), ("F26 read-only", 3.0)],
)
def test_in_a_longer_run_only_the_processes_of_the_release_stay_longer(name: str, seconds: float) -> None:
    assert {fault.seconds for fault in plan_of(name, 1, seconds=60.0).blows} == {seconds}
    assert {fault.seconds for fault in plan_of(name, 1, seconds=6.0).blows} == {BY_NAME[name].seconds}


def test_every_blow_has_somebody_who_deals_it() -> None:
    class Nobody:
        plan = make_plan(0)

    faults = Faults(Nobody())  # type: ignore[arg-type]  # only its table is looked at
    for kind in (*BLOWS, *ALONE):
        assert callable(faults.maker_of(kind.name))
    with pytest.raises(ValueError, match="empty"):
        faults.maker_of("F0 nothing")


def test_every_mutation_has_a_plan_and_an_invariant_that_must_notice_it() -> None:
    assert set(MUTATIONS) == set(DIRECTED) == set(CAUGHT_BY)
    assert len(CATALOGUE) == len(BY_NAME)
