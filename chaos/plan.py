"""Makes the plan of a run from its seed: which faults happen, to which processes, and when. A plan leaves out faults
that the machine cannot do.

Faults are dealt like cards from a shuffled pack: so every fault comes up within a few dozen neighbouring seeds.
Independent random draws would not ensure that.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chaos.catalogue import API_POINTS, APIS, BLOWS, BY_NAME, EVERYTHING, FAILPOINTS, STANDBY, WORKERS, Kind
from chaos.operations import OPERATIONS

#: The load of a run by default. The seconds of the kinds in the catalogue are for this time.
SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan. `at`: seconds after the load begins; 0 for a failpoint, which is armed from the start."""

    name: str
    at: float = 0.0
    target: str = ""
    seconds: float = 0.0
    nth: int = 1  # a failpoint acts when its process reaches it for the nth time

    @property
    def kind(self) -> Kind:
        return BY_NAME[self.name]

    @property
    def point(self) -> str:
        """The fault as an entry of LEASEHOLD_FAILPOINTS."""
        return f"{self.name.partition(' ')[2]}:{self.nth}"


@dataclass(frozen=True, slots=True)
class Plan:
    """`armed`: the failpoints. `blows`: the faults that begin at a time. `workers`: the slots of the run's workers."""

    seed: int
    seconds: float
    armed: tuple[Fault, ...] = ()
    blows: tuple[Fault, ...] = ()
    workers: tuple[str, ...] = field(default=WORKERS)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self.armed + self.blows

    @property
    def begins_with_release(self) -> bool:
        """Whether the run begins with the release's schema and processes, which a fault then upgrades to this code."""
        return any(fault.kind.from_release for fault in self.blows)

    @property
    def has_release(self) -> bool:
        """Whether a process of the release serves at any time."""
        return any(fault.kind.starts_release for fault in self.blows)

    @property
    def has_standby(self) -> bool:
        """Whether PostgreSQL has a standby, because a fault promotes it."""
        return any(fault.kind.needs == STANDBY for fault in self.blows)

    @property
    def has_only_failovers(self) -> bool:
        return self.has_standby and all(fault.kind.needs == STANDBY for fault in self.faults)

    def failpoints(self, slot: str, fired: Collection[str] = ()) -> str:
        """The failpoints of the slot's next process. `fired`: the points at which its earlier processes acted.

        A worker gets the plan's next kill, and the acts before that kill, which it survives: so its deaths are spread
        over the run. An API gets all of its failpoints, because the order of the operations is unknown. A point has one
        act at a time.
        """
        by_point: dict[str, Fault] = {}
        for fault in self.armed:
            point, _, act = fault.point.rpartition(":")[0].partition(":")
            if fault.target == slot and f"{point}:{act}" not in fired and point not in by_point:
                by_point[point] = fault
                if slot in WORKERS and act == "kill":
                    break
        return ",".join(fault.point for fault in by_point.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    seed: int,
    *,
    seconds: float = SECONDS,
    faults: int = 5,
    failpoints: int | None = None,
    api_kills: int = 1,
    abilities: Collection[str] = EVERYTHING,
) -> Plan:
    """A plan with `faults` faults, of which `failpoints` are failpoints (None: half of them, at least two). The other
    faults are blows at random times. `api_kills` are added to them.

    `abilities`: which of EVERYTHING the machine can do (`Servers.abilities`).
    """
    rng = random.Random(f"plan {seed}")  # noqa: S311 - to be repeated, not to be secret
    point_count = max(2, faults // 2) if failpoints is None else failpoints
    points = deal(FAILPOINTS, seed, point_count, abilities)
    blows = _one_of_release(deal(BLOWS, seed, max(1, faults - point_count), abilities), rng, abilities)
    armed = tuple(Fault(kind.name, target=rng.choice(kind.on), nth=rng.randint(1, 3)) for kind in points)
    armed += _api_kills(seed, api_kills)
    planned = [
        Fault(kind.name, round(rng.uniform(0.1, 0.8) * seconds, 2), rng.choice(kind.on) if kind.on else "",
              kind.seconds)
        for kind in blows
    ]  # fmt: skip
    return Plan(seed, seconds, armed, tuple(sorted(planned, key=lambda fault: fault.at)))


def _one_of_release(hand: list[Kind], rng: random.Random, abilities: Collection[str]) -> list[Kind]:
    """The hand with at most one fault of the release, the upgrade if it is dealt. Other blows replace the rest.

    In a run that begins with the release, "an old process beside the new ones" finds no new ones, and the upgrade
    replaces the old process before its time. And until the upgrade no process knows the signals that make faults.
    """
    of_release = [kind for kind in hand if kind.starts_release]
    left_out = sorted(of_release, key=lambda kind: not kind.from_release)[1:]
    others = [kind for kind in _possible(BLOWS, abilities) if kind not in hand and not kind.starts_release]
    if any(kind.from_release for kind in of_release):
        left_out += [kind for kind in hand if kind.by_signal]
        others = [kind for kind in others if not kind.by_signal]
    return [kind for kind in hand if kind not in left_out] + rng.sample(others, len(left_out))


def _api_kills(seed: int, count: int) -> tuple[Fault, ...]:
    """Kills after `count` kinds of commits. Both APIs are armed, because a repeated request may kill the other API."""
    rng = random.Random(f"api kills {seed}")  # noqa: S311 - to be repeated, not to be secret
    drawn = [
        (kind, rng.randint(1, OPERATIONS[kind.name.partition(".")[2].partition(":")[0]]))
        for kind in deal(API_POINTS, seed, count, EVERYTHING)
    ]
    return tuple(Fault(kind.name, target=api, nth=nth) for kind, nth in drawn for api in APIS)


def plan_of(name: str, seed: int, *, seconds: float = SECONDS) -> Plan:
    """A plan of this fault alone. A failpoint is armed in every process that it can hit. A blow happens twice. A fault
    of the release happens once: two of them would end each other's process. If the load lasts longer than SECONDS, the
    processes of the release stay longer, too.
    """
    kind = BY_NAME[name]
    if kind in (*FAILPOINTS, *API_POINTS):
        return Plan(seed, seconds, armed=tuple(Fault(name, target=target, nth=1) for target in kind.on))
    rng = random.Random(f"plan of {seed}")  # noqa: S311 - as above
    times = (0.1 * seconds,) if kind.starts_release else (0.1 * seconds, 0.6 * seconds)
    lasts = kind.seconds * max(1.0, seconds / SECONDS) if kind.is_release else kind.seconds
    return Plan(
        seed,
        seconds,
        blows=tuple(Fault(name, at, rng.choice(kind.on) if kind.on else "", lasts) for at in times),
    )


def deal(pack: Sequence[Kind], seed: int, count: int, abilities: Collection[str]) -> list[Kind]:
    """The hand of `count` cards for this seed. The pack is shuffled again whenever it is used up."""
    cards = _possible(pack, abilities)
    hand = []
    for position in range(seed * count, (seed + 1) * count):
        turn, place = divmod(position, len(cards))
        shuffled = random.Random(f"pack {turn}").sample(cards, len(cards))  # noqa: S311 - as above
        hand.append(shuffled[place])
    return hand


def _possible(pack: Sequence[Kind], abilities: Collection[str]) -> list[Kind]:
    return [kind for kind in pack if not kind.needs or kind.needs in abilities]


#: Mutation -> a plan that needs the guard which the mutation removes. Without the mutation the plan is green.
DIRECTED: dict[str, Plan] = {
    "epoch": Plan(0, 12.0, (), (Fault("F9 hold a settlement", 2.0, "worker-0", 8.0),), ("worker-0",)),
    "fence": Plan(0, 12.0, (), tuple(
        Fault("F9 hold a settlement", at, "worker-0", 6.5) for at in (1.5, 9.0))),
    "ack": Plan(0, 5.0, (), (Fault("F27 slow postgres", 0.5, "worker-0", 4.0),)),
    "outbox": Plan(0, 3.0, (), (Fault("F10 drain", 1.5, "worker-0"),)),
    "overwrite": Plan(0, 3.0, (), (Fault("F9 hold a put", 0.5, "", 7.0),)),
    "confirm": Plan(0, 5.0, (), (Fault("F29 half-open amqp", 1.0, "worker-0", 3.5),)),
}  # fmt: skip
