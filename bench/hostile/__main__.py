"""`python -m bench.hostile ATTACK`: reads its settings from stdin, attacks for a while, and prints counted answers."""

from __future__ import annotations

import asyncio
import sys

import orjson

from bench.hostile.arena import AttackSettings, arena
from bench.hostile.attacks import ATTACKS


async def main(name: str, settings: AttackSettings) -> None:
    async with arena(settings) as opened:
        await ATTACKS[name].run(opened)
    sys.stdout.buffer.write(orjson.dumps(dict(opened.answers)))


asyncio.run(main(sys.argv[1], AttackSettings.model_validate_json(sys.stdin.buffer.read())))
