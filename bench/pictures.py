"""`pictures`: pictures a second on all cores, each one made into the same three files: by the platform, every file
stored and every step committed, and by libraries called directly, a process a core.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.figure import Figure, Goal
from bench.image import ok, serving, uploaded
from bench.jobs import until_finished
from bench.peers.peer import Install, installed, with_npm, with_pip
from bench.picture import photograph
from bench.scale import Scale
from bench.testbed import Testbed

_DRIVERS = Path(__file__).parent / "peers/drivers"
_PATIENCE = 180.0
_RATE = """
SELECT count(*) / extract(epoch FROM max(finished_at) - min(created_at))::float8 FROM job
WHERE created_at > (SELECT min(finished_at) FROM job)
"""


@dataclass(frozen=True, slots=True)
class _Library:
    """`run`: what runs its driver, below where it is installed, or of the machine."""

    name: str
    requirements: tuple[str, ...]
    driver: str
    install: Install = with_pip
    run: str = "bin/python"


LIBRARIES = (
    _Library("Pillow 13.0.0", ("pillow==13.0.0",), "pillow_driver.py"),
    _Library("pyvips 3.2.0, libvips 8.18.7", ("pyvips==3.2.0", "pyvips-binary==8.18.7"), "pyvips_driver.py"),
    _Library("OpenCV 5.0.0", ("opencv-python-headless==5.0.0.93",), "opencv_driver.py"),
    _Library("sharp 0.35.5", ("sharp@0.35.5",), "sharp_driver.mjs", with_npm, "node"),
)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """In turns. A library that cannot be installed or run here is told as such, with a rate of nothing."""
    picture = await asyncio.to_thread(photograph, scale.picture_width, scale.picture_height)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {library.name: [] for library in LIBRARIES}
    broken: dict[str, str] = {}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        ours.append(await _platform(testbed, scale, picture))
        for library in LIBRARIES:
            if library.name not in broken:
                try:
                    theirs[library.name].append(await _library(library, picture, scale.pictures_seconds))
                except (RuntimeError, TimeoutError) as error:
                    broken[library.name] = f"{type(error).__name__}: {error}"[:500]
    best = max((rates for name, rates in theirs.items() if name not in broken), key=median, default=[0.0])
    return [
        Figure("pictures, the platform", "pictures/s", tuple(ours), tuple(load), Goal(round(median(best), 2), True)),
        *(
            Figure(f"pictures, {name}", "pictures/s", tuple(rates) if name not in broken else (0.0,), tuple(load),
                   details={"broken": broken[name]} if name in broken else {})
            for name, rates in theirs.items()
        ),
    ]  # fmt: skip


async def _platform(testbed: Testbed, scale: Scale, picture: bytes) -> float:
    """One worker with a child a core, all pictures uploaded before the first is completed."""
    async with serving(testbed) as platform:
        for count in (os.cpu_count() or 1, scale.pictures):  # the first warm the children up
            tickets = [await uploaded(platform.client, picture) for _ in range(count)]
            await asyncio.gather(*(ok(platform.client.post("/complete-upload", json=ticket)) for ticket in tickets))
            await until_finished(platform.installation, platform.worker)
        rate: float = await platform.connection.fetchval(_RATE)
        return rate


async def _library(library: _Library, picture: bytes, seconds: float) -> float:
    """A process a core at once. Raises RuntimeError, TimeoutError."""
    home = await installed("pictures-" + library.driver.partition("_")[0], library.requirements, library.install)
    program = str(home / library.run) if "/" in library.run else library.run
    with tempfile.TemporaryDirectory() as directory:
        original = Path(directory) / "original.jpg"
        original.write_bytes(picture)

        async def one(number: int) -> float:
            scratch = Path(directory) / str(number)
            scratch.mkdir()
            process = await asyncio.create_subprocess_exec(
                program, str(_DRIVERS / library.driver), str(original), str(scratch), str(seconds),
                env=os.environ | {"PEER_HOME": str(home)},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                said, errors = await asyncio.wait_for(process.communicate(), _PATIENCE)
            except TimeoutError:
                process.kill()
                raise
            if process.returncode != 0:
                raise RuntimeError(errors.decode(errors="replace")[-500:])
            return float(said)

        return sum(await asyncio.gather(*(one(number) for number in range(os.cpu_count() or 1))))
