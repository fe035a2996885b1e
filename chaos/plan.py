"""The plan of a run: which faults, on whom, when. A function of the seed alone.

Faults are dealt from a shuffled pack, as cards are: over a few dozen neighbouring seeds each one comes up, which
drawing at random would not give.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos.operations import OPERATIONS

WORKERS = ("worker-0", "worker-1", "worker-2")
APIS = ("api-0", "api-1")
LINKS = ("postgres", "amqp", "s3")


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault of the catalogue (RELIABILITY.md section 6, whose number its name begins with).

    `seconds`: how long it lasts; 0 for a blow. `on`: whom it hits; `link`: which of its links.
    """

    name: str
    on: tuple[str, ...] = ()
    link: str = ""
    seconds: float = 0.0
    needs_broker: bool = False


def _failpoint(number: str, point: str, act: str, on: tuple[str, ...] = WORKERS) -> Kind:
    return Kind(f"{number} {point}:{act}", on, needs_broker=point == "after_publish")


FAILPOINTS = (
    _failpoint("F1", "after_hint", "kill"),
    _failpoint("F2", "after_claim", "kill"),
    _failpoint("F3", "after_download", "kill"),
    _failpoint("F4", "mid_process", "kill"),
    _failpoint("F5", "mid_upload", "kill"),
    _failpoint("F6", "after_upload", "kill"),
    _failpoint("F8", "after_commit", "kill"),
    _failpoint("F9", "after_claim", "stop"),
    _failpoint("F9", "after_download", "stop"),
    _failpoint("F9", "mid_process", "stop"),
    _failpoint("F9", "after_upload", "stop"),
    _failpoint("F9", "after_commit", "stop"),
    _failpoint("F11", "after_claim", "sleep"),
    _failpoint("F11", "mid_upload", "raise"),
    _failpoint("F34", "before_relay", "kill"),
    _failpoint("F34", "after_publish", "kill"),
)
#: After the commits of each operation that the load asks for; tests/chaos/test_plan.py compares them with the API's.
API_POINTS = tuple(_failpoint("F34", f"commit.{operation}", "kill", APIS) for operation in OPERATIONS)
BLOWS = (
    Kind("F4 kill a child", WORKERS),
    Kind("F7 cut a settlement", WORKERS, "postgres"),
    Kind("F9 hold a settlement", WORKERS, "postgres", 6.5),
    Kind("F9 hold a put", seconds=6.0),
    Kind("F10 drain, then kill", WORKERS, seconds=1.0),
    Kind("F10 drain", WORKERS),
    Kind("F11 stop a worker", WORKERS, seconds=6.5),
    Kind("F13 kill the broker", seconds=1.0, needs_broker=True),
    Kind("F14 kill the broker as it declares", needs_broker=True),
    Kind("F15 stop the broker", seconds=5.0, needs_broker=True),
    Kind("F16 the broker is away", seconds=6.0, needs_broker=True),
    Kind("F17 memory alarm", seconds=4.0, needs_broker=True),
    Kind("F17 disk alarm", seconds=4.0, needs_broker=True),
    Kind("F18 purge the queues", needs_broker=True),
    Kind("F18 delete the queues", needs_broker=True),
    Kind("F20 foreign messages", needs_broker=True),
    Kind("F21 terminate sessions"),
    Kind("F22 kill a backend"),
    Kind("F23 kill the database", seconds=0.5),
    Kind("F24 stop the database at once", seconds=0.5),
    Kind("F25 lock a job", seconds=3.0),
    Kind("F26 read-only", seconds=3.0),
    *(Kind(f"F27 slow {link}", WORKERS + APIS, link, 4.0, link == "amqp") for link in LINKS),
    *(Kind(f"F28 reset {link}", WORKERS + APIS, link, 0.0, link == "amqp") for link in LINKS),
    *(Kind(f"F29 half-open {link}", WORKERS + APIS, link, 5.0, link == "amqp") for link in LINKS),
    *(Kind(f"F30 one-way {link}", WORKERS + APIS, link, 3.0, link == "amqp") for link in LINKS),
    *(Kind(f"F31 store {word}", seconds=4.0) for word in ("error", "slow", "cut", "corrupt", "refuse", "hang")),
    Kind("F32 disk full", seconds=4.0),
    Kind("F33 a clock ahead", WORKERS + APIS, seconds=6.0),
    Kind("F33 a clock behind", WORKERS + APIS, seconds=6.0),
    Kind("F34 restart everything", seconds=0.5),
)
CATALOGUE = FAILPOINTS + API_POINTS + BLOWS
BY_NAME = {kind.name: kind for kind in CATALOGUE}


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan. `at`: seconds into the load; a failpoint is armed from the start and has none."""

    name: str
    at: float = 0.0
    target: str = ""
    seconds: float = 0.0
    nth: int = 1  # of a failpoint: the time that it is reached

    @property
    def kind(self) -> Kind:
        return BY_NAME[self.name]

    @property
    def point(self) -> str:
        """What LEASEHOLD_FAILPOINTS says for it."""
        return f"{self.name.partition(' ')[2]}:{self.nth}"


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    seconds: float
    armed: tuple[Fault, ...] = ()
    blows: tuple[Fault, ...] = ()
    workers: tuple[str, ...] = field(default=WORKERS)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self.armed + self.blows

    def failpoints(self, slot: str, generation: int, fired: Collection[str] = ()) -> str:
        """What the `generation`-th process of `slot` is armed with.

        A worker: one failpoint each, in the plan's order. An API: all of its own that have not `fired`, because nobody
        knows which operation is asked for first.
        """
        mine = [fault for fault in self.armed if fault.target == slot]
        if slot in APIS:
            return ",".join(fault.point for fault in mine if fault.point.rpartition(":")[0] not in fired)
        return mine[generation].point if generation < len(mine) else ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(seed: int, *, seconds: float = 12.0, faults: int = 5, api_kills: int = 2, broker: bool = True) -> Plan:
    """At least two failpoints and the rest blows, in a random order at random times; and `api_kills` beside them."""
    rng = random.Random(f"plan {seed}")  # noqa: S311 - to be repeated, not to be secret
    at_points = max(2, faults // 2)
    points = deal(FAILPOINTS, seed, at_points, broker=broker)
    blows = deal(BLOWS, seed, max(1, faults - at_points), broker=broker)
    armed = tuple(Fault(kind.name, target=rng.choice(kind.on), nth=rng.randint(1, 3)) for kind in points)
    armed += _api_kills(seed, api_kills)
    planned = [
        Fault(kind.name, round(rng.uniform(0.1, 0.8) * seconds, 2), rng.choice(kind.on) if kind.on else "",
              kind.seconds)
        for kind in blows
    ]  # fmt: skip
    return Plan(seed, seconds, armed, tuple(sorted(planned, key=lambda fault: fault.at)))


def _api_kills(seed: int, count: int) -> tuple[Fault, ...]:
    """The APIs die in turn."""
    rng = random.Random(f"api kills {seed}")  # noqa: S311 - to be repeated, not to be secret
    kinds = deal(API_POINTS, seed, count, broker=False)
    most = [OPERATIONS[kind.name.partition(".")[2].partition(":")[0]] for kind in kinds]
    return tuple(
        Fault(kind.name, target=APIS[place % len(APIS)], nth=rng.randint(1, most[place]))
        for place, kind in enumerate(kinds)
    )


def deal(pack: Sequence[Kind], seed: int, count: int, *, broker: bool) -> list[Kind]:
    """The `seed`-th hand of `count` cards; the pack is shuffled anew whenever it is used up."""
    cards = [kind for kind in pack if broker or not kind.needs_broker]
    hand = []
    for position in range(seed * count, (seed + 1) * count):
        turn, place = divmod(position, len(cards))
        shuffled = random.Random(f"pack {turn}").sample(cards, len(cards))  # noqa: S311 - as above
        hand.append(shuffled[place])
    return hand


#: For each mutation a plan that provokes the guard it lacks. The same plans are green without the mutation.
DIRECTED: dict[str, Plan] = {
    "epoch": Plan(0, 12.0, (), (Fault("F9 hold a settlement", 2.0, "worker-0", 8.0),), ("worker-0",)),
    "fence": Plan(0, 12.0, (), tuple(
        Fault("F9 hold a settlement", at, "worker-0", 6.5) for at in (1.5, 9.0))),
    "ack": Plan(0, 5.0, (), (Fault("F27 slow postgres", 0.5, "worker-0", 4.0),)),
    "outbox": Plan(0, 3.0, (), (Fault("F10 drain", 1.5, "worker-0"),)),
    "overwrite": Plan(0, 3.0, (), (Fault("F9 hold a put", 0.5, "", 7.0),)),
    "confirm": Plan(0, 5.0, (), (Fault("F29 half-open amqp", 1.0, "worker-0", 3.5),)),
}  # fmt: skip
