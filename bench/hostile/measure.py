"""Runs each attack on an installation of its own. Measures the honest tenant's waits, and the memory and sessions of
the processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import orjson
from cryptography.fernet import Fernet

from bench.figure import Figure, Goal, quantile
from bench.hostile import honest, promoted
from bench.hostile.arena import AttackSettings
from bench.hostile.attacks import ATTACKS
from bench.hostile.honest import PARTS, Duration
from bench.hostile.store_proxy import store_proxy
from bench.hostile.watch import Watch
from bench.http import until_ready
from bench.processes import main_processes_of
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key
from leasehold.settings import Settings

_ROOT = Path(__file__).parents[2]
_HONEST = ("runs:write", "runs:read")
_HOSTILE = (
    *_HONEST, "templates:write", "webhooks:write", "media:write", "media:read", "generation:write", "generation:read",
    "conversion:write", "conversion:read", "external:work",
)  # fmt: skip
_CLIENTS = 2
_HEAD_START = 1.0
_WARM_UP = 1.0
#: The goals; docs/operations/index.md explains them. The memory is of a main process: each child has its own limit.
_RUN_MS, _POLL_MS, _MIB = Goal(1000), Goal(100), Goal(512)
_SESSIONS = Goal(Settings.model_fields["database_pool_size"].default)


@dataclass(frozen=True, slots=True)
class _Outcome:
    runs: list[Duration]
    polls: list[float]
    watch: Watch
    answers: Mapping[str, int]


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Measure each attack once, even if more runs are requested, because each needs a new installation."""
    figures = []
    for name in scale.attacks or ATTACKS:
        load = (os.getloadavg()[0],)
        figures += _figures(name, load, await _measure_attack(testbed, scale, name))
    return figures


def _figures(name: str, load: tuple[float, ...], outcome: _Outcome) -> list[Figure]:
    label = f"{name} ({ATTACKS[name].finding})" if ATTACKS[name].finding else name
    details = {"answers": dict(outcome.answers), "runs": len(outcome.runs)}
    durations = [run.seconds for run in outcome.runs]
    parts = {
        name: [run.parts[name] for run in outcome.runs if run.parts] or [honest.PATIENCE_SECONDS] for name in PARTS
    }

    def ms(values: list[float], part: float) -> tuple[float, ...]:
        return (1000 * quantile(values, part),)

    return [
        Figure(f"{label}: honest run, p50", "ms", ms(durations, 0.5), load, details=details),
        Figure(f"{label}: honest run, p99", "ms", ms(durations, 0.99), load, _RUN_MS),
        *(
            Figure(f"{label}: honest run, its {name}, p{percent}", "ms", ms(values, percent / 100), load)
            for name, values in parts.items()
            for percent in (50, 99)
        ),
        Figure(f"{label}: /livez, p99", "ms", ms(outcome.polls, 0.99), load, _POLL_MS),
        *(
            Figure(f"{label}: {role}, resident", "MiB", (float(outcome.watch.mib[role]),), load, _MIB)
            for role in _ROLES
        ),
        *(
            Figure(f"{label}: {role}, connections", "sessions", (float(outcome.watch.sessions[role]),), load, _SESSIONS)
            for role in _ROLES
        ),
    ]


_ROLES = ("api", "worker")


async def _measure_attack(testbed: Testbed, scale: Scale, name: str) -> _Outcome:
    attack = ATTACKS[name]
    port, silent = free_port(), free_port()
    async with store_proxy(testbed.s3_endpoint) as proxy:
        settings: dict[str, object] = {
            "pipelines": "bench.hostile.pipelines:benched",
            "egress_allow": "127.0.0.0/8",
            "sealing_keys": Fernet.generate_key().decode(),
            "generation_provider": "ark",
            "generation_ark_url": f"http://127.0.0.1:{silent}",
            "generation_credentials": orjson.dumps({"ark": "credential"}).decode(),
            **({"s3_endpoint": proxy.url} if attack.hangs_store else {}),
            **{name: value.format(silent=f"127.0.0.1:{silent}") for name, value in attack.settings.items()},
        }
        async with testbed.installation(**settings) as installation:
            await installation.start("api", api_port=port)
            await installation.start_worker()
            await until_ready(port)
            key, hostile = await _keys(installation)
            await honest.runs(port, key, monotonic() + _WARM_UP)
            if attack.models:
                await promoted.finish(installation.settings, port, hostile, attack.models)
            if attack.hangs_store:
                proxy.hang()
            return await _run_beside_attack(installation, name, AttackSettings(
                port=port, key=hostile, database_url=installation.url, silent_port=silent, seconds=scale.hostile_seconds
            ), key)  # fmt: skip


async def _keys(installation: Installation) -> tuple[str, str]:
    async with installation.connection() as connection:
        honest_key = await create_key(connection, tenant_id="honest", client_id="bench", scopes=_HONEST)
        hostile_key = await create_key(connection, tenant_id="hostile", client_id="bench", scopes=_HOSTILE)
    return honest_key.text, hostile_key.text


async def _run_beside_attack(
    installation: Installation, name: str, attack_settings: AttackSettings, key: str
) -> _Outcome:
    watch = Watch(installation.url, {role: main_processes_of(role)[0] for role in _ROLES})
    watching = asyncio.create_task(watch.run())
    attacking = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.hostile", name, cwd=_ROOT, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        answering = asyncio.create_task(attacking.communicate(attack_settings.model_dump_json().encode()))
        await asyncio.sleep(_HEAD_START)
        until = monotonic() + attack_settings.seconds - _HEAD_START
        polls, runs = await asyncio.gather(
            honest.polls(attack_settings.port, until),
            asyncio.gather(*(honest.runs(attack_settings.port, key, until) for _ in range(_CLIENTS))),
        )
        output, _ = await asyncio.wait_for(answering, 2 * honest.PATIENCE_SECONDS)
    finally:
        watching.cancel()
        if attacking.returncode is None:
            attacking.kill()
            await attacking.wait()
    await asyncio.gather(watching, return_exceptions=True)
    return _Outcome(
        [duration for client_runs in runs for duration in client_runs],
        polls,
        watch,
        _answers(attacking.returncode, output),
    )


def _answers(code: int | None, output: bytes) -> dict[str, int]:
    if code:
        raise RuntimeError(f"the attack ended with {code}")
    answers: dict[str, int] = orjson.loads(output)
    return answers
