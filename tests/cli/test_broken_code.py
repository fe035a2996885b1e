"""The user's own module fails while it is imported: a real process prints where, and nothing of the platform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.cli import reloading
from leasehold.cli.running import BROKEN_CODE

LEASEHOLD = str(Path(sys.executable).parent / "leasehold")
SHOP = "from leasehold import App\nimport parts.inner\napp = App('shop')\n"
#: What the user's inner module has; how the traceback ends; and the error that the sentence under it names.
BROKEN = {
    "1/0": ("ZeroDivisionError: division by zero", "ZeroDivisionError"),
    "x = (": ("SyntaxError: '(' was never closed", "SyntaxError"),
    "import nosuchmodule": ("ModuleNotFoundError: No module named 'nosuchmodule'", "ModuleNotFoundError"),
    "raise SystemExit(0)": ("SystemExit: 0", "SystemExit"),
    "from leasehold import Pipelines\nPipelines(1)": ("AttributeError: ", "AttributeError"),
    "try:\n    1/0\nexcept ZeroDivisionError:\n    {}['x']": ("KeyError: 'x'", "KeyError"),
}


def _run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")} | variables
    return subprocess.run(list(arguments), cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip


def _shop(folder: Path, code: str) -> Path:
    (folder / "shop.py").write_text(SHOP)
    (folder / "parts").mkdir()
    (folder / "parts" / "inner.py").write_text(f"{code}\n")
    return folder


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("command", ["worker", "dev"])
def test_a_module_that_raises_shows_the_users_frames_and_one_sentence(tmp_path: Path, command: str, code: str) -> None:
    ended = _run(_shop(tmp_path, code), LEASEHOLD, command, "shop:app")
    last, error = BROKEN[code]
    assert (ended.returncode, ended.stdout) == (BROKEN_CODE, "")
    *trace, sentence = ended.stderr.splitlines()
    place = f"{tmp_path / 'parts' / 'inner.py'}:{len(code.splitlines())}"
    assert sentence == f"leasehold: shop:app cannot be loaded: {error} at {place}"
    assert any(line.startswith(last) for line in trace)
    files = {line.split('"')[1] for line in trace if line.lstrip().startswith("File ")}
    assert files == {str(tmp_path / "shop.py"), str(tmp_path / "parts" / "inner.py")}


def test_a_module_that_is_not_there_and_a_wrong_declaration_stay_one_sentence(tmp_path: Path) -> None:
    """Both name what to change; a traceback would say nothing more."""
    missing = _run(tmp_path, LEASEHOLD, "worker", "shop:app")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "No module named 'shop'" in missing.stderr
    (tmp_path / "shop.py").write_text("from leasehold import App\napp = App('shop')\n@app.task\ndef f(x): ...\n")
    wrong = _run(tmp_path, LEASEHOLD, "worker", "shop:app")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "shop.py:3" in wrong.stderr
    (tmp_path / "shop.py").write_text("from leasehold import App\napp = App('shop')\n")
    misspelt = _run(tmp_path, LEASEHOLD, "worker", "shop:ap")
    assert misspelt.stderr == f"leasehold: cannot load pipelines from 'shop:ap': {tmp_path}/shop.py has no 'ap'\n"


@pytest.mark.parametrize("module", ["leasehold.worker", "leasehold.api"])
def test_a_deployed_program_logs_the_users_frames_and_has_the_same_status(tmp_path: Path, module: str) -> None:
    ended = _run(_shop(tmp_path, "1/0"), sys.executable, "-m", module, LEASEHOLD_PIPELINES="shop:app")
    assert ended.returncode == BROKEN_CODE
    assert "ZeroDivisionError at" in ended.stdout + ended.stderr
    assert "importlib" not in ended.stdout + ended.stderr
    assert "registry.py" not in ended.stdout + ended.stderr


async def test_a_change_that_breaks_the_module_is_reported_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_shop(tmp_path, "import sys\nsys.stderr.write('noise of mine')\n1/0"))
    code = {"LEASEHOLD_PIPELINES": "shop:app"}
    problem = await reloading._problem(code)
    assert problem is not None
    sentence, *trace = problem.splitlines()
    assert sentence == f"shop:app cannot be loaded: ZeroDivisionError at {tmp_path / 'parts' / 'inner.py'}:3"
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: division by zero")
    (tmp_path / "shop.py").write_text("from leasehold import App\napp = App('shop')\n@app.task\ndef f(x): ...\n")
    assert "shop.py:3" in (await reloading._problem(code) or "").splitlines()[0]
    (tmp_path / "shop.py").write_text("from leasehold import App\napp = App('shop')\n")
    assert await reloading._problem(code) is None
