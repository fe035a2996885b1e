"""Mutants are noticed: what the judge says of changes whose verdict is known, and of a sample by the commit's hash."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

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

SAMPLE = 30
SECONDS = 30.0


@pytest.fixture(scope="module")
def addresses(postgres: Databases, migrated_template: str, rabbitmq: Management, s3_server: Bucket) -> dict[str, str]:
    """The variables that name the servers of these tests."""
    return {
        "LEASEHOLD_TEST_BACKEND": "auto",
        "LEASEHOLD_TEST_DATABASE_URL": postgres.url,
        "LEASEHOLD_TEST_AMQP_URL": rabbitmq.amqp_url,
        "LEASEHOLD_TEST_AMQP_MANAGEMENT_URL": rabbitmq.url,
        "LEASEHOLD_TEST_S3_ENDPOINT": s3_server.endpoint,
        "LEASEHOLD_TEST_S3_ACCESS_KEY": s3_server.access_key,
        "LEASEHOLD_TEST_S3_SECRET_KEY": s3_server.secret_key,
        TEMPLATE: migrated_template,
    }


@pytest.fixture(scope="module")
def known() -> list[Mutant]:
    """The mutants whose test is known, in an order by the commit's hash."""
    killers = state.killers()
    known = [one for one in mutants() if one.id in killers and judges(killers[one.id]) and one.id not in equivalents()]
    random.Random(seed_of_this_commit()).shuffle(known)
    return known


@pytest.fixture(scope="module")
async def warm(addresses: dict[str, str], known: list[Mutant]) -> AsyncIterator[Judge]:
    """A judge that has loaded the tests."""
    killers = state.killers()
    files = {killers[mutant.id].partition("::")[0] for mutant in known[: 2 * SAMPLE]}
    own = {test.partition("::")[0] for test in (BACKOFF, FENCED)}
    async with judge(addresses, sorted(files | own)) as opened:
        yield opened


@pytest.fixture(scope="module")
def here(warm: Judge) -> Judge:
    """A judge whose every fork loads the changed file."""
    return warm.cold()


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
@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_mutant_is_judged_as_what_it_is(
    here: Judge, warm: Judge, path: str, before: str, after: str, test: str, verdict: str, *, is_warm: bool
) -> None:
    judge = warm if is_warm else here
    limit = 2.0 if verdict == "timed out" else 4 * SECONDS
    judgement = await judge.judge(by_hand(path, before, after), Chosen([test], [limit], 1))
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


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_test_that_fails_once_for_another_reason_has_noticed_nothing(
    here: Judge, warm: Judge, *, is_warm: bool
) -> None:
    judge = warm if is_warm else here
    fails_once = f"""    from pathlib import Path
    failed = Path("failed-once-{is_warm}")
    if not failed.exists():
        failed.touch()
        return -1.0
    return longest *"""
    mutant = by_hand("leasehold/domain/backoff.py", "    return longest *", fails_once)
    judgement = await judge.judge_surely(mutant, Chosen([BACKOFF], [SECONDS], 1))
    assert judgement.verdict == "survived"
    assert BACKOFF in judgement.why
    always = by_hand("leasehold/domain/backoff.py", "return longest *", "return longest * 3 *")
    assert (await judge.judge_surely(always, Chosen([BACKOFF], [SECONDS], 1))).verdict == "killed"


async def test_after_a_test_that_fails_once_for_another_reason_the_others_judge(here: Judge) -> None:
    fails_once = """    from pathlib import Path
    failed = Path("failed-once-before-others")
    if not failed.exists():
        failed.touch()
        return -1.0
    if len(ladder) == 1:
        return longest
    return longest *"""
    mutant = by_hand("leasehold/domain/backoff.py", "    return longest *", fails_once)
    jitter = "tests/unit/test_backoff.py::test_failures_that_came_together_do_not_come_back_together"
    judgement = await here.judge_surely(mutant, Chosen([BACKOFF, jitter], [SECONDS, SECONDS], 2))
    assert (judgement.verdict, judgement.by) == ("killed", jitter)


async def test_a_test_that_fails_in_the_loaded_process_without_a_mutant_judges_elsewhere() -> None:
    """Two processes that say the same of each mutant: in the loaded one each test fails, in the other none does."""
    fails: dict[str, object] = {"ran": 1, "by": BACKOFF, "why": "always", "code": 1, "seconds": 0.1}
    passes: dict[str, object] = {"ran": 1, "code": 0, "seconds": 0.1}
    async with AsyncExitStack() as opened:
        nursery, warm = [await opened.enter_async_context(process_that_says(one)) for one in (passes, fails)]
        mutant = by_hand("leasehold/domain/backoff.py", "return longest *", "return longest * 3 *")
        judgement = await Judge(nursery, warm, "", {}).judge_surely(mutant, Chosen([BACKOFF], [SECONDS], 1))
    assert judgement.verdict == "survived"


@asynccontextmanager
async def process_that_says(answer: dict[str, object]) -> AsyncIterator[asyncio.subprocess.Process]:
    program = f"import sys\nfor line in sys.stdin:\n    print({json.dumps(answer)!r}, flush=True)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    yield process
    process.kill()
    await process.wait()


async def test_a_sample_by_the_hash_of_the_commit_is_noticed_by_the_tests_that_noticed_it_before(
    warm: Judge, known: list[Mutant]
) -> None:
    killers = state.killers()
    noticed, missed = 0, []
    while noticed < SAMPLE:
        mutant = known.pop(0)
        for _ in range(3):  # a busy machine may make a test miss its moment: who notices it then has noticed it
            judgement = await warm.judge(mutant, Chosen([killers[mutant.id]], [SECONDS], 1))
            if judgement.verdict != "survived":
                break
        if judgement.verdict == "survived":
            missed.append(mutant.title)
        noticed += judgement.verdict in ("killed", "timed out")  # a test that has another name now judges nothing
    assert missed == []
