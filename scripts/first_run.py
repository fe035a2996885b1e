"""Measures the time from an empty folder to the first finished run, by the commands of the README.

It installs the wheel, writes the README's shop.py, starts `leasehold dev` and submits a run. uv installs the wheel with
`--uv`; otherwise pip does. With `--cold`, the caches of the installer and of Leasehold are empty. The goals: 120 s
cold, 15 s warm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

README = (Path(__file__).parents[1] / "README.md").read_text()
PATIENCE = 300.0
#: Whether the caches are empty -> the goal in seconds.
GOALS = {True: 120.0, False: 15.0}
#: The environment variables that the commands get, as from a reader's shell. No setting of Leasehold is among them.
VARIABLES_OF_A_SHELL = re.compile(r"PATH|HOME|LANG|PIP_.*|UV_.*|SSL_CERT_FILE|https?_proxy", re.IGNORECASE)


class Instructions(NamedTuple):
    """The part "Run your own function" of the README. `code`: the text of shop.py. `extras`: those of the package, such
    as "[embedded]". `submission`: the Python program that submits a run. `output`: the output of this program.
    """

    code: str
    extras: str
    submission: str
    output: str


def instructions() -> Instructions:
    """Read the README. Raises SystemExit if the part has another shape than this script expects."""
    part = README.partition("## Run your own function")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", part, re.DOTALL)
    pip = re.search(r"\$ pip install '?leasehold(\[[a-z,]+\])?'?", part)
    uv = pip and f"`uv pip install 'leasehold{pip[1] or ''}'`" in part
    dev = re.search(r"\$ leasehold dev shop:app\n", part)
    python = re.search(r"\$ python -c (\".*?\")\n(.*)\n", part)
    if code is None or not uv or pip is None or dev is None or python is None:
        raise SystemExit("the README's part 'Run your own function' has another shape: change scripts/first_run.py")
    return Instructions(code[1], pip[1] or "", shlex.split(python[1])[0], python[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("installer", type=Path, help="the program uv, for --uv")
    parser.add_argument("--uv", action="store_true", help="install by uv, and not by pip")
    parser.add_argument("--cold", action="store_true", help="with empty caches")
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leasehold-first-run-") as scratch:
        seconds = measure(options.wheel, Path(scratch), options.installer if options.uv else None, cold=options.cold)
    total = sum(seconds.values())
    if options.json:
        print(json.dumps({**seconds, "total": total, "cold": options.cold, "uv": options.uv}))
    else:
        for name, spent in seconds.items():
            print(f"{name:12} {spent:6.1f} s")
        print(f"{'in all':12} {total:6.1f} s; the goal is {GOALS[options.cold]:g} s")
    return 0 if total < GOALS[options.cold] else 1


class Reader:
    """Runs the commands of a reader of the README. `folder`: their folder. `seconds`: the time of each command."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self._environment = environment

    def run(self, name: str, *command: str) -> str:
        """Run a command to its end. Returns its output. Raises SystemExit if it fails."""
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        self.seconds[name] = time.monotonic() - began
        return done.stdout

    @contextmanager
    def leasehold_dev(self, home: Path) -> Iterator[None]:
        """`leasehold dev` serves inside the block, and is stopped by Ctrl-C at its end."""
        began = time.monotonic()
        dev = subprocess.Popen(
            [str(home / "bin/leasehold"), "dev", "shop:app"],
            cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            until_it_serves(dev, self.folder)
            self.seconds["leasehold dev"] = time.monotonic() - began
            yield
        finally:
            dev.send_signal(signal.SIGINT)
            dev.communicate(timeout=PATIENCE)


def measure(wheel: Path, scratch: Path, uv: Path | None, *, cold: bool) -> dict[str, float]:
    """The seconds of each command. `uv`: the path of uv; None: pip installs the wheel. Raises SystemExit if a command
    fails, or if its output is not the README's.
    """
    readme = instructions()
    home = scratch / "venv"
    reader = Reader(scratch / "mine", _environment(scratch, cold=cold))
    reader.folder.mkdir()
    _install(reader, home, wheel, readme.extras, uv)
    (reader.folder / "shop.py").write_text(readme.code)
    with reader.leasehold_dev(home):
        output = reader.run("first run", str(home / "bin/python"), "-c", readme.submission)
    if output.strip() != readme.output:
        raise SystemExit(f"the README says that the program prints {readme.output!r}, and it printed {output!r}")
    return reader.seconds


def _environment(scratch: Path, *, cold: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if VARIABLES_OF_A_SHELL.fullmatch(name)}
    if cold:
        caches = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "XDG_CACHE_HOME": "cache"}
        environment |= {name: str(scratch / folder) for name, folder in caches.items()}
    return environment


def _install(reader: Reader, home: Path, wheel: Path, extras: str, uv: Path | None) -> None:
    """Make the virtual environment `home`, and install the wheel into it."""
    if uv is None:
        reader.run("venv", sys.executable, "-m", "venv", str(home))
        reader.run("pip install", str(home / "bin/pip"), "install", "--quiet", f"{wheel}{extras}")
    else:
        reader.run("uv venv", str(uv), "venv", "--quiet", "--python", sys.executable, str(home))
        package = f"leasehold{extras} @ {wheel.as_uri()}"
        reader.run("uv pip install", str(uv), "pip", "install", "--quiet", "--python", str(home), package)


def until_it_serves(dev: subprocess.Popen[str], folder: Path) -> None:
    """Wait until `leasehold dev` has written the file from which programs of the folder read its address."""
    deadline = time.monotonic() + PATIENCE
    while not (folder / ".leasehold/dev.env").exists():
        if dev.poll() is not None or time.monotonic() > deadline:
            output = dev.communicate(timeout=PATIENCE)[0] if dev.poll() is not None else ""
            raise SystemExit(f"leasehold dev did not come up:\n{output}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
