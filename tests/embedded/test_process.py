"""What holds of every private server: its files are whole, and a start that takes too long ends with its log."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from leasehold.cli import installation
from leasehold.cli.installation import Installation
from leasehold.embedded.process import EmbeddedError, RunAs, Server


def test_a_file_has_its_name_only_with_its_text(tmp_path: Path) -> None:
    """An empty password that a kill left would count as the password of every later start."""
    path = tmp_path / "password"
    with pytest.raises(UnicodeEncodeError):
        RunAs().file(path, "\ud800")
    assert not path.exists()
    RunAs().file(path, "first")
    with pytest.raises(UnicodeEncodeError):
        RunAs().file(path, "\ud800")
    assert path.read_text() == "first"
    RunAs().file(path, "second")
    assert path.read_text() == "second"


async def test_an_installation_whose_api_does_not_answer_ends_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "_START_SECONDS", 0.3)
    silent = Installation(patient=False)
    for name in ("worker", "api"):
        log = tmp_path / f"{name}.log"
        command = ["/bin/sh", "-c", f"echo {name} waits; exec sleep 60"]
        silent._processes.append(
            await Server.start(name, command, log=log, env=dict(os.environ), cwd=tmp_path, run_as=RunAs())
        )
    try:
        with pytest.raises(EmbeddedError, match=r"api was not ready within 0\.3 s(?s:.)*api waits"):
            await silent._until_ready()
    finally:
        for server in silent._processes:
            await server.stop(signal.SIGTERM, grace=5)
