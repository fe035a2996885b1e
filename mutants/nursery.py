"""`python -m mutants.nursery`, in a copy of the checkout: judges one mutant after another, each in a fork of itself.

The process has loaded pytest and all libraries, but no module of the repository: each fork loads these modules itself,
with the mutated file. The process reads orders as lines of JSON, and answers each order with a line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_LIBRARIES = """
import importlib, importlib.metadata, json, sys
for plugin in importlib.metadata.entry_points(group="pytest11"):
    plugin.load()
for name in (
    "tests.conftest", "tests.api.conftest", "tests.storage.conftest", "tests.unit.media.conftest",
    "leasehold.api.app", "leasehold.worker.main", "leasehold.cli.main",
):
    importlib.import_module(name)
ours = ("leasehold", "tests", "mutants", "chaos", "__main__")
print(json.dumps([name for name in sys.modules if name.partition(".")[0] not in ours]))
"""
_ROOT = Path.cwd()
RESULT = _ROOT / "mutant.json"
_LOG = _ROOT / "mutant.log"
#: The options of pytest. Its own tracebacks show lines of source: to find these would take a third of each fork's time.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=native")
_POLL_SECONDS = 0.005
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    load_libraries()
    adopt_orphans()
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - the answer
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(judge(order, _test)), flush=True)  # noqa: T201 - the answer


def adopt_orphans() -> None:
    """Orphans of the tests' processes become children of this process, which ends them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def load_libraries() -> None:
    """Import all libraries that the tests and the platform import."""
    listed = subprocess.run([sys.executable, "-c", _LIBRARIES], check=True, capture_output=True, text=True, cwd=_ROOT)
    for name in json.loads(listed.stdout.splitlines()[-1]):
        with suppress(ImportError):  # some modules can only be imported by their own library
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would go through all of it, and copy its pages


def judge(order: dict[str, Any], test: Callable[[dict[str, Any]], int]) -> dict[str, Any]:
    """Carry out an order: run `test` in a fork for at most `seconds`, while the file `path` has the content `text`."""
    path = _ROOT / order["path"]
    before = path.read_text()
    began = time.monotonic()
    RESULT.unlink(missing_ok=True)
    if order["text"] != before:
        _write(path, order["text"])
    try:
        code = _in_fork(order, test)
    finally:
        end_processes()
        if order["text"] != before:
            _write(path, before)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    return {**result, "code": code, "seconds": time.monotonic() - began}


def _write(path: Path, text: str) -> None:
    """Write the file, and delete its bytecode. Python would use old bytecode if the file has the same size and the same
    second of its last change.
    """
    path.write_text(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()


def _in_fork(order: dict[str, Any], test: Callable[[dict[str, Any]], int]) -> int | None:
    """Run `test` in a fork. Returns its exit code; None: it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 99
        try:
            code = test(order)
        except Exception:  # noqa: BLE001 - the log gets every error
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + order["seconds"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_SECONDS)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _test(order: dict[str, Any]) -> int:
    """In the fork: load the repository's modules, and run the tests of the order."""
    from mutants.judging import Judging, invalid_statement  # noqa: PLC0415 - only a fork loads the repository's modules

    try:
        error_text = invalid_statement(order["statements"], order["database"])
    except Exception as error:  # noqa: BLE001 - with the mutant, a module may fail to load in any way
        RESULT.write_text(json.dumps({"by": "import", "why": repr(error)}))
        return 1
    if error_text:
        RESULT.write_text(json.dumps({"invalid": error_text}))
        return 0
    files = sorted({test.partition("::")[0] for test in order["tests"]})
    # The process has loaded plugins before pytest could rewrite their asserts, and pytest would warn of that.
    warnings = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(
        pytest.main(["-x", *OPTIONS, *warnings, *files], plugins=[Judging(order["tests"], order["limits"], RESULT)])
    )


def end_processes() -> None:
    """Kill all processes that the fork left behind, with their descendants."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(child) for child in listed.split()]


if __name__ == "__main__":
    main()
