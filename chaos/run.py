"""One run: start an installation, load it, break it, repair it, wait until it rests, stop it, and judge its history."""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import collect, journal
from chaos.catalogue import BY_NAME
from chaos.checker import Verdict, judge
from chaos.checks.floors import floors_of
from chaos.checks.promotions import charges_of, until_claims
from chaos.faults import Faults
from chaos.history import History
from chaos.load import Load
from chaos.mutations import CAUGHT_BY
from chaos.plan import Plan
from chaos.probes import probe_tenants
from chaos.servers import Servers
from chaos.settings import SWEEP_SECONDS
from chaos.spans import Span, spans_of
from chaos.stack import Installation
from chaos.starvation import Sampler
from leasehold.runtime.gather import cancel_and_wait

_REST_SECONDS = 60.0
#: For how long after its lease has passed a task may still be `running` (I7), beside the interval of the sweeps.
_OVERDUE_SECONDS = 10.0
#: The installation is at rest after this many polls in a row that found nothing unfinished.
_SETTLED_POLLS = 3
#: The longest time, after rest, in which a client reads the last events of its job.
_FOLLOW_SECONDS = 30.0
#: While a failpoint has not been reached, the load goes on: at most _MORE_LOADS times, _MORE_SECONDS each.
_MORE_LOADS = 4
_MORE_SECONDS = 4.0


@dataclass
class Report:
    """The facts of a run, and the verdicts of the checker."""

    plan: Plan
    mutate: str
    seconds: float = 0.0
    rest_seconds: float = 0.0
    rested: bool = False
    fired: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)  # how much each blow did, in a unit of its own
    jobs: Counter[str] = field(default_factory=Counter)  # "kind status"
    answers: Counter[str] = field(default_factory=Counter)  # "kind answer", of requests
    verdicts: list[Verdict] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    until_claims: list[float] = field(default_factory=list)  # seconds from each promotion to the next claim
    charges: int = 0  # losses that steps were charged for a failover
    starved_seconds: float = 0.0  # for which some process had no processor, of the load and of the time until rest
    failure: str = ""  # the error that ended the run before it was judged
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each, in order

    @property
    def violated(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state == "violated"]

    @property
    def red(self) -> list[Verdict]:
        """The verdicts that make the run red: violated, or observed less often than the plan demands."""
        return [verdict for verdict in self.verdicts if verdict.red]

    @property
    def reasons(self) -> list[str]:
        """Why the run is red, in a few words each."""
        if self.failure:
            return [self.failure]
        reasons = [f"{verdict.number} {verdict.state}" for verdict in self.red]
        reasons += [f"{name} never fired" for name in self.never_fired]
        reasons += [f"{kind} refused" for kind in self.refused]
        return reasons + ([] if self.rested else ["never at rest"])

    @property
    def good(self) -> bool:
        """Whether every invariant was observed and holds, no right request was refused, the installation came to rest,
        and all faults fired. A mutant is good if the invariant that its guard protects is violated.
        """
        if self.mutate:
            return CAUGHT_BY[self.mutate] in {verdict.number for verdict in self.violated}
        return not self.reasons

    @property
    def never_fired(self) -> list[str]:
        return sorted({fault.name for fault in self.plan.faults} - set(self.fired))

    @property
    def refused(self) -> list[str]:
        """Kinds of right requests that an API refused. No invariant notices this: a job that was never made breaks
        none.

        Two refusals are right: of a cancel after the job has ended, and by a process of the release that does not know
        the request.
        """
        if self.plan.has_release:
            return []
        kinds = {answer.removesuffix(" refused") for answer in self.answers if answer.endswith(" refused")}
        return sorted(kinds - {"cancel"})

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.plan.seed,
            "mutate": self.mutate,
            "plan": self.plan.as_json(),
            "seconds": round(self.seconds, 1),
            "rest_seconds": round(self.rest_seconds, 1),
            "rested": self.rested,
            "fired": dict(sorted(self.fired.items())),
            "effects": dict(sorted(self.effects.items())),
            "never_fired": self.never_fired,
            "refused": self.refused,
            "jobs": dict(sorted(self.jobs.items())),
            "answers": dict(sorted(self.answers.items())),
            "until_claims": [round(seconds, 3) if math.isfinite(seconds) else None for seconds in self.until_claims],
            "charges": self.charges,
            "starved_seconds": round(self.starved_seconds, 1),
            "reasons": self.reasons,
            "verdicts": {verdict.number: verdict.as_json() for verdict in self.verdicts},
        }


async def run(servers: Servers, plan: Plan, *, mutate: str = "", keep: Path | None = None) -> Report:
    """Carry out a run. `keep`: the directory to which the logs and the journal of a red run are copied."""
    report = Report(plan, mutate)
    history = History(collect.terms())
    began = time.monotonic()

    def end_phase(phase: str) -> None:
        report.phases[phase] = time.monotonic() - began - sum(report.phases.values())

    async with Installation(servers, plan, mutate=mutate) as installation:
        load = Load(installation, plan.seed)
        faults = Faults(installation)
        load_began = time.time()
        end_phase("start")
        with Sampler(installation.running) as sampler:
            await _carry_out(installation, history, load, faults, end_phase)
        cuts = [(since, until) for name, since, until in faults.spans if BY_NAME[name].link == "s3"]
        installation.front.excuse_cut(cuts)
        await collect.gather(installation, load, history)
        history.children_killed, history.jumps = faults.children_killed, faults.jumps
        history.starved = sampler.starved
        history.failovers, history.has_only_failovers = faults.failovers, plan.has_only_failovers
        report.until_claims = until_claims(history)
        report.charges = sum(map(len, charges_of(history).values()))
        report.starved_seconds = history.starvation.longest_wait(load_began, time.time())
        report.fired = faults.fired + _failpoints(installation)
        report.effects = faults.effects
        report.rested = history.rested
        report.spans = spans_of(plan, faults.spans, journal.read(installation.journal), load_began)
        report.verdicts = judge(history, floors_of(plan, broker=history.has_broker))
        if keep is not None and (report.red or not report.rested):
            collect.write_down(history, installation.directory)
            shutil.copytree(installation.directory, keep / f"{mutate or plan.seed}", dirs_exist_ok=True)
        end_phase("judge")
    report.rest_seconds = history.rest_seconds
    report.jobs = Counter(f"{job['pipeline']} {job['status']}" for job in history.jobs)
    report.answers = Counter(f"{request.kind} {request.answer}" for request in history.requests)
    report.seconds = time.monotonic() - began
    end_phase("end")
    return report


