"""Every verb against every state of a run, and every pair of verbs in both orders and at once."""

from __future__ import annotations

import asyncio
from itertools import combinations_with_replacement

import pytest

from leasehold.database import Connection
from tests.crossings.expectations import COMES_AGAIN, SETTLES, STATES, VERBS, table
from tests.crossings.pair import Two
from tests.crossings.world import VERBS as DEEDS
from tests.crossings.world import Case, put_into
from tests.factories import Rows, assert_history

EXPECTED = table(VERBS)
#: What a verb answers (None: either), and the state that it leaves.
Outcome = tuple[bool | None, str]
#: Where pairs begin: what is further on is reached by the first of them.
BASES = ("held", "pending", "running", "waiting", "stopping", "failed")


def expected(verb: str, state: str) -> Outcome:
    cell = "-" if state == "forgotten" and verb != "rerun" else EXPECTED[verb].get(state, "=")
    if cell in "-=":
        return (None if verb in SETTLES else cell == "=", state)
    return (True, cell)


Pair = tuple[bool | None, bool | None, str]


def in_order(first: str, second: str, state: str) -> Pair:
    done, between = expected(first, state)
    done_too, after = expected(second, between)
    return done, done_too, after


def fits(seen: tuple[object, ...], wanted: tuple[object, ...]) -> bool:
    return all(want is None or got == want for got, want in zip(seen, wanted, strict=True))


async def sound(c: Connection, case: Case) -> None:
    if await case.state(c) != "forgotten":
        await assert_history(Rows(c), case.run)


def test_the_tables_name_every_verb_and_every_state() -> None:
    assert EXPECTED.keys() == DEEDS.keys()
    assert all({*row} == {*STATES} - {"forgotten"} for row in EXPECTED.values())
    assert all(cell in (*STATES, "-", "=") for row in EXPECTED.values() for cell in row.values())


@pytest.mark.parametrize("verb", EXPECTED)
async def test_a_verb_does_in_each_state_what_the_table_says(two: Two, verb: str) -> None:
    surprises = []
    for state in STATES:
        case = Case()
        await put_into(two.first, case, state)
        assert await case.state(two.first) == state
        done = await DEEDS[verb](two.first, case)
        came = (done, await case.state(two.first))
        if not fits(came, expected(verb, state)):
            surprises.append((state, came, expected(verb, state)))
        await sound(two.first, case)
    assert not surprises


@pytest.mark.parametrize("state", BASES)
async def test_two_verbs_one_after_the_other_do_what_each_would(two: Two, state: str) -> None:
    surprises = []
    for first in EXPECTED:
        for second in EXPECTED:
            case = Case()
            await put_into(two.first, case, state)
            came = (await DEEDS[first](two.first, case), await DEEDS[second](two.second, case))
            seen = (*came, await case.state(two.first))
            if not fits(seen, in_order(first, second, state)):
                surprises.append((first, second, seen, in_order(first, second, state)))
            await sound(two.first, case)
    assert not surprises


@pytest.mark.parametrize("state", BASES)
async def test_two_verbs_at_once_do_what_they_would_in_one_order_or_the_other(two: Two, state: str) -> None:
    surprises = []
    for first, second in combinations_with_replacement(EXPECTED, 2):
        if not (expected(first, state)[0] or expected(second, state)[0]):
            continue
        case = Case()
        await put_into(two.first, case, state)
        came = list(await asyncio.gather(DEEDS[first](two.first, case), DEEDS[second](two.second, case)))
        for place, verb in enumerate((first, second)):
            if verb in COMES_AGAIN and not came[place]:
                came[place] = await DEEDS[verb](two.first, case)
        seen = (*came, await case.state(two.first))
        other = in_order(second, first, state)
        allowed = [in_order(first, second, state), (other[1], other[0], other[2])]
        if (first, second) == ("claim", "lose"):
            allowed.append((True, True, "pending"))  # a claim takes a lapsed lease over by itself, and is lost as well
        if first == second == "forget":
            allowed.append((True, True, "forgotten"))  # both see that it is gone
        if not any(fits(seen, wanted) for wanted in allowed):
            surprises.append((first, second, seen, allowed))
        await sound(two.first, case)
    assert not surprises
