"""The load of a run: clients send requests, and a diary records the requests and their answers.

A client that gets no answer repeats its request with the same key for a while. If it never gets one, the diary records
the answer `unknown`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from chaos.load import conversions, direct, errands, generations, media, operations, runs, schedules, workflows
from chaos.load.diary import WORDS, Diary, Sender
from chaos.load.external import ExternalWorkers
from chaos.load.media import PICTURE_TYPE, picture
from chaos.pipelines import BY_DIRECT, BY_HTTP
from chaos.settings import TENANTS
from chaos.stack import Installation
from leasehold.runtime.gather import cancel_and_wait

__all__ = ["PAUSES", "PICTURE_TYPE", "WORDS", "Load", "picture"]
#: Client -> the mean of the seconds between two of its requests.
PAUSES = {
    "media": 1.5, "conversion": 6.0, "generation": 1.2, "large": 1.2,
    "short": 0.8, "long": 3.0, "fork": 1.5, "parked": 1.5, "flaky": 2.0, "hopeless": 3.0, "wrong": 1.5, "poison": 6.0,
    "unlike": 1.0, "spread": 3.0, "gated": 0.5, "paced": 1.2, "abroad": 1.2,
    "direct short": 0.8, "direct long": 3.0, "direct cancel": 2.0, "direct schedule": 1.0,
    "operation": 2.5, "workflow": 2.0, "workflow cancel": 2.0,
    "batch": 3.0, "cancel": 1.2, "mend": 1.5, "replay": 4.0, "repeat": 3.0, "schedule": 1.5, "errand": 0.8,
}  # fmt: skip
#: After its time the load may go on (`Load.run`): then the pauses are this many times longer.
_SLOWER = 4.0


class Load:
    """The clients of a run, one for each entry of PAUSES, and the external workers.

    `senders`: each client's function that sends one request. The external workers serve from `begin` until `end`,
    because the runs that wait for them must end, too.
    """

    def __init__(self, installation: Installation, seed: int) -> None:
        self.diary = Diary(installation, seed)
        self.senders = self._senders()
        self._sent: Counter[str] = Counter()
        self._external: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        self.diary.seed_random("begin")
        await errands.declare_limits(self.diary)
        workers = ExternalWorkers(self.diary)
        self._external = [asyncio.create_task(workers.serve(tenant)) for tenant in TENANTS]

    async def run(self, seconds: float, faults_over: asyncio.Event | None = None) -> None:
        """Send requests for `seconds`; then, at a quarter of the rate, until `faults_over` is set. An upgrade may take
        minutes: at the full rate, clients would submit jobs faster than the machine does them.
        """
        async with asyncio.TaskGroup() as clients:
            for name, send in self.senders.items():
                clients.create_task(self._repeat(name, send, seconds, faults_over))

    async def wait_for_followers(self, seconds: float) -> None:
        """Wait until the clients have read all events of their jobs. Stop those that need longer than `seconds`."""
        await self.diary.wait_for_followers(seconds)

    async def lift_pace(self) -> None:
        """Lift the limit at which jobs wait for up to a minute. Call this once the faults are over."""
        self.diary.seed_random("lift pace")
        await errands.lift_pace(self.diary)

    async def end(self) -> None:
        await cancel_and_wait(*self._external)
        await self.diary.close()

    def _senders(self) -> dict[str, Sender]:
        diary = self.diary
        return {
            "media": media.sender(diary),
            "conversion": conversions.sender(diary),
            "generation": generations.sender(diary),
            **{pipeline.name: runs.starter(diary, pipeline) for pipeline in BY_HTTP},
            **{f"direct {pipeline.name}": direct.submitter(diary, pipeline) for pipeline in BY_DIRECT},
            "direct cancel": direct.canceller(diary),
            "direct schedule": direct.scheduler(diary),
            "operation": operations.sender(diary),
            "workflow": workflows.signaller(diary),
            "workflow cancel": workflows.canceller(diary),
            "batch": runs.batcher(diary),
            "cancel": runs.canceller(diary),
            "mend": runs.mender(diary),
            "replay": runs.replayer(diary),
            "repeat": runs.repeater(diary),
            "schedule": schedules.keeper(diary),
            "errand": errands.runner(diary),
        }

    async def _repeat(self, name: str, send: Sender, seconds: float, faults_over: asyncio.Event | None) -> None:
        """Begin a new request after each pause, whether or not the last one was answered."""
        until = time.monotonic() + seconds
        self.diary.seed_random(f"{name} pauses {self._sent[name]}")
        async with asyncio.TaskGroup() as requests:
            await asyncio.sleep(PAUSES[name] * self.diary.rng.uniform(0.0, 0.5))
            while time.monotonic() < until or (faults_over is not None and not faults_over.is_set()):
                requests.create_task(self.send_once(name, send, self._sent[name]))
                self._sent[name] += 1
                factor = 1.0 if time.monotonic() < until else _SLOWER
                await asyncio.sleep(factor * PAUSES[name] * self.diary.rng.uniform(0.5, 1.5))

    async def send_once(self, name: str, send: Sender, nth: int) -> None:
        """The `nth` request of a client: the seed decides what it is."""
        self.diary.seed_random(f"{name} {nth}")
        await send(self.diary.rng.choice(TENANTS))
