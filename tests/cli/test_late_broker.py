"""`leasehold dev` with an app starts RabbitMQ after the other parts, and works without it."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.cli import installation
from leasehold.embedded.process import EmbeddedError


async def test_a_rabbitmq_that_does_not_start_late_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        async def start(self) -> None:
            raise EmbeddedError("rabbitmq-server ended with 1")

    monkeypatch.setattr(installation, "_HEAD_START_SECONDS", 0.0)
    broken: Any = Broken()
    await installation._start_late(broken)
    assert capsys.readouterr().err == (
        "leasehold: rabbitmq-server ended with 1; the work goes on without RabbitMQ: the worker polls PostgreSQL\n"
    )
