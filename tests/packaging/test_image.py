"""The steps of deploy/Dockerfile, done by hand where there is no engine: what an image would have is started with the
image's user, variables, folder and command, and asked whether it is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from leasehold.embedded.ports import free_port
from leasehold.embedded.process import kill_if_running
from tests.packaging.built import PATIENCE, ROOT, Environment, run, uv
from tests.support.databases import Databases

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
#: What the builder may see.
CONTEXT = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
#: Debian's Python, as in the image: another user must be able to run it.
DEBIANS = Path("/usr/bin/python3")


def instructions(stage: str) -> list[tuple[str, str]]:
    """Those of the stage, after those of the stage that it is made from."""
    text = re.search(rf"^FROM (\S+) AS {stage}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert text is not None, stage
    parent = instructions(text[1]) if re.search(rf"^FROM \S+ AS {text[1]}$", DOCKERFILE, re.MULTILINE) else []
    lines = [line for line in text[2].splitlines() if line and not line.startswith("#")]
    return [*parent, *((name, rest) for name, _, rest in (line.partition(" ") for line in lines))]


def python() -> str:
    """The interpreter of the image: one that every user may run, if this machine has one of this version."""
    own = Path(sys.executable).resolve()
    debians = DEBIANS.resolve()
    others = [debians] if debians.name == f"python{sys.version_info.major}.{sys.version_info.minor}" else []
    return str(next((path for path in (own, *others) if is_for_everybody(path)), own))


def is_for_everybody(path: Path) -> bool:
    return path.exists() and all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def follow(stage: str, app: Path, build_arguments: dict[str, str]) -> None:
    """What the engine does in /app. uv itself is here already. Nothing is compiled: that takes longer than all else."""
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    variables |= {"UV": uv(), "UV_PYTHON": python(), "UV_PYTHON_DOWNLOADS": "never"}
    for instruction, rest in instructions(stage):
        words = shlex.split(rest)
        match instruction:
            case "ARG":
                name, _, value = rest.partition("=")
                variables[name] = build_arguments.get(name, value)
            case "COPY" if words[-1] != "/tmp/uv.txt":  # noqa: S108 - the image's
                *sources, target = words
                assert set(sources) <= CONTEXT
                for source in sources:
                    copy(ROOT / source, app / target)
            case "RUN" if words[0] != "pip":
                assert words[:2] == ["uv", "sync"]
                run(["/bin/sh", "-c", f'uv() {{ "$UV" "$@"; }}; {rest}'], cwd=app, env=variables)
            case "WORKDIR":
                assert rest == "/app"


def copy(source: Path, target: Path) -> None:
    """As the engine: a folder's content, and its links as links."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def can_import(programs: Environment, *names: str) -> str:
    return programs.python(
        f"from importlib.util import find_spec; print([n for n in {names!r} if find_spec(n)])"
    ).strip()


