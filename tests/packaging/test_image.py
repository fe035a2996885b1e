"""The steps of deploy/Dockerfile, done by hand where there is no engine: what an image would have runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from leasehold.embedded.ports import free_port
from tests.packaging.built import ROOT, Environment, Programs, run, uv
from tests.support.databases import Databases

pytestmark = pytest.mark.timeout(240)
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
#: What the builder may see.
CONTEXT = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}


def steps(stage: str) -> list[str]:
    """What the stage copies and runs, in order: uv itself is here already."""
    text = re.search(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM )", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert text is not None, stage
    lines = re.findall(r"^((?:COPY|RUN) .+)$", text[1], re.MULTILINE)
    return [line for line in lines if not line.startswith("RUN pip") and "/tmp/uv.txt" not in line]  # noqa: S108 - theirs


def follow(stage: str, app: Path) -> None:
    """What the engine does in /app."""
    here = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    here |= {"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    done = steps(stage)
    assert done
    for step in done:
        instruction, *words = shlex.split(step)
        if instruction == "COPY":
            *sources, target = words
            assert set(sources) <= CONTEXT
            for source in sources:
                copy(ROOT / source, app / target)
        else:
            assert words[:2] == ["uv", "sync"]
            arguments = ["heic" if word == "$HEIC" else word for word in words[1:]]
            run([uv(), *arguments], cwd=app, env=here)


def copy(source: Path, target: Path) -> None:
    """As the engine: a folder's content, and its links as links."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def can_import(programs: Environment, *names: str) -> str:
    return programs.python(
        f"from importlib.util import find_spec; print([n for n in {names!r} if find_spec(n)])"
    ).strip()


async def test_what_the_images_copy_migrates_and_answers_without_the_folders_it_was_built_of(
    tmp_path: Path, postgres: Databases
) -> None:
    app, elsewhere = tmp_path / "app", tmp_path / "elsewhere"
    app.mkdir()
    elsewhere.mkdir()
    follow("build", app)
    for entry in app.iterdir():  # the last stage copies .venv alone
        if entry.name != ".venv":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    api = Environment(app / ".venv")
    assert can_import(api, "PIL", "pyvips", "onnx", "pytest", "opentelemetry.sdk") == "['opentelemetry.sdk']"
    port = free_port()
    settings = {"API_PORT": str(port), "DATABASE_URL": await postgres.create_database(), "BROKER": "postgres"}
    programs = Programs(api, elsewhere, settings | {"OBJECT_STORE": "none"})
    await programs.run("migrate")
    async with programs.serve("api") as serving:
        await serving.answers(f"http://127.0.0.1:{port}")


def test_the_image_of_the_worker_has_the_libraries_of_the_media_pipeline(tmp_path: Path) -> None:
    follow("build", tmp_path)
    follow("build-worker", tmp_path)
    worker = Environment(tmp_path / ".venv")
    assert can_import(worker, "PIL", "pyvips", "pi_heif", "onnx", "pytest") == "['PIL', 'pyvips', 'pi_heif']"
    worker.python("import leasehold.pipelines.media.steps")
