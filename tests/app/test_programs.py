"""`async with app.serving()` in programs of every sort: what each sort of task runs in finds the program's code."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from leasehold import App, DeclarationError
from leasehold.app import program
from leasehold.app.process_child import task_of
from leasehold.app.serving import worker_of
from leasehold.celery import Celery
from leasehold.celery import app as facade
from leasehold.celery.apps import made_apps
from leasehold.db.database import Connection
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.settings import Settings, as_variables, servers_of_database
from leasehold.worker.sandbox.children import Children
from tests.app.conftest import Serve

SECONDS = 90.0
#: The module of a program without a file, such as that of `python -c`: no other process can import it.
NO_MODULE = "__mp_main__"
#: Each line that it prints is JSON: what a task has returned, or a word.
SCRIPT = """
    import asyncio, json, os
    from leasehold import App

    app = App("shop")
    print(json.dumps(f"imported as {__name__}"), flush=True)

    @app.task
    def in_thread(x: int) -> list[int | str]:
        return [x, __name__, os.getpid()]

    @app.task(process=True)
    def in_process(x: int) -> list[int | str]:
        return [x, __name__, os.getpid()]

    @app.task(isolated=True)
    def in_sandbox(x: int) -> list[int | str]:
        return [x, __name__, os.getpid()]

    async def main():
        print(json.dumps(os.getpid()), flush=True)
        async with app.serving():
            for task in (in_thread, in_process, in_sandbox):
                print(json.dumps(await (await task.asubmit(1))), flush=True)
"""
GUARDED = """
    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.fixture
def variables(settings: Settings, tmp_path: Path) -> dict[str, str]:
    """The environment of a program that uses the test's database, and no other server."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    servers = as_variables(servers_of_database(settings.database_url.get_secret_value()))
    return inherited | servers | {
        "LEASEHOLD_BROKER": "postgres",
        "LEASEHOLD_OBJECT_STORE": "none",
        "LEASEHOLD_TENANT": "me",
        "LEASEHOLD_ISOLATION": "best_effort",
        "LEASEHOLD_POLL_SECONDS": "0.05",
        "LEASEHOLD_WORK_DIR": str(tmp_path / "work"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip


def write(path: Path, *parts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(dedent(part) for part in parts))


async def run(*arguments: str, folder: Path, variables: dict[str, str]) -> tuple[int, list[Any], str]:
    """Run Python with these arguments. Returns its status, the lines of JSON that it printed, and its error output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=folder, env=variables,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in output.decode().splitlines()], errors.decode()


RUNS = {
    "a script": ("shop.py", ["shop.py"], "shop"),
    "a script in another folder": ("tools/my-shop.py", ["tools/my-shop.py"], "my-shop"),
    "a module": ("store/shop.py", ["-m", "store.shop"], "store.shop"),
    "a package": ("store/__main__.py", ["-m", "store"], "store.__main__"),
}


