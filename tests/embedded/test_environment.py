"""scripts/env.sh: what a machine without our tools gets to see."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-c", f'. "{ROOT}/scripts/env.sh"\n{script}'],
        env={"HOME": os.environ.get("HOME", "/"), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_python_3_11_it_says_so(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    answer = bash(f'PATH="{tmp_path}" find_python')
    assert answer.returncode == 1
    assert "needs Python 3.11 or newer" in answer.stderr


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    script = f"""
        venv="{tmp_path}"; stamp_of all >"$venv/leasehold-stamp"
        find_python() {{ fail "it looked for a Python"; }}
        make_environment && make_environment run && echo untouched
    """
    answer = bash(script)
    assert answer.stdout == "untouched\n"


def test_the_environment_of_a_copied_checkout_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """It would run the code of the checkout from which it was copied."""
    stamps = []
    for place in ("one", "two"):
        (tmp_path / place / "scripts").mkdir(parents=True)
        for name in ("scripts/env.sh", "uv.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path / place / name)
        answer = subprocess.run(
            ["/bin/bash", "-c", f'. "{tmp_path}/{place}/scripts/env.sh"; stamp_of run'],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        stamps.append(answer.stdout.split())
    assert [profile for profile, _ in stamps] == ["run", "run"]
    assert stamps[0] != stamps[1]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A package index with one forged uv: its page promises the sum that we want, the file has another."""
    served = tmp_path / "index"
    (served / "uv").mkdir(parents=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_forged_download_is_refused(index: tuple[Path, str], tmp_path: Path) -> None:
    served, url = index
    promised = hashlib.sha256(b"the real one").hexdigest()
    names = [
        f"uv-0.13.8-py3-none-{system}_{machine}.whl"
        for system in ("manylinux_2_17", "musllinux_1_1", "macosx_11_0")
        for machine in ("x86_64", "aarch64", "arm64")
    ]
    requirements = tmp_path / "uv.txt"
    requirements.write_text(f"uv==0.13.8 --hash=sha256:{promised}\n")
    for name in names:
        (served / "uv" / name).write_bytes(b"a forged one")
        (served / "uv" / "index.html").write_text(f'<a href="{name}#sha256={promised}">{name}</a>')
        answer = subprocess.run(
            [sys.executable, "-I", ROOT / "scripts" / "fetch_uv.py", requirements, tmp_path / "uv"],
            env={"PIP_INDEX_URL": url, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 1
        assert not (tmp_path / "uv").exists()
        if "a sha256 sum that scripts/uv.txt does not have" in answer.stderr:
            return
    pytest.fail("no name fitted this machine")
