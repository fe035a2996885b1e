"""`pictures`: pictures a second on all cores, by the platform and by libraries. Each picture becomes the same three
files. The platform stores every file and commits every step. A library is called directly, in a process for each core.
For the platform, also the CPU time of a picture by process, and the rate of small pictures.
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
from bench.peers.peer import Install, install_once, with_npm, with_pip
from bench.picture import photograph
from bench.processes import Meter
from bench.scale import Scale
from bench.testbed import Testbed

_DRIVERS = Path(__file__).parent / "peers/drivers"
_PATIENCE_SECONDS = 180.0
#: The processes (bench/processes.py) whose CPU time is a figure. A worker's children count as the worker.
_ROLES = ("worker", "s3", "postgres")
_RATE = """
SELECT count(*) / extract(epoch FROM max(finished_at) - min(created_at))::float8 FROM job
WHERE created_at > (SELECT min(finished_at) FROM job)
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of the platform. `rate`: pictures a second. `cpu`: milliseconds of CPU a picture, by role of a process."""

    rate: float
    cpu: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Library:
    """`run`: the program that runs its driver: a path below the library's directory, or a program of the machine."""

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
    """Measure all in turns. A library that cannot be installed or run here gets the rate 0, and the reason in the
    details.
    """
    picture = await asyncio.to_thread(photograph, scale.picture_width, scale.picture_height)
    small = await asyncio.to_thread(photograph, scale.small_picture_width, scale.small_picture_height)
    runs: list[_Run] = []
    small_runs: list[_Run] = []
    rates_by_library: dict[str, list[float]] = {library.name: [] for library in LIBRARIES}
    errors: dict[str, str] = {}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        runs.append(await _platform(testbed, picture, scale.pictures))
        small_runs.append(await _platform(testbed, small, scale.small_pictures))
        for library in LIBRARIES:
            if library.name not in errors:
                try:
                    rates_by_library[library.name].append(await _library(library, picture, scale.pictures_seconds))
                except (RuntimeError, TimeoutError) as error:
                    errors[library.name] = f"{type(error).__name__}: {error}"[:500]
    best = max((rates for name, rates in rates_by_library.items() if name not in errors), key=median, default=[0.0])
    rates = tuple(run.rate for run in runs)
    return [
        Figure("pictures, the platform", "pictures/s", rates, tuple(load), Goal(round(median(best), 2), True)),
        *(
            Figure(f"CPU of a picture, the platform: {role}", "ms", tuple(run.cpu[role] for run in runs), tuple(load))
            for role in _ROLES
        ),
        Figure("small pictures, the platform", "pictures/s", tuple(run.rate for run in small_runs), tuple(load),
               details={"picture_bytes": len(small), "cpu_ms_a_picture": [run.cpu for run in small_runs]}),
        *(
            Figure(f"pictures, {name}", "pictures/s", tuple(library_rates) if name not in errors else (0.0,),
                   tuple(load),
                   details={"broken": errors[name]} if name in errors else {})
            for name, library_rates in rates_by_library.items()
        ),
    ]  # fmt: skip


async def _platform(testbed: Testbed, picture: bytes, pictures: int) -> _Run:
    """A run of one worker with a child for each core. The bench uploads all pictures before it completes the first
    upload.
    """
    async with serving(testbed) as platform:
        for count in (os.cpu_count() or 1, pictures):  # the first pictures warm the children up
            tickets = [await uploaded(platform.client, picture) for _ in range(count)]
            with Meter() as meter:
                await asyncio.gather(*(ok(platform.client.post("/complete-upload", json=ticket)) for ticket in tickets))
                await until_finished(platform.installation, platform.worker)
        rate: float = await platform.connection.fetchval(_RATE)
        return _Run(rate, {role: round(1000 * seconds / pictures, 1) for role, seconds in meter.by_role.items()})


async def _library(library: _Library, picture: bytes, seconds: float) -> float:
    """The rate of one process for each core, all at once. Raises RuntimeError or TimeoutError."""
    home = await install_once("pictures-" + library.driver.partition("_")[0], library.requirements, library.install)
    program = str(home / library.run) if "/" in library.run else library.run
    with tempfile.TemporaryDirectory() as directory:
        original = Path(directory) / "original.jpg"
        original.write_bytes(picture)

        async def rate_of_process(number: int) -> float:
            scratch = Path(directory) / str(number)
            scratch.mkdir()
            process = await asyncio.create_subprocess_exec(
                program, str(_DRIVERS / library.driver), str(original), str(scratch), str(seconds),
                env=os.environ | {"PEER_HOME": str(home)},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                output, errors = await asyncio.wait_for(process.communicate(), _PATIENCE_SECONDS)
            except TimeoutError:
                process.kill()
                raise
            if process.returncode != 0:
                raise RuntimeError(errors.decode(errors="replace")[-500:])
            return float(output)

        return sum(await asyncio.gather(*(rate_of_process(number) for number in range(os.cpu_count() or 1))))
