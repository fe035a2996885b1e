"""The pytest plugin as an app's owner uses it: a session of its own, with the plugin loaded by its entry point."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

import asyncpg
import pytest

from leasehold.settings import MIB
from leasehold.testing import server
from leasehold.testing.server import TestServer
from tests.support.databases import Databases

ROOT = Path(__file__).parents[2]
#: The app of kit_sample.py that only pytest's own `pythonpath` finds.
ELSEWHERE = """
import os
from pathlib import Path
from leasehold import App

app = App("elsewhere")

@app.task(process=True)
def variables() -> dict[str, str]:
    return dict(os.environ)

@app.task(isolated=True)
def reads_secret() -> bool:
    try:
        return bool(Path(__file__).with_name(".env").read_text())
    except PermissionError:
        return False
"""


async def test_the_samples_pass_in_a_session_of_their_own(postgres: Databases, tmp_path: Path) -> None:
    """On the run's PostgreSQL: starting one is tested in tests/embedded."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nleasehold_app = tests.app.kit_shop:app\npythonpath = src\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/kit_elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "src/.env").write_text("SECRET=1")
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/app/kit_sample.py"), "-q", "-p", "no:cacheprovider"]
    plugin = [] if _is_installed() else ["-p", "leasehold.testing.plugin"]
    process = await asyncio.create_subprocess_exec(
        *command, *plugin, "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "--noconftest",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "LEASEHOLD_TEST_DATABASE_URL": postgres.url, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert re.search(r"^27 passed in", output, re.MULTILINE), output[-6000:]


@pytest.mark.parametrize("free", [512 * MIB - 1, 512 * MIB])
def test_the_database_is_in_memory_only_where_it_has_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A container has 64 MiB by default: the first test of an app failed there with a full disk."""
    usage = shutil.disk_usage(server._MEMORY)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    monkeypatch.delenv("LEASEHOLD_TMP", raising=False)
    monkeypatch.delenv("LEASEHOLD_TEST_DATABASE_URL", raising=False)
    with TestServer() as started:
        directory = started.portal.call(directory_of(started.database()))
    assert Path(directory).is_relative_to(server._MEMORY) == (free >= 512 * MIB)


def test_the_server_goes_although_its_databases_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_TEST_DATABASE_URL", raising=False)
    started = TestServer()
    started.__enter__()
    directory = Path(started.portal.call(directory_of(started.database())))
    os.kill(int((directory / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    with pytest.raises(OSError, match="onnect"):
        started.__exit__()
    assert not directory.exists()


def test_the_database_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEASEHOLD_TMP", str(tmp_path))
    assert server._memory() is None


async def directory_of(url: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval("SHOW data_directory"))
    finally:
        await connection.close()


async def test_an_app_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("number = 1")
    for option, reason in (
        ("shopp:app", "No module named 'shopp'"),
        ("shop:app", "shop.py has no 'app'"),
        ("shop:number", "it is an int, not an App"),
        (":app", "names no module"),
    ):
        output = await _output_of_session(tmp_path, option)
        assert re.search(rf"^E +leasehold_app = {option}: .*{reason}", output, re.MULTILINE) or (
            f"leasehold_app = {option}: " in output and reason in output
        ), output
        assert "importlib" not in output


async def test_an_error_of_the_apps_own_module_is_shown(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from shop_parts import prices\n")
    (tmp_path / "shop_parts.py").write_text("prices = {}.itemz()\n")
    output = await _output_of_session(tmp_path, "shop:app")
    place = re.escape(str(tmp_path / "shop_parts.py:1"))
    assert re.search(rf"leasehold_app = shop:app cannot be loaded: AttributeError at {place}", output), output
    assert "AttributeError: 'dict' object has no attribute 'itemz'" in output
    assert "importlib" not in output


async def _output_of_session(folder: Path, option: str) -> str:
    """The output of a session with one test, which uses the app that the ini option names."""
    (folder / "test_shop.py").write_text("def test_shop(leasehold_app): ...\n")
    (folder / "pytest.ini").write_text(f"[pytest]\nleasehold_app = {option}\n")
    plugin = [] if _is_installed() else ["-p", "leasehold.testing.plugin"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", *plugin, cwd=folder, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "LEASEHOLD_TEST_DATABASE_URL": "postgresql://nowhere/", "PYTHONPATH": str(folder)},
    )  # fmt: skip
    return (await process.communicate())[0].decode()


def _is_installed() -> bool:
    """Whether this environment was made since the package has the entry point."""
    return "leasehold" in {entry.name for entry in entry_points(group="pytest11")}
