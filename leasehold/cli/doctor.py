"""`leasehold doctor` checks what PostgreSQL, the broker and the store can guarantee, and prints each finding."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leasehold.broker import open_broker
from leasehold.cli.terminal import harmless
from leasehold.db.database import connected
from leasehold.domain.registry import Pipelines
from leasehold.kinds.schemas import schemas_of
from leasehold.pipelines import kinds_of
from leasehold.selfcheck import Finding, check_all
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.worker.sandbox import isolation

#: How long `examine` waits for the broker to connect, in seconds.
_PATIENCE_SECONDS = 10.0


async def examine(settings: Settings) -> list[Finding]:
    """Wait up to _PATIENCE_SECONDS for the broker to connect. Then run all checks, also that of the sandbox
    (`isolation`).
    """
    # The platform's schema, and the schema of each kind of work that has its own tables.
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    store = ObjectStore.from_settings(settings)
    async with open_broker(settings) as broker, AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await store.open()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not broker.connected:  # noqa: ASYNC110 - a broker offers no event to wait for
                    await asyncio.sleep(0.05)
        findings = await check_all(partial(connected, settings, "doctor"), broker, store, settings, schemas)
        return [*findings, isolation.check(settings)]


def show(console: Console, findings: list[Finding]) -> None:
    table = Table("part", "", "found", "what it means")
    for finding in findings:
        mark = "ok" if finding.ok else "[red]wrong[/red]"
        table.add_row(finding.part, mark, Text(harmless(finding.found)), Text(harmless(finding.meaning)))
    console.print(table)
