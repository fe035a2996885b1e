"""`leasehold migrate` after a try that died between the transactions of one revision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from alembic import command
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from leasehold.db.upgrading.rendering import config_of
from tests.support.databases import Databases


class _Died(Exception):
    """Stands for the end of the process that migrates."""


class _Deaths:
    """Lets a migration die at one place: each transaction that a revision commits early has two, after the commit and
    after the statements that follow outside a transaction.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passed = self._lethal = 0
        autocommit_block = MigrationContext.autocommit_block

        @contextmanager
        def block(context: MigrationContext) -> Iterator[None]:
            with autocommit_block(context):
                self._pass()
                yield
            self._pass()

        monkeypatch.setattr(MigrationContext, "autocommit_block", block)

    def _pass(self) -> None:
        self._passed += 1
        if self._passed == self._lethal:
            raise _Died

    async def at_each_place(self, run: Callable[[], None]) -> int:
        """Call `run` until a call does not die: the first dies at the first place, the next at the second, and so on.
        Returns the number of the calls that died.
        """
        for died in range(100):
            self._passed, self._lethal = 0, died + 1
            try:
                await asyncio.to_thread(run)
            except _Died:
                continue
            return died
        raise AssertionError("the places have no end")


async def test_each_revision_that_commits_early_goes_on_where_a_try_died_upwards_and_downwards(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = _Deaths(monkeypatch)
    url = await postgres.create_database()
    config = config_of(None)
    config.attributes["url"] = url
    scripts = ScriptDirectory.from_config(config)
    places: dict[str, tuple[int, int]] = {}
    try:
        for script in reversed(list(scripts.walk_revisions())):

            def upgrade(revision: str = script.revision) -> None:
                command.upgrade(config, revision)

            def downgrade() -> None:
                command.downgrade(config, "-1")

            up = await deaths.at_each_place(upgrade)
            if up:
                places[script.revision] = up, await deaths.at_each_place(downgrade)
                await deaths.at_each_place(upgrade)
    finally:
        await postgres.drop_database(url)
    assert places["0030_indexes_of_searches"] == (4, 0)
    assert places["0050_source_bytes"] == (2, 2)
