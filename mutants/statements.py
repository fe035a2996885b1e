"""`python -m mutants.statements URL`: every constant of the mutated modules that PostgreSQL prepares as a statement."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys

import asyncpg

from mutants.judging import digest_of
from mutants.places import ROOT, STATEMENTS, files, module_of


async def statements(database: str) -> dict[str, str]:
    """`module:NAME` of each statement -> its digest."""
    digests = {}
    connection = await asyncpg.connect(database)
    try:
        for path in sorted(files(ROOT, STATEMENTS)):
            module = module_of(path)
            for name, text in vars(importlib.import_module(module)).items():
                if isinstance(text, str) and not name.startswith("__") and await _prepares(connection, text):
                    digests[f"{module}:{name}"] = digest_of(text)
    finally:
        await connection.close()
    return digests


async def _prepares(connection: asyncpg.Connection[asyncpg.Record], text: str) -> bool:
    if not text.strip():
        return False
    try:
        await connection.prepare(text)
    except asyncpg.PostgresError:  # the text is a fragment, or not SQL
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(asyncio.run(statements(sys.argv[1]))))  # noqa: T201 - the answer
