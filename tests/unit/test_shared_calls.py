"""Random workflows whose branches share calls and gathers, on a journal in memory: whatever ends first and wherever a
replay begins, each call is begun once, or the run is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.errors import Permanent
from leasehold.transitions.workflows.reading import Entry, Journal, StoredSignal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.driver import Driver
from leasehold.workflows.pending import Gather, Pending, RunCall

PROGRAMS = 400
SCHEDULES = 4
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
#: A branch awaits a shared call or gather (a number), a call of its own, or a gather of such things and branches.
Program = Sequence[tuple[str, Any]]


@dataclass
class Task:
    is_limited: bool = False
    step_name = "own"
    is_workflow = False
    handler = "shop.run"

    def encode(self, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def new_run(self, *_: Any) -> Any:
        raise NotImplementedError

    def new_step(self) -> dict[str, Any]:
        return {}

    def decode_result(self, value: Any) -> Any:
        return value


def program_of(rng: random.Random, depth: int = 0) -> Program:
    return [_awaited(rng, depth) for _ in range(rng.randint(1, 3))]


def _awaited(rng: random.Random, depth: int) -> tuple[str, Any]:
    kinds = ["call", "call", "gather", "own"] + ["gather of"] * 3 * (depth < 3)
    kind = rng.choice(kinds)
    if kind != "gather of":
        return kind, rng.randrange(2)
    elements = [
        ("branch", program_of(rng, depth + 1)) if rng.random() < 0.6 else _awaited(rng, depth + 1)
        for _ in range(rng.randint(1, 3))
    ]
    return kind, elements


def workflow_of(program: Program) -> Callable[[Driver], Coroutine[Any, Any, None]]:
    async def workflow(_: Driver) -> None:
        calls: list[Pending[Any]] = [RunCall(Task(is_limited=number == 1), {}, f"call {number}") for number in range(2)]
        parts: list[Pending[Any]] = [RunCall(Task(is_limited=number == 1), {}, f"part {number}") for number in range(2)]
        gathers = [Gather((part,), return_exceptions=False) for part in parts]

        def pending(kind: str, what: Any) -> Pending[Any]:
            match kind:
                case "call":
                    return calls[int(what)]
                case "gather":
                    return gathers[int(what)]
                case "own":
                    return RunCall(Task(is_limited=what == 1), {}, None)
            return Gather(tuple(element(*one) for one in what), return_exceptions=False)

        def element(kind: str, what: Any) -> Pending[Any] | Coroutine[Any, Any, None]:
            return branch(what) if kind == "branch" else pending(kind, what)

        async def branch(program: Program) -> None:
            for kind, what in program:
                await pending(kind, what)

        await branch(program)

    return workflow


@dataclass
class Rows:
    """The journal: what each place calls (kind and name), and whether it has ended."""

    rows: dict[tuple[str, int], tuple[str, str, bool]] = field(default_factory=dict)

    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        entries = [
            Entry(
                branch, number, kind, name, state="open", value={"value": 1} if ended else None, child=uuid4(),
                status=None if kind == "start" else "succeeded" if ended else "running", code=None, message=None,
                seconds=None, at=BEGAN,
            )
            for (branch, number), (kind, name, ended) in self.rows.items()
            if places is None or (branch, number) in places
        ]  # fmt: skip
        return Journal(news=0, started_at=BEGAN, version=1, entries=entries, signals=[], read_at=BEGAN)

    async def signal(self, name: str, after: int) -> StoredSignal | None:
        raise NotImplementedError

    def add(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.state != "open":  # the record of an end
                continue
            assert (call.branch, call.number) not in self.rows
            self.rows[call.branch, call.number] = call.kind, call.name, False
        names = [name for kind, name, _ in self.rows.values() if kind != "result" and not name.startswith("own")]
        assert len(names) == len(set(names)), "a shared call was begun twice"

    def end(self, rng: random.Random) -> tuple[int, int]:
        """End some of the open steps and runs. Returns how many of each were open."""
        opened = {place: kind for place, (kind, _, ended) in self.rows.items() if not ended and kind != "start"}
        for place in rng.sample([*opened], rng.randint(1, len(opened))):
            self.rows[place] = *self.rows[place][:2], True
        kinds = list(opened.values())
        return kinds.count("run"), kinds.count("result")

    def cancelled(self) -> bool:
        return False

    def is_last_attempt(self) -> bool:
        raise NotImplementedError

    def check(self) -> None: ...

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        self.add(calls)
        return True

    async def start(self, call: Any, record: Call, wait: Call | None = None, *, again: bool = False) -> bool:
        assert wait is not None
        assert not again
        self.add([record, wait])
        return True

    async def call(self, function: Callable[[], Any]) -> Any:
        raise NotImplementedError

    async def fetch(self, child: UUID, output: str, *, is_run: bool) -> bytes:
        raise NotImplementedError


async def end_of(program: Program, rng: random.Random) -> str:
    """How the workflow ends when its steps end in a random order, and its coroutine is dropped at random times."""
    rows = Rows()
    driver = Driver(uuid4(), workflow_of(program), 1000)
    while True:
        try:
            outcome = await driver.advance(rows)
        except Permanent as error:
            driver.close()
            return error.code
        rows.add(driver.calls)
        driver.calls_taken()
        if outcome.ended:
            return "ended"
        steps, runs = rows.end(rng)
        if outcome.wakes_after_ends is None:
            assert runs, "the workflow would wait for ever"
        else:
            assert outcome.wakes_after_ends <= steps, "the workflow would wait for ever"
        if rng.random() < 0.5:
            driver.close()
            driver = Driver(uuid4(), workflow_of(program), 1000)


# A refused run drops a gather that it has not begun, with its coroutines.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
async def test_a_shared_call_is_begun_once_or_refused_whatever_ends_first() -> None:
    ends = []
    for seed in range(PROGRAMS):
        program = program_of(random.Random(seed))
        ends.append({await end_of(program, random.Random(f"{seed}/{nth}")) for nth in range(SCHEDULES)})
    assert {len(each) for each in ends} == {1}, "whether a run is refused depends on what ends first"
    assert set.union(*ends) == {"ended", "workflow_awaits"}
