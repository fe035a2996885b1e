"""What holds of every private server: its files are whole, and a start that takes too long ends with its log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.cli import installation
from leasehold.cli.installation import Installation
from leasehold.embedded import guard, programs
from leasehold.embedded.process import EmbeddedError, RunAs, Server


def test_a_file_has_its_name_only_with_its_text(tmp_path: Path) -> None:
    """An empty password that a kill left would count as the password of every later start."""
    path = tmp_path / "password"
    with pytest.raises(UnicodeEncodeError):
        RunAs().write_file(path, "\ud800")
    assert not path.exists()
    RunAs().write_file(path, "first")
    with pytest.raises(UnicodeEncodeError):
        RunAs().write_file(path, "\ud800")
    assert path.read_text() == "first"
    RunAs().write_file(path, "second")
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
        while not log.read_text():  # a busy machine may take longer for it than the API has to get ready
            await asyncio.sleep(0.01)
    try:
        with pytest.raises(EmbeddedError, match=r"api was not ready within 0\.3 s(?s:.)*api waits"):
            await silent._until_ready()
    finally:
        for server in silent._processes:
            await server.stop(signal.SIGTERM, grace=5)


#: As a worker does: the first signal lets a step finish that is not cancelable, and the second gives its task back.
_PATIENT = """
import signal, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
print("ready", flush=True)
while len(signals) < 2:
    time.sleep(0.01)
print("given back", flush=True)
"""


async def test_a_worker_of_the_installation_that_drains_for_long_gives_its_tasks_back_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of them would count a loss."""
    monkeypatch.setattr(installation, "_RESTART_SECONDS", 0.5)
    monkeypatch.setattr(installation, "_AGAIN_SECONDS", 60.0)
    log = tmp_path / "worker.log"
    made = Installation(patient=False)
    made.environment = {"LEASEHOLD_DRAIN_SECONDS": "0"}
    command = [sys.executable, "-c", _PATIENT]
    server = await Server.start("worker", command, log=log, env=dict(os.environ), cwd=tmp_path, run_as=RunAs())
    async with asyncio.timeout(60):
        while "ready" not in log.read_text():
            await asyncio.sleep(0.01)
        await made._stop(server, installation._RESTART_SECONDS)
    assert "given back" in log.read_text()
    assert not server.running


def test_two_that_copy_the_same_programs_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("x")
    (tmp_path / "cache").mkdir()
    for _ in range(2):
        programs._copy([tmp_path / "program"], tmp_path / "cache" / "program-1")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["program-1"]
    assert (tmp_path / "cache/program-1/program").read_text() == "x"


#: Runs the guard. Its server has ended before the guard can watch it.
_LATE_GUARD = """
import os, subprocess, sys
from leasehold.embedded import guard

class Ended(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Ended
sys.exit(guard.main())
"""


@pytest.mark.parametrize(("program", "code"), [("exit 7", 7), ("kill -TERM $$", 128 + 15), ("kill -KILL $$", 128 + 9)])
def test_the_guard_ends_with_the_code_that_a_shell_would_give_its_server(program: str, code: int) -> None:
    owner, nobody, last_signal = str(os.getpid()), "-1", str(int(signal.SIGKILL))
    argv = [sys.executable, "-c", _LATE_GUARD, owner, nobody, nobody, last_signal, "/bin/sh", "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:  # the open pipe says that the owner lives
        assert process.wait(timeout=60) == code


def test_a_process_whose_name_is_no_text_hides_no_process_from_the_guard() -> None:
    """The kernel cuts a name after 15 bytes, maybe in the middle of a letter. Any user may run such a process."""
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = guard.descendants(os.getpid())
        process.communicate(b"\n")
    assert process.pid in found


def test_the_guard_kills_all_others_if_it_may_not_kill_one(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(pid: int, _signal: int) -> None:
        if pid == 1:
            raise PermissionError
        killed.append(pid)

    def nobody_left(_pid: int, _options: int) -> None:
        raise ChildProcessError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "killpg", lambda _group, _signal: kill(1, 9))
    monkeypatch.setattr(os, "waitpid", nobody_left)
    monkeypatch.setattr(guard, "descendants", lambda _root: [1, 2, 3])
    guard.kill_everything(7)
    assert killed == [2, 3]