@dataclass(frozen=True)
class Image:
    """`build_arguments`: each `--build-arg` of its build. `app`: its /app. `scratch`: its /tmp, the only folder that
    its user may write to.
    """

    stage: str
    build_arguments: dict[str, str]
    app: Path
    scratch: Path

    def build(self) -> None:
        """Follow the stage that `.venv` is copied from, and keep what is copied."""
        (source,) = {rest for name, rest in instructions(self.stage) if name == "COPY"}
        (built,) = re.findall(r"--from=(\S+) /app/.venv /app/.venv", source)
        follow(built, self.app, self.build_arguments)
        for entry in self.app.iterdir():
            if entry.name != ".venv":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    @property
    def command(self) -> list[str]:
        command: list[str] = json.loads(dict(instructions(self.stage))["CMD"])
        return command

    @property
    def user(self) -> tuple[int, int]:
        """The ids of user and group."""
        user, group = dict(instructions(self.stage))["USER"].split(":")
        return int(user), int(group)

    def variables(self, settings: dict[str, str]) -> dict[str, str]:
        """Those of the image, with the settings: nothing of this machine's."""
        environment: dict[str, str] = {}
        for name, rest in instructions(self.stage):
            if name == "ENV":
                environment |= dict(word.split("=", 1) for word in shlex.split(rest))
        path = environment["PATH"].replace("/app", str(self.app)).replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
        leasehold = {f"LEASEHOLD_{name}": value for name, value in settings.items()}
        return environment | leasehold | {"PATH": path, "HOME": "/nonexistent", "TMPDIR": str(self.scratch)}

    async def run(self, *command: str, settings: dict[str, str]) -> asyncio.subprocess.Process:
        """Start the command as the image's user, if this process may and that user can run the interpreter."""
        user, group = self.user if os.geteuid() == 0 and is_for_everybody(Path(python())) else (None, None)
        variables = self.variables(settings)
        program = shutil.which(command[0], path=variables["PATH"])
        assert program is not None
        with (self.scratch / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                program, *command[1:], cwd=self.app, env=variables, stdout=log, stderr=log, user=user, group=group
            )

    @asynccontextmanager
    async def ready(self, url: str, settings: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
        """For the block, the image's command runs, and has answered that it is ready. Its stop signal ends it well."""
        process = await self.run(*self.command, settings=settings)
        try:
            async with httpx2.AsyncClient() as client, asyncio.timeout(PATIENCE):
                while not await answers(client, f"{url}/readyz"):
                    assert process.returncode is None, self.log()
                    await asyncio.sleep(0.05)
            yield process
            process.send_signal(signal.Signals[dict(instructions(self.stage))["STOPSIGNAL"]])
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0, self.log()
        finally:
            await kill_if_running(process)

    def log(self) -> str:
        return (self.scratch / "log").read_text()[-4000:]


async def answers(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The image of the target, built with the arguments. Its folders are nobody else's: other users may read them."""
    stage, build_arguments = request.param
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    try:
        for name in ("app", "tmp"):
            (home / name).mkdir()
        (home / "tmp").chmod(0o777)
        image = Image(stage, build_arguments, home / "app", home / "tmp")
        image.build()
        yield image
    finally:
        shutil.rmtree(home)


def uid_of(process: asyncio.subprocess.Process) -> int:
    return Path(f"/proc/{process.pid}").stat().st_uid


@pytest.mark.parametrize("image", [("api", {})], ids=["api"], indirect=True)
async def test_the_image_of_the_api_migrates_and_is_ready(image: Image, postgres: Databases) -> None:
    api, port = Environment(image.app / ".venv"), free_port()
    assert can_import(api, "PIL", "pyvips", "onnx", "pytest", "opentelemetry.sdk") == "['opentelemetry.sdk']"
    settings = {"API_PORT": str(port), "DATABASE_URL": await postgres.create_database(), "BROKER": "postgres"}
    settings |= {"OBJECT_STORE": "none"}
    migrating = await image.run("leasehold", "migrate", settings=settings)
    assert await migrating.wait() == 0, image.log()
    async with image.ready(f"http://127.0.0.1:{port}", settings) as process:
        if os.geteuid() == 0 and is_for_everybody(Path(python())):
            assert uid_of(process) == image.user[0]


@pytest.mark.parametrize("image", [("worker", {"HEIC": "heic"})], ids=["worker"], indirect=True)
async def test_the_image_of_the_worker_has_the_libraries_of_the_media_pipeline_and_is_ready(
    image: Image, postgres: Databases
) -> None:
    worker, port = Environment(image.app / ".venv"), free_port()
    assert can_import(worker, "PIL", "pyvips", "pi_heif", "onnx", "pytest") == "['PIL', 'pyvips', 'pi_heif']"
    worker.python("import leasehold.pipelines.media.steps")
    settings = {"DATABASE_URL": await postgres.create_database(), "BROKER": "postgres", "OBJECT_STORE": "none"}
    settings |= {"METRICS_PORT": str(port), "ISOLATION": "best_effort"}
    migrating = await image.run("leasehold", "migrate", settings=settings)
    assert await migrating.wait() == 0, image.log()
    async with image.ready(f"http://127.0.0.1:{port}", settings):
        pass


@pytest.mark.parametrize("image", [("worker", {"EXTRAS": "conversion heic"})], ids=["worker"], indirect=True)
async def test_an_image_of_the_worker_is_built_with_the_extras_that_somebody_asks_for(image: Image) -> None:
    worker = Environment(image.app / ".venv")
    assert can_import(worker, "PIL", "pi_heif", "onnx", "pytest") == "['PIL', 'pi_heif', 'onnx']"
    worker.python("import leasehold.pipelines.media.steps, leasehold.pipelines.conversion.steps")
