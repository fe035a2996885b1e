"""`python -m bench.hostile ATTACK`, told what it needs by stdin: attack for a while, say what was answered, and end."""

from __future__ import annotations

import asyncio
import sys

import orjson

from bench.hostile.arena import Told, arena
from bench.hostile.attacks import ATTACKS


async def main(name: str, told: Told) -> None:
    async with arena(told) as made:
        await ATTACKS[name].run(made)
    sys.stdout.buffer.write(orjson.dumps(dict(made.answers)))


asyncio.run(main(sys.argv[1], Told.model_validate_json(sys.stdin.buffer.read())))
