"""Makes a copy of the checkout, with a Python environment of its own. The mutated file is a file of the copy.

Every process that a test starts runs `sys.executable`, which is the copy's Python. So it loads the mutated file, even
if its parent changes the environment variables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from mutants.places import ROOT


def make_copy(directory: Path) -> Path:
    """Copy the checkout to `directory`: the files that git lists, with their uncommitted changes. Returns the Python of
    the copy.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, directory / name
        if not name or not (source.is_symlink() or source.exists()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    return _make_environment(directory)


def _make_environment(directory: Path) -> Path:
    """Make an environment that finds the modules of the copy first, then everything that this environment has."""
    own = directory / ".venv"
    packages = own / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (own / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (own / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    python = own / "bin" / "python"
    python.symlink_to(base)
    (own / "bin" / "python3").symlink_to(base)
    here = Path(sysconfig.get_path("purelib"))
    lines = [str(directory), f"import site; site.addsitedir({str(here)!r})", "import mutants.tracing.processes"]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    for program in Path(sys.executable).parent.iterdir():
        if not (own / "bin" / program.name).exists():
            _link(program, own / "bin" / program.name, python)
    return python


def _link(program: Path, target: Path, python: Path) -> None:
    """Put a program of this environment into the copy's. A script for this Python becomes one for the copy's Python;
    any other program becomes a link.
    """
    own_interpreter = f"#!{sys.executable}".encode()
    with program.open("rb") as file:
        is_script = file.read(2) == b"#!"
    data = program.read_bytes() if is_script else b""
    if data.partition(b"\n")[0].startswith(own_interpreter.rpartition(b"/")[0]):
        target.write_bytes(f"#!{python}\n".encode() + data.partition(b"\n")[2])
        target.chmod(0o755)
    else:
        target.symlink_to(os.path.realpath(program))
