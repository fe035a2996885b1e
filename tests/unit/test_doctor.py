"""What the doctor opens, it closes."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.broker.postgres import PostgresBroker
from leasehold.cli import doctor
from leasehold.settings import Settings
from leasehold.storage import ObjectStore


async def test_the_broker_is_closed_when_the_store_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def note_open(_broker: object) -> None:
        done.append("open")

    async def note_close(_broker: object) -> None:
        done.append("close")

    async def refuse(_store: Any) -> None:
        raise OSError("no such store")

    monkeypatch.setattr(PostgresBroker, "open", note_open)
    monkeypatch.setattr(PostgresBroker, "close", note_close)
    monkeypatch.setattr(ObjectStore, "open", refuse)
    with pytest.raises(OSError, match="no such store"):
        await doctor.examine(Settings(_env_file=None, broker="postgres"))
    assert done == ["open", "close"]
