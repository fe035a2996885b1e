"""Every verb against every state of a run, and every pair of verbs in both orders and at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import TypeAlias

import pytest

from leasehold.transitions import queues
from tests.crossings.expectations import COMES_AGAIN, SETTLES, STATES, VERBS, table
from tests.crossings.pair import Two, surprises
from tests.crossings.world import VERBS as DEEDS
from tests.crossings.world import Case, put_into

EXPECTED = table(VERBS)
#: What a verb answers (None: either), and the state that it leaves.
Outcome: TypeAlias = tuple[bool | None, str]
#: Where pairs begin: what is further on is reached by the first of them.
BASES = ("held", "pending", "running", "waiting", "stopping", "failed")


def expected(verb: str, state: str) -> Outcome:
    cell = "-" if state == "forgotten" and verb != "rerun" else EXPECTED[verb].get(state, "=")
    if cell in "-=":
        return (None if verb in SETTLES else cell == "=", state)
    return (True, cell)


Pair: TypeAlias = tuple[bool | None, bool | None, str]
Verbs: TypeAlias = tuple[str, ...]


def in_order(first: str, second: str, state: str) -> Pair:
    done, between = expected(first, state)
    done_too, after = expected(second, between)
    return done, done_too, after


def fits(seen: tuple[object, ...], wanted: tuple[object, ...]) -> bool:
    return all(want is None or got == want for got, want in zip(seen, wanted, strict=True))


def groups(state: str) -> Iterator[Verbs]:
    """Each verb that does something in the state; and all others together, for they change nothing."""
    others = tuple(verb for verb in EXPECTED if expected(verb, state)[0] is not True)
    if others:
        yield others
    for verb in EXPECTED:
        if verb not in others:
            yield (verb,)


def one_after_the_other(state: str) -> Iterator[Verbs]:
    for first in groups(state):
        for second in groups(expected(first[-1], state)[1]):
            yield first + second


def test_the_tables_name_every_verb_and_every_state() -> None:
    assert EXPECTED.keys() == DEEDS.keys()
    assert all({*row} == {*STATES} - {"forgotten"} for row in EXPECTED.values())
    assert all(cell in (*STATES, "-", "=") for row in EXPECTED.values() for cell in row.values())


@pytest.mark.parametrize("state", BASES)
def test_the_sequences_have_each_verb_before_each_other(state: str) -> None:
    found = {(verbs[i], verbs[j]) for verbs in one_after_the_other(state) for j in range(len(verbs)) for i in range(j)}
    assert found == {(one, other) for one in EXPECTED for other in EXPECTED}


async def test_a_verb_does_in_each_state_what_the_table_says(batchers: list[Two]) -> None:
    async def judge(two: Two, of: tuple[str, str]) -> object | None:
        verb, state = of
        case = Case()
        await put_into(two.first, case, state)
        assert await case.state(two.first) == state
        came = (await DEEDS[verb](two.first, case), await case.state(two.first))
        return None if fits(came, expected(verb, state)) else (verb, state, came, expected(verb, state))

    assert await surprises(batchers, [(verb, state) for verb in EXPECTED for state in STATES], judge) == []


async def test_while_a_queue_is_paused_every_verb_but_claiming_does_what_it_always_does(batchers: list[Two]) -> None:
    async def judge(two: Two, of: tuple[str, str]) -> object | None:
        verb, state = of
        case = Case()
        await put_into(two.first, case, state)
        await queues.pause(two.first, "default", "a test")
        came = (await DEEDS[verb](two.first, case), await case.state(two.first))
        await queues.resume(two.first, "default")
        wanted = (False, state) if verb == "claim" else expected(verb, state)
        return None if fits(came, wanted) else (verb, state, came, wanted)

    assert await surprises(batchers, [(verb, state) for verb in EXPECTED for state in STATES], judge) == []


@pytest.mark.parametrize("state", BASES)
async def test_verbs_one_after_the_other_do_what_each_would(batchers: list[Two], state: str) -> None:
    async def judge(two: Two, verbs: Verbs) -> object | None:
        case, now = Case(), state
        await put_into(two.first, case, state)
        for nth, verb in enumerate(verbs):
            wanted = expected(verb, now)
            done = await DEEDS[verb](two.first if nth % 2 else two.second, case)
            came = (done, await case.state(two.first))
            if not fits(came, wanted):
                return verbs[: nth + 1], came, wanted
            now = wanted[1]
        return None

    assert await surprises(batchers, one_after_the_other(state), judge) == []


@pytest.mark.parametrize("state", BASES)
async def test_two_verbs_at_once_do_what_they_would_in_one_order_or_the_other(batchers: list[Two], state: str) -> None:
    async def judge(two: Two, pair: tuple[str, str]) -> object | None:
        first, second = pair
        case = Case()
        await put_into(two.first, case, state)
        came = list(await asyncio.gather(DEEDS[first](two.first, case), DEEDS[second](two.second, case)))
        for place, verb in enumerate(pair):
            if verb in COMES_AGAIN and not came[place]:
                came[place] = await DEEDS[verb](two.first, case)
        seen = (*came, await case.state(two.first))
        other = in_order(second, first, state)
        allowed = [in_order(first, second, state), (other[1], other[0], other[2])]
        if pair == ("claim", "lose"):
            allowed.append((True, True, "pending"))  # a claim takes a lapsed lease over by itself, and is lost as well
        if first == second == "forget":
            allowed.append((True, True, "forgotten"))  # both see that it is gone
        return None if any(fits(seen, wanted) for wanted in allowed) else (pair, seen, allowed)

    pairs = [
        (first, second)
        for first, second in combinations_with_replacement(EXPECTED, 2)
        if expected(first, state)[0] or expected(second, state)[0]
    ]
    assert await surprises(batchers, pairs, judge) == []
