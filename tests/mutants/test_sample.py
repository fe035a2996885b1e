"""Mutants are noticed: what the judge says of changes whose verdict is known, and of a sample by the commit's hash."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from leasehold.embedded.management import Management
from mutants import state
from mutants.choosing import Chosen, judges
from mutants.equivalents import equivalents
from mutants.judge import Judge, judge
from mutants.mutant import Change, Edit, Mutant
from mutants.places import ROOT, mutants
from mutants.servers import TEMPLATE
from tests.support.bucket import Bucket
from tests.support.databases import Databases
from tests.support.seeds import seed_of_this_commit

SAMPLE = 10
SECONDS = 30.0


@pytest.fixture(scope="module")
async def here(
    postgres: Databases, migrated_template: str, rabbitmq: Management, s3_server: Bucket
) -> AsyncIterator[Judge]:
    """A place beside the servers of these tests."""
    there = {
        "LEASEHOLD_TEST_BACKEND": "auto",
        "LEASEHOLD_TEST_DATABASE_URL": postgres.url,
        "LEASEHOLD_TEST_AMQP_URL": rabbitmq.amqp_url,
        "LEASEHOLD_TEST_AMQP_MANAGEMENT_URL": rabbitmq.url,
        "LEASEHOLD_TEST_S3_ENDPOINT": s3_server.endpoint,
        "LEASEHOLD_TEST_S3_ACCESS_KEY": s3_server.access_key,
        "LEASEHOLD_TEST_S3_SECRET_KEY": s3_server.secret_key,
        TEMPLATE: migrated_template,
    }
    async with judge(there) as opened:
        yield opened


def by_hand(path: str, before: str, after: str) -> Mutant:
    start = (ROOT / path).read_text().index(before)
    return Mutant("by hand", path, "", (1, 1), Change("", "", (Edit(start, start + len(before), after),)))


BACKOFF = "tests/unit/test_backoff.py::test_delays_climb_the_ladder_and_stay_on_its_top"
FENCED = (
    "tests/transitions/test_fencing.py::test_a_settlement_with_a_wrong_lease_changes_nothing[release-another owner]"
)


@pytest.mark.parametrize(
    ("path", "before", "after", "test", "verdict"),
    [
        ("leasehold/domain/backoff.py", '"""', '"""', BACKOFF, "survived"),
        ("leasehold/domain/backoff.py", "import random", "import random\nassert False", BACKOFF, "killed"),
        ("leasehold/domain/backoff.py", "import random", "import random\nimport", BACKOFF, "invalid"),
        (
            "leasehold/domain/backoff.py",
            "    return longest",
            "    while True: pass\n    return longest",
            BACKOFF,
            "timed out",
        ),
        ("leasehold/transitions/settlements/guard.py", "t.lease_owner = a.owner AND ", "", FENCED, "killed"),
        (
            "leasehold/transitions/settlements/guard.py",
            "t.lease_owner = a.owner",
            "t.nobody = a.owner",
            FENCED,
            "invalid",
        ),
    ],
)
async def test_a_mutant_is_judged_as_what_it_is(
    here: Judge, path: str, before: str, after: str, test: str, verdict: str
) -> None:
    limit = 2.0 if verdict == "timed out" else 4 * SECONDS
    judgement = await here.judge(by_hand(path, before, after), Chosen([test], [limit], 1))
    assert judgement.verdict == verdict, judgement


async def test_a_test_that_does_not_run_among_the_first_notices_a_mutant_too(here: Judge) -> None:
    """The first tests run alone. Each runs once, and the last one fails."""
    addresses = "tests/unit/test_addresses.py::test_the_ipv4_address_inside_decides"
    inside = ("1.1.1.1", "10.0.0.1", "127.0.0.1", "0.0.0.0")
    others = [f"{addresses}[{address}-{prefix}]" for address in inside for prefix in ("::ffff:", "64:ff9b::")]
    mutant = by_hand("leasehold/domain/backoff.py", "return longest *", "return longest * 3 *")
    judgement = await here.judge(mutant, Chosen([*others, BACKOFF], [SECONDS] * (len(others) + 1), 99))
    assert (judgement.verdict, judgement.by, judgement.ran) == ("killed", BACKOFF, len(others) + 1)
    judgement = await here.judge(mutant, Chosen(others, [SECONDS] * len(others), 99))
    assert (judgement.verdict, judgement.ran) == ("survived", len(others))


async def test_a_test_that_fails_once_for_another_reason_has_noticed_nothing(here: Judge) -> None:
    fails_once = """    from pathlib import Path
    failed = Path("failed-once")
    if not failed.exists():
        failed.touch()
        return -1.0
    return longest *"""
    mutant = by_hand("leasehold/domain/backoff.py", "    return longest *", fails_once)
    judgement = await here.judge_surely(mutant, Chosen([BACKOFF], [SECONDS], 1))
    assert judgement.verdict == "survived"
    assert BACKOFF in judgement.why
    always = by_hand("leasehold/domain/backoff.py", "return longest *", "return longest * 3 *")
    assert (await here.judge_surely(always, Chosen([BACKOFF], [SECONDS], 1))).verdict == "killed"


async def test_a_sample_by_the_hash_of_the_commit_is_noticed_by_the_tests_that_noticed_it_before(here: Judge) -> None:
    killers = state.killers()
    known = [one for one in mutants() if one.id in killers and judges(killers[one.id]) and one.id not in equivalents()]
    random.Random(seed_of_this_commit()).shuffle(known)
    noticed, missed = 0, []
    while noticed < SAMPLE:
        mutant = known.pop()
        for _ in range(3):  # a busy machine may make a test miss its moment: who notices it then has noticed it
            judgement = await here.judge(mutant, Chosen([killers[mutant.id]], [SECONDS], 1))
            if judgement.verdict != "survived":
                break
        if judgement.verdict == "survived":
            missed.append(mutant.title)
        noticed += judgement.verdict in ("killed", "timed out")  # a test that has another name now judges nothing
    assert missed == []
