"""`leasehold dev` and `demo` work on their own servers, whatever the environment and `.env` name."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from leasehold.cli import dev
from leasehold.cli.installation import Installation, _load_upgrade, environment_with
from leasehold.embedded.process import EmbeddedError, Server
from leasehold.settings import Settings
from tests.support.databases import Databases


async def tables_of(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"))
    finally:
        await connection.close()


@pytest.mark.parametrize("named_by", ["the environment", "the .env of the folder"])
async def test_only_the_installations_own_database_is_migrated_and_used(
    postgres: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    own, foreign = [await postgres.create_database() for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    foreign_variables = {f"LEASEHOLD_DATABASE_{name}_URL": foreign for name in ("DIRECT", "REPLICA")}
    if named_by == "the environment":
        for name, url in foreign_variables.items():
            monkeypatch.setenv(name, url)
    else:
        (tmp_path / ".env").write_text("".join(f"{name}={url}\n" for name, url in foreign_variables.items()))
    installation = Installation(database_url=own, amqp_url="amqp://127.0.0.1:1/")
    installation._stack.directory = tmp_path
    installation.environment = installation._environment_of_processes(None)
    await installation._prepare_database(asyncio.create_task(asyncio.to_thread(_load_upgrade)))
    assert (await tables_of(own) > 0, await tables_of(foreign)) == (True, 0)
    monkeypatch.setattr(os, "environ", environment_with(installation.environment))
    settings = Settings()  # of the API and of the worker
    assert settings.direct().database_url.get_secret_value() == own
    assert settings.database_replica_url.get_secret_value() == ""
    for url in (own, foreign):
        await postgres.drop_database(url)


def test_secrets_in_files_do_not_contradict_the_installations_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API and the worker would refuse to start with a variable and its file."""
    monkeypatch.chdir(tmp_path)
    for name in ("SEALING_KEYS", "DATABASE_URL"):
        (tmp_path / name).write_text("from a file")
        monkeypatch.setenv(f"LEASEHOLD_{name}_FILE", str(tmp_path / name))
    installation = Installation(database_url="postgresql://own@127.0.0.1:1/own", amqp_url="amqp://127.0.0.1:1/")
    installation._stack.directory = tmp_path
    installation.environment = installation._environment_of_processes(None)
    monkeypatch.setattr(os, "environ", environment_with(installation.environment))
    settings = Settings()
    assert settings.database_url.get_secret_value() == "postgresql://own@127.0.0.1:1/own"
    assert settings.sealing_keys.get_secret_value() == "from a file"


def test_leasehold_dev_prints_the_addresses_of_metrics_only_if_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = Installation()
    installation.metrics = {"api": "http://127.0.0.1:1/metrics", "worker": "http://127.0.0.1:2/metrics"}
    monkeypatch.delenv("LEASEHOLD_METRICS", raising=False)
    assert dev._metrics_line(installation) == "metrics  http://127.0.0.1:1/metrics, http://127.0.0.1:2/metrics\n"
    monkeypatch.setenv("LEASEHOLD_METRICS", "false")
    assert dev._metrics_line(installation) == ""


async def test_after_a_restart_the_metrics_are_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`leasehold dev` prints the addresses once, at its start."""
    ports: list[tuple[str, str]] = []

    async def start(name: str, _argv: object, *, env: dict[str, str], **_options: object) -> Any:
        ports.append((name, env["LEASEHOLD_METRICS_PORT"]))
        return SimpleNamespace(name=name, stop=None)

    monkeypatch.setattr(Server, "start", start)
    installation = Installation()
    installation._stack.directory = tmp_path
    installation.environment = {"LEASEHOLD_DRAIN_SECONDS": "3"}
    stack = AsyncExitStack()
    for module in ("api", "worker", "worker", "api"):
        await installation._start(stack, module)
    stack.pop_all()
    assert ports[:2] == [ports[3], ports[2]]
    assert [f"http://127.0.0.1:{port}/metrics" for _, port in ports[:2]] == list(installation.metrics.values())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "intranet"}, "intranet,127.0.0.1"),
        ({"no_proxy": "lan", "NO_PROXY": "ignored"}, "lan,127.0.0.1"),
    ],
)
def test_no_process_of_the_installation_asks_a_proxy_for_its_servers(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    of_process = environment_with({})
    assert (of_process["no_proxy"], of_process["NO_PROXY"]) == (expected, expected)


async def test_the_installation_is_ready_although_the_environment_names_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a company's proxy the start failed after a minute: the proxy does not reach this machine."""

    async def answer(status: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        writer.close()

    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with (
        await asyncio.start_server(partial(answer, "200 OK"), "127.0.0.1", 0) as api,
        await asyncio.start_server(partial(answer, "403 Forbidden"), "127.0.0.1", 0) as proxy,
    ):
        address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.setattr("leasehold.cli.installation._START_SECONDS", 5.0)
        installation = Installation(port=api.sockets[0].getsockname()[1])
        process: Any = SimpleNamespace(name="api", running=True, failure=EmbeddedError)
        installation._processes.append(process)
        await installation._until_ready()
