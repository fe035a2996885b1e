"""Finds Chromium for the tests of pages: the system's, else Debian's packages, unpacked into the cache without root."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.async_api import Browser, async_playwright

from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.process import EmbeddedError

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-noto-core")


@dataclass(frozen=True)
class Chromium:
    program: str
    environment: dict[str, str] = field(default_factory=dict)


def find_chromium() -> Chromium | None:
    """The Chromium at $LEASEHOLD_TEST_CHROMIUM, else the system's, else the one that `install_chromium` unpacked."""
    if configured := os.environ.get("LEASEHOLD_TEST_CHROMIUM"):
        return Chromium(configured)
    for name in _PROGRAMS:
        if path := shutil.which(name):
            return Chromium(path)
    return _at(_unpacked())


def _at(root: Path) -> Chromium | None:
    program = root / "usr/lib/chromium/chromium"
    if not program.exists():
        return None
    libraries = [*root.glob("usr/lib/*-gnu"), *root.glob("usr/lib/*-gnu/*/"), *root.glob("lib/*-gnu")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "XDG_DATA_DIRS": f"{root / 'usr/share'}:/usr/local/share:/usr/share",
    }
    return Chromium(str(program), environment)


async def install_chromium() -> Chromium:
    """Find Chromium, or unpack it (about 100 MB to download). Raises EmbeddedError if this machine cannot have it."""
    target = _unpacked()
    with (target.parent / "chromium.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # another run may be unpacking it now
        if chromium := find_chromium():
            return chromium
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
            root = Path(scratch) / "root"
            root.mkdir(mode=0o755)
            await unpack_packages(_PACKAGES, root, with_missing=True)
            root.rename(target)
    installed = _at(target)
    if installed is None:
        raise EmbeddedError("the unpacked packages have no chromium at the expected path")
    return installed


def _unpacked() -> Path:
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # not Linux
        release = {}
    parts = ["chromium", release.get("ID", "linux"), release.get("VERSION_ID", "0"), platform.machine()]
    return cache_directory() / "-".join(parts)


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Yields a headless browser. Raises EmbeddedError if this machine cannot have Chromium."""
    chromium = await install_chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.program,
            env={**os.environ, **chromium.environment},
            args=["--disable-gpu", "--disable-software-rasterizer"],  # to emulate a GPU takes a tenth of the CPU time
            timeout=120_000,  # milliseconds: a browser starts slowly on a busy machine
        )
        yield browser
        await browser.close()
