"""`python -m tests.generation.simulator`: prints its URL, and serves until it is ended. For benches: a generation
whose id it never gave out is one that is never made.
"""

from __future__ import annotations

import asyncio
import sys

from tests.generation.simulator.server import Simulator


async def main() -> None:
    async with Simulator(records=False, endless=True) as simulator:
        sys.stdout.write(simulator.url + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
