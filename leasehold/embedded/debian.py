"""Installs Debian packages without root. Apt downloads and verifies the packages, and this module unpacks them into a
private directory. `rabbitmq_install` calls this module.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leasehold.embedded.process import EmbeddedError, kill_if_running

DOWNLOAD_SECONDS = 300.0  # the longest time that one call of apt-get or dpkg-deb may take
MESSAGE_LINES = 5  # how many of the last lines of a failed program's output the error shows
#: Matches each line of a simulated `apt-get install` that names a package to install. The group is the package's name.
_PACKAGE_LINE = re.compile(r"^Inst (\S+)", re.MULTILINE)


async def unpack_packages(names: Sequence[str], target: Path, *, with_missing: bool = False) -> None:
    """Download the packages `names` and unpack them into `target`. Nothing is installed in the system itself.
    `with_missing`: also download and unpack the dependencies that the system lacks.

    Raises:
        EmbeddedError: the system is neither Debian nor Ubuntu, or a download failed.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise EmbeddedError("packages can be downloaded on Debian and Ubuntu only: this system has no apt-get")
    with tempfile.TemporaryDirectory(prefix="leasehold-apt-") as scratch:
        work = Path(scratch)
        for directory in ("archives", "state/lists/partial", "cache/archives/partial"):
            (work / directory).mkdir(parents=True)
        await _download(names, work, with_missing=with_missing)
        for package in sorted((work / "archives").glob("*.deb")):
            await _run(["dpkg-deb", "-x", str(package), str(target)], work)


async def _download(names: Sequence[str], work: Path, *, with_missing: bool) -> None:
    """Download with the system's package lists. If that fails (they may be missing or old), use new private lists."""
    try:
        await _download_by_lists(names, work, None, with_missing=with_missing)
    except EmbeddedError:
        for package in (work / "archives").glob("*.deb"):
            package.unlink()  # its version may be older than that of the new lists
        await _run_apt(["update"], work, lists=work / "state")
        await _download_by_lists(names, work, work / "state", with_missing=with_missing)


async def _download_by_lists(names: Sequence[str], work: Path, lists: Path | None, *, with_missing: bool) -> None:
    """Download with the package lists in the directory `lists`; None: with the system's lists."""
    if with_missing:
        plan = await _run_apt(["install", "--simulate", "--no-install-recommends", *names], work, lists=lists)
        names = sorted({*names, *_PACKAGE_LINE.findall(plan)})
    await _run_apt(["download", *names], work, lists=lists)


async def _run_apt(arguments: Sequence[str], work: Path, *, lists: Path | None) -> str:
    options = {
        "Dir::Cache": str(work / "cache"),
        "APT::Sandbox::User": "",  # otherwise apt downloads as the user _apt, who cannot write to these directories
        "Debug::NoLocking": "1",
    }
    if lists is not None:
        options |= {"Dir::State": str(lists), "Dir::State::status": "/var/lib/dpkg/status"}
    flags = [flag for item in options.items() for flag in ("-o", "=".join(item))]
    return await _run(["apt-get", "-q", *flags, *arguments], work / "archives")


async def _run(argv: Sequence[str], cwd: Path) -> str:
    """Run the program. Returns its output. Raises EmbeddedError if it fails or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DOWNLOAD_SECONDS)
    except TimeoutError:
        raise EmbeddedError(f"{argv[0]} took longer than {DOWNLOAD_SECONDS:.0f} s") from None
    finally:
        await kill_if_running(process)
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-MESSAGE_LINES:]
        raise EmbeddedError("\n  ".join([f"{argv[0]} failed with {process.returncode}:", *lines]))
    return output.decode(errors="replace")
