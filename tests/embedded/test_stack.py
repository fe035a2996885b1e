from __future__ import annotations

import os
from pathlib import Path

import asyncpg
import pytest

from leasehold.embedded.process import EmbeddedError
from leasehold.embedded.stack import EmbeddedStack
from tests.support.processes import Witness, descendants, started_since


async def test_a_stack_gives_what_the_platform_needs_and_ends_with_its_block() -> None:
    before = descendants(os.getpid())
    async with EmbeddedStack(durable=False) as stack:
        assert stack.environment["LEASEHOLD_BROKER"] == "postgres"
        connection = await asyncpg.connect(stack.environment["LEASEHOLD_DATABASE_URL"])
        assert await connection.fetchval("SELECT current_database()") == "leasehold"
        await connection.close()
        witness = Witness(started_since(before))
        directory = stack.directory
    await witness.all_ended()
    assert not directory.exists()


async def test_a_stack_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descendants(os.getpid())
    for program in ("initdb", "postgres"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("LEASEHOLD_PG_BIN", str(tmp_path))
    with pytest.raises(EmbeddedError, match="initdb exited with 127"):
        async with EmbeddedStack(durable=False):
            pass
    await Witness(started_since(before)).all_ended()


async def test_two_stacks_do_not_meet() -> None:
    async with EmbeddedStack(durable=False, s3=False) as one, EmbeddedStack(durable=False, s3=False) as other:
        assert one.environment["LEASEHOLD_DATABASE_URL"] != other.environment["LEASEHOLD_DATABASE_URL"]
