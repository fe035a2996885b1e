"""The errands of a chaos run, against a real API: all are right requests, so a refusal is the fault of the platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from cryptography.fernet import Fernet
from pydantic import SecretStr

from chaos.load import errands, schedules
from chaos.load.diary import Diary
from chaos.settings import SCOPES, TENANTS
from chaos.stack import Installation
from leasehold.db.database import connected
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import serving


async def test_no_errand_is_refused(settings: Settings) -> None:
    known = settings.model_copy(
        update={
            "pipelines": "chaos.pipelines:declared",
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "egress_allow": "127.0.0.0/8",
        }
    )
    async with connected(known, "test") as connection:
        keys = {
            tenant: (await create_key(connection, tenant_id=tenant, client_id="chaos", scopes=SCOPES)).text
            for tenant in TENANTS
        }
    async with serving(known) as running:
        port = int(running.url.rpartition(":")[2])
        installation = SimpleNamespace(ports={"api-0": port}, keys=keys, mutate="", receiver=SimpleNamespace(port=9))
        diary = Diary(cast("Installation", installation), 1)
        diary.seed_random("test")
        await errands.declare_limits(diary)
        run_errand, keep_schedule = errands.runner(diary), schedules.keeper(diary)
        for _ in range(4):  # each errand, and each end of a schedule
            await run_errand(TENANTS[0])
            await keep_schedule(TENANTS[0])
        await errands.lift_pace(diary)
        await diary.close()
    assert [(one.endpoint, one.answer) for one in diary.requests if one.answer != "accepted"] == []
    assert sum(one.kind == "errand" for one in diary.requests) == 10
