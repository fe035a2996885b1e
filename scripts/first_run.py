"""What `scripts/first-run` does: install the wheel, write the README's shop.py, start it, submit, and read the clock.

With `--uv` uv installs it, as the README offers; else pip. With `--cold` the installer has an empty cache, and so has
Leasehold itself. The goals: 120 s cold, 15 s warm.
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
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
PATIENCE = 300.0
GOALS = {True: 120.0, False: 15.0}
#: What the reader's shell has; no setting of Leasehold's is among it.
KEPT = re.compile(r"PATH|HOME|LANG|PIP_.*|UV_.*|SSL_CERT_FILE|https?_proxy", re.IGNORECASE)


def typed() -> tuple[str, str, str, str]:
    """Four parts of the README: the code, the extras that pip and uv install, the submission, and its output."""
    part = README.partition("## Run your own function")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", part, re.DOTALL)
    pip = re.search(r"\$ pip install '?leasehold(\[[a-z,]+\])?'?", part)
    uv = pip and f"`uv pip install 'leasehold{pip[1] or ''}'`" in part
    dev = re.search(r"\$ leasehold dev shop:app\n", part)
    submitted = re.search(r"\$ python -c (\".*?\")\n(.*)\n", part)
    if code is None or not uv or pip is None or dev is None or submitted is None:
        raise SystemExit("the README's part 'Run your own function' has another shape: change scripts/first_run.py")
    return code[1], pip[1] or "", shlex.split(submitted[1])[0], submitted[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("installer", type=Path, help="the program uv, for --uv")
    parser.add_argument("--uv", action="store_true", help="install by uv, and not by pip")
    parser.add_argument("--cold", action="store_true", help="with empty caches")
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leasehold-first-run-") as scratch:
        seconds = measure(asked.wheel, Path(scratch), asked.installer if asked.uv else None, cold=asked.cold)
    total = sum(seconds.values())
    if asked.json:
        print(json.dumps({**seconds, "total": total, "cold": asked.cold, "uv": asked.uv}))
    else:
        for name, spent in seconds.items():
            print(f"{name:12} {spent:6.1f} s")
        print(f"{'in all':12} {total:6.1f} s; the goal is {GOALS[asked.cold]:g} s")
    return 0 if total < GOALS[asked.cold] else 1


def measure(wheel: Path, scratch: Path, uv: Path | None, *, cold: bool) -> dict[str, float]:
    """Seconds of each thing that the reader types. `uv`: the program; None: pip installs. Raises SystemExit with what
    went wrong.
    """
    code, extras, submission, printed = typed()
    folder, home = scratch / "mine", scratch / "venv"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    if cold:
        empty = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "XDG_CACHE_HOME": "cache"}
        environment |= {name: str(scratch / folder) for name, folder in empty.items()}
    seconds: dict[str, float] = {}

    def run(name: str, *command: str) -> str:
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        seconds[name] = time.monotonic() - began
        return done.stdout

    if uv is None:
        run("venv", sys.executable, "-m", "venv", str(home))
        run("pip install", str(home / "bin/pip"), "install", "--quiet", f"{wheel}{extras}")
    else:
        run("uv venv", str(uv), "venv", "--quiet", "--python", sys.executable, str(home))
        wanted = f"leasehold{extras} @ {wheel.as_uri()}"
        run("uv pip install", str(uv), "pip", "install", "--quiet", "--python", str(home), wanted)
    (folder / "shop.py").write_text(code)
    began = time.monotonic()
    dev = subprocess.Popen(
        [str(home / "bin/leasehold"), "dev", "shop:app"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until_it_serves(dev, folder)
        seconds["leasehold dev"] = time.monotonic() - began
        answer = run("first run", str(home / "bin/python"), "-c", submission)
    finally:
        dev.send_signal(signal.SIGINT)
        dev.communicate(timeout=PATIENCE)
    if answer.strip() != printed:
        raise SystemExit(f"the README prints {printed!r}, and the run gave {answer!r}")
    return seconds


def until_it_serves(dev: subprocess.Popen[str], folder: Path) -> None:
    """Return when `leasehold dev` has written the file that programs of the folder read."""
    deadline = time.monotonic() + PATIENCE
    while not (folder / ".leasehold/dev.env").exists():
        if dev.poll() is not None or time.monotonic() > deadline:
            output = dev.communicate(timeout=PATIENCE)[0] if dev.poll() is not None else ""
            raise SystemExit(f"leasehold dev did not come up:\n{output}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