@pytest.mark.parametrize("how", RUNS)
async def test_a_program_that_serves_itself_runs_each_sort_of_task(
    how: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    file, arguments, name = RUNS[how]
    write(tmp_path / file, SCRIPT, GUARDED)
    status, lines, errors = await run(*arguments, folder=tmp_path, variables=variables)
    assert status == 0, errors
    in_thread, in_process, in_sandbox = (line for line in lines if isinstance(line, list))
    (own_pid,) = (line for line in lines if isinstance(line, int))  # the part below `if __name__` ran once
    assert in_thread == [1, "__main__", own_pid]
    assert in_process[:2] == in_sandbox[:2] == [1, name]
    assert len({own_pid, in_process[2], in_sandbox[2]}) == 3


NAMES = """
    import asyncio, json, sys
    from leasehold.celery import Celery

    shop = Celery("shop")
    app = shop.app

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    @shop.task
    def double(x):
        return 2 * x

    @shop.task(name="names.renamed")
    def other(x):
        return x

    @shop.task(name="elsewhere.renamed")
    def another(x):
        return x

    def names():
        return [*app.tasks, *shop.tasks]

    if __name__ == "__main__":
        print(json.dumps(names()))
        print(json.dumps([add.submit(1, 2).result(), (double.s(2) | double.s()).delay().get(timeout=60)]))
"""


async def test_a_worker_that_imports_a_script_takes_what_the_script_submits(
    tmp_path: Path, variables: dict[str, str], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks have the same names here and there. A chain names its calls by the names that Celery gives."""
    monkeypatch.setattr(facade, "_shared_declarations", [])  # those of other tests are of every app of this process
    write(tmp_path / "names.py", NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    script: Any = importlib.import_module("names")
    try:
        async with serve(script.app, broker="postgres"):
            status, lines, errors = await run("names.py", folder=tmp_path, variables=variables)
        assert (status, lines[1:]) == (0, [[3, 8]]), errors
        assert lines[0] == script.names()
        assert script.names()[-3:] == ["names.double", "names.renamed", "elsewhere.renamed"]
        assert "shop.renamed" in script.names()
        assert "shop.elsewhere-renamed" in script.names()
    finally:
        made_apps.remove(script.shop)
        del sys.modules["names"]


def test_a_celery_task_of_a_program_that_cannot_be_imported_has_the_name_of_its_app_as_in_celery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, NO_MODULE, ModuleType(NO_MODULE))

    def add(x: int) -> int:
        return x

    add.__module__ = NO_MODULE
    shop = Celery("shop.tasks")
    try:
        task = shop.task(add)
        assert (task.name, task.task.name) == ("shop.tasks.add", "shop-tasks.add")
    finally:
        made_apps.remove(shop)


async def test_a_program_whose_modules_declare_the_tasks_serves_them_all(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """One of them can be imported only after the app's module, and one names the app only by that module."""
    write(tmp_path / "core.py", "from leasehold import App\napp = App('shop')\nfrom first import one\n")
    task = "@{app}.task(isolated=True)\ndef {name}(x: int) -> list[str]:\n    return [__name__]\n"
    write(tmp_path / "first.py", "from core import app\n", task.format(app="app", name="one"))
    write(tmp_path / "second.py", "import core\n", task.format(app="core.app", name="two"))
    serves = """
        import asyncio, json, core, second
        from core import app
        from first import one

        async def main():
            async with app.serving():
                print(json.dumps([await (await task.asubmit(1)) for task in (one, second.two)]))

        asyncio.run(main())
    """
    write(tmp_path / "run.py", serves)
    status, lines, errors = await run("run.py", folder=tmp_path, variables=variables)
    assert (status, lines) == (0, [[["first"], ["second"]]]), errors


IN_PROCESS_ALONE = SCRIPT.replace("@app.task(isolated=True)", "@app.task")
IN_SANDBOX_ALONE = SCRIPT.replace("@app.task(process=True)", "@app.task")


@pytest.mark.parametrize(
    ("arguments", "source", "words"),
    [
        (["shop"], IN_PROCESS_ALONE + GUARDED, "no other process can import the program of shop.in_process: put the"),
        (["shop"], IN_SANDBOX_ALONE + GUARDED, "no other process can import the program of shop.in_sandbox: put the"),
        (["-c"], IN_PROCESS_ALONE + GUARDED, "no other process can import the program of shop.in_process: put the"),
        (["shop.py"], IN_PROCESS_ALONE + "\n    asyncio.run(main())\n", "shop.py serves its app when it is imported"),
        (["shop.py"], IN_SANDBOX_ALONE + "\n    asyncio.run(main())\n", "shop.py serves its app when it is imported"),
    ],
)
async def test_a_program_that_its_processes_cannot_import_is_refused_before_anything_starts(
    arguments: list[str], source: str, words: str, tmp_path: Path, variables: dict[str, str], connection: Connection
) -> None:
    if arguments == ["-c"]:
        arguments = ["-c", dedent(source)]
    else:
        write(tmp_path / arguments[0], source)
    status, lines, errors = await run(*arguments, folder=tmp_path, variables=variables)
    assert status == 1
    assert "leasehold.domain.errors.DeclarationError: " in errors
    assert words in errors
    assert [line for line in lines if isinstance(line, str)] == ["imported as __main__"]  # no process has begun
    assert await connection.fetchval("SELECT count(*) FROM job") == 0


async def test_a_script_without_processes_needs_no_name_and_no_guard(tmp_path: Path, variables: dict[str, str]) -> None:
    plain = SCRIPT.replace("(process=True)", "").replace("(isolated=True)", "")
    write(tmp_path / "shop", plain, "asyncio.run(main())\n")
    status, lines, errors = await run("shop", folder=tmp_path, variables=variables)
    assert (status, len([line for line in lines if isinstance(line, list)])) == (0, 3), errors


async def test_a_program_that_serves_in_spite_of_its_guard_starts_no_worker_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start processes of its own, without end."""
    write(tmp_path / "serves.py", IN_SANDBOX_ALONE, "    asyncio.run(main())\n")
    write(tmp_path / "serves_too.py", IN_PROCESS_ALONE, "    asyncio.run(main())\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = "serves its app when it is imported, and the processes of its tasks import it: put what it runs"
    with pytest.raises(DeclarationError, match=words):
        await asyncio.to_thread(task_of, "serves_too", "shop.in_process")
    children = Children(1, pipelines=["shop.in_sandbox"], work_dir=tmp_path / "work", source="serves:app")
    with pytest.raises(DeclarationError, match=words):
        await children.start()


def test_a_registry_of_the_settings_takes_the_place_of_an_app_that_no_module_has(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("made")

    @app.task(isolated=True)
    def thumb() -> None: ...

    settings = Settings(_env_file=None, database_url=settings.database_url)
    with pytest.raises(DeclarationError, match="the app made is not a global variable of a module"):
        program.source_of_children(app, ["made.thumb"], settings)
    module: Any = ModuleType("registry_of_made")
    module.registry, module.other = app.pipelines, App("other").pipelines
    monkeypatch.setitem(sys.modules, "registry_of_made", module)
    given = settings.model_copy(update={"pipelines": "registry_of_made:registry"})
    assert program.source_of_children(app, ["made.thumb"], given) == ("registry_of_made:registry", [__name__])
    given = settings.model_copy(update={"pipelines": "registry_of_made:other"})
    words = "made.thumb is not in registry_of_made:other .LEASEHOLD_PIPELINES., from which its process loads it"
    with pytest.raises(DeclarationError, match=words):
        program.source_of_children(app, ["made.thumb"], given)


async def test_only_what_the_worker_serves_needs_a_program_that_processes_can_import(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, NO_MODULE, ModuleType(NO_MODULE))
    app = App("made")

    @app.task(isolated=True)
    def thumb() -> None: ...

    def digest() -> None: ...

    digest.__module__, digest.__qualname__ = NO_MODULE, "digest"
    app.task(process=True, queue="digests")(digest)
    app.add(Pipeline("scan", steps=[Step("run", queue="scans", isolated=True)], module="nowhere"))
    for queue, words in (
        ("isolated", "the app made is not a global variable of a module"),
        ("scans", "the app made is not a global variable of a module"),
        ("digests", "no other process can import the program of made.digest"),
    ):
        with pytest.raises(DeclarationError, match=words):
            worker_of(app, settings.model_copy(update={"worker_queues": queue}))
    worker_of(app, settings.model_copy(update={"worker_queues": "webhooks"}))
