"""The file of a running `leasehold dev`: what it holds comes back as it was, and only while its process lives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from leasehold.app.connection import settings_of_folder
from leasehold.app.dev_file import dev_file, dev_variables
from leasehold.cli.running import join_dev
from leasehold.settings import Settings, as_variables, servers_of_database


def test_every_value_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"A": "it's", "B": "'quoted'", "C": 'a "b" \\ $HOME', "D": "", "E": "a=b", "F": "two\nlines"}
    with dev_file(variables):
        assert dev_variables() == variables
    assert dev_variables() == {}


def test_a_program_reads_every_value_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reader of such files would keep the quotes, and put in the variables of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    secret = "it's a \\ ${HOME}"
    variables = {
        "LEASEHOLD_S3_SECRET_KEY": secret,
        "LEASEHOLD_TENANT": "dev",
        "LEASEHOLD_S3_BUCKET": "dev",
    }
    with dev_file(variables):
        settings = settings_of_folder()
        assert settings.s3_secret_key.get_secret_value() == secret
        (tmp_path / ".env").write_text("LEASEHOLD_TENANT=of-the-folder\nLEASEHOLD_S3_BUCKET=of-the-folder\n")
        monkeypatch.setenv("LEASEHOLD_S3_BUCKET", "of-the-environment")
        settings = settings_of_folder()
        assert (settings.tenant, settings.s3_bucket) == ("of-the-folder", "of-the-environment")


def test_a_file_that_the_environment_names_goes_before_the_dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("from a file")
    monkeypatch.setenv("LEASEHOLD_S3_SECRET_KEY_FILE", str(tmp_path / "key"))
    with dev_file({"LEASEHOLD_S3_SECRET_KEY": "of the dev", "LEASEHOLD_S3_ACCESS_KEY": "of the dev"}):
        settings = settings_of_folder()
    assert settings.s3_secret_key.get_secret_value() == "from a file"
    assert settings.s3_access_key.get_secret_value() == "of the dev"


@pytest.mark.parametrize("named_by", ["the environment", "a file", "the .env of the folder"])
def test_who_takes_the_database_of_the_dev_takes_no_server_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("LEASEHOLD_DATABASE_DIRECT_URL", "LEASEHOLD_DATABASE_REPLICA_URL")
    (tmp_path / "url").write_text("postgresql://foreign@localhost/foreign")
    own = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    if named_by == "the environment":
        own |= dict.fromkeys(names, "postgresql://foreign@localhost/foreign")
    elif named_by == "a file":
        own |= {f"{name}_FILE": str(tmp_path / "url") for name in names}
    else:
        (tmp_path / ".env").write_text("".join(f"{name}=postgresql://foreign@localhost/foreign\n" for name in names))
    monkeypatch.setattr(os, "environ", own)
    with dev_file(as_variables(servers_of_database("postgresql://dev@localhost/dev"))):
        of_programs = settings_of_folder()
        join_dev()
    for settings in (of_programs, Settings()):
        assert settings.direct().database_url.get_secret_value() == "postgresql://dev@localhost/dev"
        assert settings.database_replica_url.get_secret_value() == ""


@pytest.mark.parametrize("process", ["{}", "{} 1"])
def test_the_file_of_a_killed_dev_is_not_believed_when_another_process_has_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    """After a restart of the machine or of a container the ids come again."""
    monkeypatch.chdir(tmp_path)
    with dev_file({"A": "b"}) as path:
        text = path.read_text()
    assert not path.exists()
    path.write_text(text.replace(text.partition("\n")[0], f"# of the process {process.format(os.getpid())}"))
    assert dev_variables() == {}


def test_a_dev_that_was_killed_and_not_yet_collected_does_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = (
        "from leasehold.app.dev_file import dev_file\nwith dev_file({'A': 'b'}):\n    print(flush=True)\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as dev:
        assert dev.stdout is not None
        dev.stdout.readline()
        assert dev_variables() == {"A": "b"}
        dev.kill()
        os.waitid(os.P_PID, dev.pid, os.WEXITED | os.WNOWAIT)
        assert dev_variables() == {}


def test_when_a_second_dev_of_the_folder_ends_programs_find_the_first_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with dev_file({"A": "first"}) as path:
        with dev_file({"A": "second"}):
            assert dev_variables() == {"A": "second"}
        assert dev_variables() == {"A": "first"}
    assert not path.exists()
    path.write_text("# of the process 1 1\nA='dead'\n")
    with dev_file({"A": "third"}):
        assert dev_variables() == {"A": "third"}
    assert not path.exists()


def test_a_dev_leaves_the_file_of_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with dev_file({"A": "first"}) as path:
        path.write_text("# of the process 1 1\nA='later'\n")
    assert path.read_text().endswith("A='later'\n")


@pytest.mark.parametrize("named_by", ["nothing", "the environment", "the .env of the folder"])
def test_a_worker_joins_the_dev_of_its_folder_unless_a_database_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named_by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    mine = "postgresql://mine@localhost/mine"
    if named_by == "the environment":
        own["LEASEHOLD_DATABASE_URL"] = mine
    if named_by == "the .env of the folder":
        (tmp_path / ".env").write_text(f"LEASEHOLD_DATABASE_URL={mine}\n")
    own["LEASEHOLD_TENANT"] = "me"
    monkeypatch.setattr(os, "environ", own)
    theirs = {"LEASEHOLD_DATABASE_URL": "postgresql://dev@localhost/dev", "LEASEHOLD_TENANT": "dev"}
    joins = named_by == "nothing"
    with dev_file(theirs):
        join_dev()
    assert own.get("LEASEHOLD_DATABASE_URL") == {
        "nothing": theirs["LEASEHOLD_DATABASE_URL"], "the environment": mine, "the .env of the folder": None
    }[named_by]  # fmt: skip
    assert own["LEASEHOLD_TENANT"] == "me"
    assert ("joins the `leasehold dev` of this folder" in capsys.readouterr().err) is joins
    join_dev()  # none runs here: nothing changes
    assert capsys.readouterr().err == ""


SUBMITS = """
from leasehold import App

app = App("shop")


@app.task
def send(order: int) -> int:
    return order


for _ in range(2):  # the next try opens the connection again
    try:
        send.submit(1)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LEASEHOLD_DATABASE_URL", "mysql://user:pa55word@host/db"),
        ("LEASEHOLD_AMQP_URL", "amqp://user:pa55word@host:port/"),
        ("LEASEHOLD_S3_ENDPOINT", "pa55word:9000"),
        ("LEASEHOLD_API_PORT", "pa55word"),
        ("LEASEHOLD_POOLS", "{pa55word"),
    ],
)
async def test_a_program_with_a_wrong_variable_gets_an_error_that_names_it(
    tmp_path: Path, variable: str, value: str
) -> None:
    """A wrong URL ended the thread that connects, and the program waited for it for ever."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("LEASEHOLD_")}
    async with asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SUBMITS, cwd=tmp_path, env=environment | {variable: value}, stdout=PIPE, stderr=PIPE
        )
        out, errors = await process.communicate()
    assert [line.partition(": ")[0] for line in out.decode().splitlines()] == [f"BadSetting {variable}"] * 2
    assert (errors, b"pa55word" in out) == (b"", False)