async def _carry_out(
    installation: Installation, history: History, load: Load, faults: Faults, end_phase: Callable[[str], None]
) -> None:
    """Do all from the first request to the end of the last process. Calls `end_phase` at the end of each phase."""
    beside = [asyncio.create_task(faults.wake_zombies()), asyncio.create_task(installation.transactions.watch())]
    try:
        await load.begin()
        faults_over = asyncio.Event()
        await asyncio.gather(
            load.run(installation.plan.seconds, faults_over), _break(installation, faults, load, faults_over)
        )
        end_phase("load")
        await _mend(installation)
        await load.lift_pace()
        await _rest(installation, history)
        await load.wait_for_followers(_FOLLOW_SECONDS)
        end_phase("rest")
    finally:
        await cancel_and_wait(*beside)
        await load.end()
    await _stop(installation, history)
    end_phase("stop")


async def _break(installation: Installation, faults: Faults, load: Load, faults_over: asyncio.Event) -> None:
    """Carry out the blows, then set `faults_over`. Then add load until every failpoint of the plan has acted, or
    _MORE_LOADS times.
    """
    await asyncio.gather(faults.run(), asyncio.sleep(installation.plan.seconds))
    faults_over.set()
    if installation.plan.begins_with_release:  # the release lacked some kinds of work: run them now
        await load.run(installation.plan.seconds)
    for _ in range(_MORE_LOADS):
        if set(_failpoints(installation)) == {fault.name for fault in installation.plan.armed}:
            return
        await load.run(_MORE_SECONDS)


async def _mend(installation: Installation) -> None:
    installation.heal()
    await installation.servers.mend()
    for slot in installation.slots.values():
        if slot.stopped_by_us:
            slot.signal(signal.SIGCONT)
            slot.stopped_by_us = False


async def _rest(installation: Installation, history: History) -> None:
    """Wait until nothing is unfinished and no process is stopped: a stopped one may hold hints of finished tasks.

    A slow machine needs longer, so the wait ends without rest only if the number has not fallen for _REST_SECONDS.
    """
    began = fell_at = time.monotonic()
    quiet, least = 0, math.inf
    async with installation.connection() as connection:
        while quiet < _SETTLED_POLLS and time.monotonic() - fell_at < _REST_SECONDS:
            unfinished = sum((await collect.count_unfinished(connection)).values())
            if unfinished < least:
                least, fell_at = unfinished, time.monotonic()
            is_stopped = any(slot.is_stopped() for slot in installation.slots.values())
            quiet = 0 if is_stopped or unfinished else quiet + 1
            if time.monotonic() - began > _OVERDUE_SECONDS:
                history.overdue.append(await collect.overdue(connection, _OVERDUE_SECONDS + SWEEP_SECONDS))
            await asyncio.sleep(0.3)
        history.overdue.append(await collect.overdue(connection, _OVERDUE_SECONDS + SWEEP_SECONDS))
    history.rest_seconds = time.monotonic() - began
    history.rested = quiet == _SETTLED_POLLS


async def _stop(installation: Installation, history: History) -> None:
    """Stop the installation. Before that, record what only running processes show; after it, what they left behind."""
    async with asyncio.timeout(_REST_SECONDS):
        await asyncio.gather(*(slot.until_up('"serving"') for slot in installation.workers))
        await asyncio.gather(*(_until_listening(port) for port in installation.ports.values()))
    history.probes = await probe_tenants(installation)
    if installation.amqp_url:
        history.queued = await _queued_at_rest(installation)
    exit_codes = await installation.stop()
    if installation.amqp_url:
        history.returned = await collect.queued(installation)
        history.dead_letters = await collect.dead_letters(installation)
    history.leftovers = await collect.leftovers(installation, exit_codes)


async def _queued_at_rest(installation: Installation) -> dict[str, int]:
    """The queues' counts of messages. Waits up to 5 s until all are 0, because the last ACKs take a moment."""
    for _ in range(20):
        counts = await collect.queued(installation)
        if not any(counts.values()):
            break
        await asyncio.sleep(0.25)
    return counts


async def _until_listening(port: int) -> None:
    """Wait until a process accepts connections on the port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return


def _failpoints(installation: Installation) -> Counter[str]:
    """The planned failpoints that fired in a process that was armed with them."""
    lines = {(line["process"].partition(".")[0], f"{line['name']}:{line['act']}")
             for line in journal.read(installation.journal) if line["what"] == "failpoint"}  # fmt: skip
    return Counter(
        fault.name for fault in installation.plan.armed if (fault.target, fault.name.partition(" ")[2]) in lines
    )
